"""Stored: read back what a group left in the run store, to publish it again or to answer for it.

    calls, rows and receipts of <group>  ──read_group──▶  the rows as they were published, and what is said of them

Invariant: a group is either given back whole, row for row what was published, or it is not there; the receipts are
written last, so a group whose finalizer died in between counts as not stored.
Not here: writing (parts), frames for people (workbench.runs).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from workbench.errors import RunStoreError
from workbench.finalizer.group import FinalizedGroup, RolloutOutcome, RowSummary
from workbench.finalizer.metrics import group_metrics
from workbench.finalizer.rows import GroupRow
from workbench.finalizer.spans import settings_of

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
            metrics=group_metrics(self.outcomes, self.summaries),
            timings_s=timings_s,
        )


def read_group(run_dir: Path, group_id: str) -> StoredGroup | None:
    """A stored group; None when it was never stored, or not to the end. Blocks.

    Raises RunStoreError when its parts are there and cannot be read, or do not belong together.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [run_dir / kind / f"{group_id}.{suffix}" for kind, suffix in _PARTS.items()]
    if not all(path.exists() for path in parts):
        return None
    calls_part, rows_part, receipts_part = parts
    try:
        table = pq.read_table(rows_part)
        lines = receipts_part.read_bytes().splitlines()
        outcomes = [RolloutOutcome.model_validate(orjson.loads(line)) for line in lines]
        columns = {name: _column(table, name) for name in table.column_names}
        extras = _extras(pq.read_table(calls_part, columns=["model_call_id", "extras"]))
        rows = [_row({name: values[i] for name, values in columns.items()}, extras) for i in range(table.num_rows)]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise RunStoreError(f"group {group_id} in {run_dir} cannot be read back: {error}") from error
    if [row.rollout_id for row, _ in rows] != [outcome.rollout_id for outcome in outcomes]:
        raise RunStoreError(f"{rows_part} and {receipts_part} are not about the same rollouts")
    return StoredGroup(group_id, [row for row, _ in rows], [summary for _, summary in rows], outcomes)


_PARTS = {"calls": "parquet", "rows": "parquet", "receipts": "jsonl"}


def _column(table: Any, name: str) -> list[Any]:
    if name not in _ARRAYS:
        return table[name].to_pylist()
    return [np.asarray(value.values, dtype=_ARRAYS[name]) for value in table[name]]


def _extras(table: Any) -> dict[str, dict[str, Any]]:
    """The digested extras of every call that has some."""
    pairs = zip(table["model_call_id"].to_pylist(), table["extras"].to_pylist(), strict=True)
    return {call_id: orjson.loads(text) for call_id, text in pairs if text is not None}


def _row(values: dict[str, Any], extras: dict[str, dict[str, Any]]) -> tuple[GroupRow, RowSummary]:
    values |= {name: orjson.loads(values[name]) for name in _JSON}
    values["sampling"] = [settings_of(extras.get(call_id)) for call_id in values["model_call_ids"]]
    row = GroupRow(**{field.name: values[field.name] for field in fields(GroupRow)})
    return row, RowSummary(**{name: values[name] for name in RowSummary.model_fields})
