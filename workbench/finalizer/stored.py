"""Stored: read back what a group left in the run store, to publish it again or to answer for it.

    calls, rows and receipts of <group>  ──read_group──▶  the rows as they were published, and what is said of them

Invariant: a group is either given back whole, row for row what was published, or it is not there; the receipts are
written last, so a group whose finalizer died in between counts as not stored.
Not here: writing (parts), frames for people (workbench.runs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from workbench.errors import RunStoreError
from workbench.finalizer.messages import FinalizedGroup, RolloutOutcome, RowSummary
from workbench.finalizer.metrics import group_metrics
from workbench.finalizer.parts import is_whole, part_paths
from workbench.finalizer.routes import RoutePlan, fill_routes, fragment_of
from workbench.finalizer.rows import GroupRow
from workbench.finalizer.spans import settings_of
from workbench.places import as_word
from workbench.runs.frames import read_parts
from workbench.runs.schema import columns
from workbench.runs.staged import together
from workbench.wire import Cause, extras_digest

_ARRAYS = {"token_ids": np.uint64, "token_mask": np.uint8, "logprobs": np.float32}
_JSON = ("reward_components", "weight_version_spans", "link_spans")


@dataclass(frozen=True)
class StoredGroup:
    """One stored group: `rows[i]`, `summaries[i]` and `outcomes[i]` belong together, in index order."""

    group_id: str
    rows: list[GroupRow]
    summaries: list[RowSummary]
    outcomes: list[RolloutOutcome]

    @property
    def train_keys(self) -> list[str]:
        return [row.rollout_id for row in self.rows]

    def finalized(self, weight_version: int, timings_s: dict[str, float]) -> FinalizedGroup:
        """The answer that the group's finalizer gave, or would have given. `weight_version`: that of its dispatch."""
        return FinalizedGroup(
            group_id=self.group_id,
            weight_version=weight_version,
            train_keys=self.train_keys,
            rows=self.summaries,
            metrics=group_metrics(self.outcomes, self.summaries, self.rows),
            timings_s=timings_s,
        )


def read_group(run_dir: Path, group_id: str) -> StoredGroup | None:
    """A stored group; None when it was never stored, or not to the end. Blocks.

    Raises RunStoreError when its parts are there and cannot be read, or do not belong together.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not is_whole(run_dir, group_id):
        return None
    calls_part, rows_part, receipts_part = part_paths(run_dir, group_id)
    try:
        table = pq.read_table(rows_part)
        lines = receipts_part.read_bytes().splitlines()
        outcomes = [RolloutOutcome.model_validate(orjson.loads(line)) for line in lines]
        columns = {name: _column(table, name) for name in table.column_names}
        extras = _extras(pq.read_table(calls_part, columns=["rollout_id", "model_call_id", "extras"]))
        rows = [_row({name: values[i] for name, values in columns.items()}, extras) for i in range(table.num_rows)]
        plans = {row.rollout_id: RoutePlan.of(row.route_plan) for row, _ in rows if row.route_plan is not None}
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise RunStoreError(
            f"group {group_id} in {run_dir} cannot be read back: {str(error).rstrip('.')}. Next: workbench verify "
            f"{run_dir} names all that is damaged."
        ) from error
    if plans:
        fragments = stored_fragments(run_dir, group_id, plans)
        rows = [(_with_routes(row, plans, fragments), summary) for row, summary in rows]
    if [row.rollout_id for row, _ in rows] != [outcome.rollout_id for outcome in outcomes]:
        raise RunStoreError(f"{rows_part} and {receipts_part} are not about the same rollouts")
    return StoredGroup(group_id, [row for row, _ in rows], [summary for _, summary in rows], outcomes)


Fragments = dict[str, dict[str, np.ndarray | None]]
"""Routes [tokens, layers, topk] by rollout id and call id."""


def stored_fragments(run_dir: Path, group_id: str, plans: Mapping[str, RoutePlan]) -> Fragments:
    """The routes of every call that `plans`, by rollout id, take some from. Blocks.

    Raises RunStoreError where a part cannot be read, lacks a call, or a call's extras do not give the digest that the
    plan names: cause route_missing or route_digest_mismatch.
    """
    wanted = {
        (rollout_id, span.call_id): span
        for rollout_id, plan in plans.items()
        for span in plan.spans
        if span.fault is None
    }
    path = run_dir / "calls" / f"{group_id}.parquet"
    stored = read_parts("calls", [path], ["rollout_id", "model_call_id", "extras", "routes"])
    found: Fragments = {rollout_id: {} for rollout_id in plans}
    for rollout_id, call_id, text, routes in stored.iter_rows():
        span = wanted.get((rollout_id, call_id))
        if span is None:
            continue
        extras = together(None if text is None else orjson.loads(text), routes)
        if extras_digest(extras) != span.extras_digest:
            raise RunStoreError(
                f"{path}: {Cause.ROUTE_DIGEST_MISMATCH}: the extras of call {call_id} are not those of digest "
                f"{span.extras_digest}, so its routed experts cannot be used. Next: workbench verify {as_word(run_dir)}"
            )
        found[rollout_id][call_id] = fragment_of(extras)
    lost = [call_id for rollout_id, call_id in wanted if found[rollout_id].get(call_id) is None]
    if lost:
        raise RunStoreError(f"{path}: {Cause.ROUTE_MISSING}: call {lost[0]} has no routed experts there")
    return found


def _with_routes(row: GroupRow, plans: Mapping[str, RoutePlan], fragments: Fragments) -> GroupRow:
    plan = plans.get(row.rollout_id)
    return (
        row if plan is None else replace(row, routes=fill_routes(plan, row.token_ids.size, fragments[row.rollout_id]))
    )


def _column(table: Any, name: str) -> list[Any]:
    if name not in _ARRAYS:
        return table[name].to_pylist()
    return [np.asarray(value.values, dtype=_ARRAYS[name]) for value in table[name]]


_Extras = dict[tuple[str, str], dict[str, Any]]
"""The digested extras of every call that has some, by rollout and call id."""


def _extras(table: Any) -> _Extras:
    names = ("rollout_id", "model_call_id", "extras")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return {(rollout_id, call_id): orjson.loads(text) for rollout_id, call_id, text in rows if text is not None}


def _row(values: dict[str, Any], extras: _Extras) -> tuple[GroupRow, RowSummary]:
    values |= {name: orjson.loads(values[name]) for name in _JSON}
    plan = values.get("route_plan")
    values |= {"route_plan": None if plan is None else orjson.loads(plan), "routes": None}
    values["sampling"] = [settings_of(extras.get((values["rollout_id"], i))) for i in values["model_call_ids"]]
    values = {column.name: None for column in columns("rows") if column.optional} | values
    row = GroupRow(**{field.name: values[field.name] for field in fields(GroupRow)})
    return row, RowSummary(**{name: values[name] for name in RowSummary.model_fields})
