"""Parts: what a group leaves in the run store, written by its finalizer before staging is cleared.

    calls/<group>.parquet     every recorded call, rejected rollouts and side branches too, with its delta and digests
    rows/<group>.parquet      the N rows as they were published
    receipts/<group>.jsonl    the N outcomes: receipt, failures, reward

Invariants: each file is whole and fsynced or not there; receipts come last; the calls part lets every digest be
recomputed without any other file (where a staged call differs from the manifest's record, `snapshot` holds the staged
fields).
Not here: which columns there are (`workbench.runs.schema`), reading them back (`workbench.runs`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import FinalizerError
from workbench.finalizer.group import Assembly
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.verdicts import Staged
from workbench.ledger.receipts import calls_of_chain
from workbench.runs.schema import columns
from workbench.runs.staged import apart
from workbench.runs.writer import dumps, write_lines, write_part
from workbench.wire import CallRecord, Cause, StagedCall
from workbench.wire.extras import FINISH_REASON

PARTS = {"calls": "parquet", "rows": "parquet", "receipts": "jsonl"}
"""Kind and ending of a group's files, in the order in which they are written."""
_GROUP_ID = re.compile(r"(?!\.+\Z)[A-Za-z0-9._-]{1,200}")
_RECORDED = [c.name for c in columns("calls") if c.name in CallRecord.model_fields]
_COMPARED = [name for name in _RECORDED if name in StagedCall.model_fields]


def part_paths(run_dir: Path, group_id: str) -> list[Path]:
    """Where the parts of a group lie, or would: calls, rows, receipts."""
    return [run_dir / kind / f"{group_id}.{ending}" for kind, ending in PARTS.items()]


def is_whole(run_dir: Path, group_id: str) -> bool:
    """Whether a group was stored to the end."""
    return all(path.exists() for path in part_paths(run_dir, group_id))


def write_group(run_dir: Path, request: FinalizationRequest, staged: Staged, assembly: Assembly) -> None:
    """Write the three parts of a captured group. Raises as `write_parts`."""
    write_parts(run_dir, request, call_records(request, staged), assembly)


def write_parts(run_dir: Path, request: FinalizationRequest, calls: list[dict[str, Any]], assembly: Assembly) -> None:
    """Write the three parts of a group; `calls` are rows of the table of that name, where a left-out column is null.

    Raises FinalizerError on a group id that is no file name, RunStoreError, or OSError when the disk does not take
    them.
    """
    name = request.group_id
    if _GROUP_ID.fullmatch(name) is None:
        raise FinalizerError(f"group id {name!r} must be 1-200 characters of A-Z a-z 0-9 . _ - and not only dots")
    calls_part, rows_part, receipts_part = part_paths(run_dir, name)
    write_part(calls_part, "calls", _by_column("calls", calls))
    write_part(rows_part, "rows", _by_column("rows", row_records(request, assembly)))
    write_lines(receipts_part, [o.model_dump(mode="json") for o in request.rollouts])


def _by_column(table: str, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = [column.name for column in columns(table)]
    return {name: [row.get(name) for row in rows] for name in names}


def call_records(request: FinalizationRequest, staged: Staged) -> list[dict[str, Any]]:
    """The rows of table `calls` of a captured group, in index and manifest order; a left-out column is null."""
    return [row for outcome in request.rollouts for row in _calls_of(request.group_id, outcome, staged)]


def _calls_of(group_id: str, outcome: RolloutOutcome, staged: Staged) -> list[dict[str, Any]]:
    receipt = outcome.receipt
    records = receipt.manifest if receipt is not None else []
    chain = set() if receipt is None else calls_of_chain(records, receipt.terminal_model_call_id)
    rows = []
    for place, record in enumerate(records):
        call = staged[record.staging_key]
        rows.append(
            {
                "group_id": group_id,
                "rollout_id": outcome.rollout_id,
                "manifest_index": place,
                "disposition": "staged",
                "on_chain": record.model_call_id in chain,
                "terminal": receipt is not None and record.model_call_id == receipt.terminal_model_call_id,
                **{name: getattr(record, name) for name in _RECORDED},
                **_delta(outcome.rollout_id, record, call),
            }
        )
    for place, failure in enumerate(outcome.failures, start=len(records)):
        rows.append(
            {
                "group_id": group_id,
                "rollout_id": outcome.rollout_id,
                "model_call_id": failure.model_call_id,
                "manifest_index": place,
                "disposition": "failed",
                "failure_reason": failure.reason,
                "detail": failure.detail,
                "on_chain": False,
                "terminal": False,
            }
        )
    return rows


def _delta(rollout_id: str, record: CallRecord, call: StagedCall | Exception) -> dict[str, Any]:
    if not isinstance(call, StagedCall):
        return {"staging": getattr(call, "cause", Cause.MISSING_STAGING_ROW), "detail": str(call)}
    extras, routes = apart(call.extras)
    mask_T = call.token_mask_delta
    sampled = int(np.count_nonzero(mask_T))
    finish_reason = (call.extras or {}).get(FINISH_REASON)
    differing = {n: getattr(call, n) for n in _COMPARED if getattr(call, n) != getattr(record, n)}
    if call.rollout_id != rollout_id:
        differing["rollout_id"] = call.rollout_id
    return {
        "staging": "fetched",
        "carry_tokens": int(mask_T.size) - sampled,
        "sampled_tokens": sampled,
        "finish_reason": finish_reason if isinstance(finish_reason, str) else None,
        "extras": None if call.extras is None else dumps(extras).decode(),
        "routes": routes,
        "snapshot": dumps(differing).decode(),
        "token_ids": call.token_ids_delta,
        "token_mask": mask_T,
        "logprobs": call.generation_log_probs_delta,
    }


def row_records(request: FinalizationRequest, assembly: Assembly) -> list[dict[str, Any]]:
    """The rows of table `rows`, every column, in index order."""
    rows = []
    for outcome, row, summary in zip(request.rollouts, assembly.rows, assembly.summaries, strict=True):
        receipt = outcome.receipt
        rows.append(
            {
                **summary.model_dump(mode="json"),
                "group_id": request.group_id,
                "reward_components": dumps(outcome.reward_components).decode(),
                "terminal_model_call_id": receipt.terminal_model_call_id if receipt else None,
                "terminal_attribution_reason": receipt.terminal_attribution_reason if receipt else None,
                "capture_poisoned": receipt.capture_poisoned if receipt else None,
                "failure_reason": receipt.failure_reason if receipt else None,
                "calls": len(receipt.manifest) if receipt else 0,
                "failed_calls": len(outcome.failures),
                "unresolved_calls": sum(f.reason == Cause.UNRESOLVED_PARENT for f in outcome.failures),
                "model_call_ids": row.model_call_ids,
                "weight_versions": row.weight_versions,
                "weight_version_spans": dumps(row.weight_version_spans).decode(),
                "link_spans": dumps(row.link_spans).decode(),
                "route_plan": None if row.route_plan is None else dumps(row.route_plan).decode(),
                "token_ids": row.token_ids,
                "token_mask": row.token_mask,
                "logprobs": row.logprobs,
            }
        )
    return rows
