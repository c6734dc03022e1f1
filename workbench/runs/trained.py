"""Trained: which rows a step has trained, read from what the trainer wrote.

In: the parts of table `train`. Out: rollout → step, and rows with their steps.
Invariant: a row counts only where a token of it was in the loss; a verified row that no step has used, or that was left
out of its step, does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from workbench.errors import RunStoreError
from workbench.runs.frames import scan_parts

_COLUMNS = ("rollout_id", "step", "sample_mask", "left_out")


def trained_steps(parts: Iterable[Path]) -> tuple[dict[str, int], dict[Path, RunStoreError]]:
    """Rollout → the step that had tokens of its row in the loss; and the parts that could not be read for it."""
    trained: dict[str, int] = {}
    damaged: dict[Path, RunStoreError] = {}
    for path in parts:
        found = scan_parts("train", [path], _COLUMNS)
        rows = found.frame.filter(pl.col("sample_mask") == 1)
        if rows["left_out"].null_count() < rows.height:
            # Of a row that is left out in part the mask alone says whether anything remained.
            found = scan_parts("train", [path], ["rollout_id", "loss_mask"])
            rows = rows.join(found.frame, on="rollout_id").filter(pl.col("loss_mask").list.sum() > 0)
        trained |= dict(rows.select("rollout_id", "step").rows())
        damaged |= found.damaged
    return trained, damaged


def with_steps(rows: pl.DataFrame, groups: Sequence[Mapping[str, Any]], trained: Mapping[str, int]) -> pl.DataFrame:
    """Stored rows, in their order, with `step` and `task_seed` of their group's line and their own `trained_step`."""
    step_of = {group["group_id"]: group.get("step") for group in groups}
    seed_of = {group["group_id"]: group.get("task_seed") for group in groups}
    return (
        rows.join(_keyed("group_id", "step", step_of), on="group_id", how="left", maintain_order="left")
        .join(_keyed("group_id", "task_seed", seed_of), on="group_id", how="left", maintain_order="left")
        .join(_keyed("rollout_id", "trained_step", trained), on="rollout_id", how="left", maintain_order="left")
    )


def _keyed(key: str, name: str, values: Mapping[str, int | None]) -> pl.DataFrame:
    """A mapping as two columns, to be joined."""
    columns = {key: list(values), name: list(values.values())}
    return pl.DataFrame(columns, schema={key: pl.String, name: pl.Int64}, strict=False)
