"""Truth: one small rollout with right digests, its ledger, its receipts and the rows that they give.

c0 (root) ── c1 ── c2 (terminal)
         └── c3 (a retry of c1, with an answer of its own)       c4: refused before it began, harmless
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from chains import Chain

from workbench.finalizer.verify import LinearizedRow, verify_and_linearize
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.wire import FINGERPRINT_VERSION, RolloutCommit, RolloutReceipt, StagedCall, assistant_fingerprint

R = "run.0.0.0"
Items = list[dict[str, Any]]


def _tell() -> dict[str, tuple[str | None, Items, Items]]:
    """Call → its parent, what was asked, what was answered."""
    call = {"id": "t1", "type": "function", "function": {"name": "search", "arguments": '{"q":"Rome"}'}}
    asked: Items = [{"role": "user", "content": "weather?"}]
    first: Items = [{"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    again = [*asked, *first, {"role": "tool", "tool_call_id": "t1", "content": "rain"}]
    second: Items = [{"role": "assistant", "content": "It rains."}]
    last = [*again, *second, {"role": "user", "content": "and then?"}]
    return {
        "c0": (None, asked, first),
        "c1": ("c0", again, second),
        "c2": ("c1", last, [{"role": "assistant", "content": "Sun."}]),
        "c3": ("c0", again, [{"role": "assistant", "content": "Rain \U0001f327."}]),
    }


CALLS = _tell()
TERMINAL = {"id": "resp-c2", "choices": [{"message": CALLS["c2"][2][0]}]}


@cache
def chain() -> Chain:
    grown = Chain(R)
    for call_id, (parent, _, _) in CALLS.items():
        grown.call(parent, call_id=call_id, extras={"finish_reason": "stop"})
    for position, record in enumerate(grown.records):
        _, asked, answered = CALLS[record.model_call_id]
        grown.records[position] = record.model_copy(
            update={
                "output_fingerprint": assistant_fingerprint(answered),
                "continuation_fingerprint": assistant_fingerprint([*asked, *answered]),
                "fingerprint_version": FINGERPRINT_VERSION,
            }
        )
    return grown


def write_ledger(directory: Path) -> Path:
    """The rollout's ledger file; returns its path."""
    store = LedgerStore(directory)
    chains: dict[str, list[str]] = {}
    for record in chain().records:
        parent, asked, answered = CALLS[record.model_call_id]
        chains[record.model_call_id] = [*chains.get(parent or "", []), record.staging_key]
        commit = RolloutCommit(rollout_id=R, record=record, staging_chain=chains[record.model_call_id])
        store.record(commit, asked, answered)
    store.record_failure(R, "c4", "request_finished_without_staged_coordinates", "HTTP 400")
    return directory / f"{R}.lineage.jsonl"


def receipt_for(store: LedgerStore) -> RolloutReceipt:
    return assemble_receipt(store.manifest(R), rollout_id=R, reward=1.0, response=TERMINAL)


def staged_for(receipt: RolloutReceipt) -> list[StagedCall] | None:
    """The stored deltas of a manifest, in its order; None where one is not in storage."""
    there = {call.staging_key: call for call in chain().staged}
    keys = [record.staging_key for record in receipt.manifest]
    return [there[key] for key in keys] if all(key in there for key in keys) else None


@cache
def true_row(terminal: str) -> LinearizedRow:
    return verify_and_linearize(chain().receipt(terminal), chain().staged)


def assert_true(row: LinearizedRow) -> None:
    """The row is that of its terminal call, field by field."""
    expected = true_row(row.model_call_ids[-1])
    for field in dataclasses.fields(row):
        came, true = getattr(row, field.name), getattr(expected, field.name)
        assert np.array_equal(came, true) if isinstance(true, np.ndarray) else came == true, field.name
