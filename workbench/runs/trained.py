"""Trained: which rows a step has trained, read from what the trainer wrote.

In: the parts of table `train`. Out: rollout → step, and rows with their steps.
Invariant: a row counts only where a token of it was in the loss; a verified row that no step has used, or that was left
out of its step, does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from workbench.runs.frames import Parts, scan_parts

_ROW = ("step", "rollout_id")


def trained_steps(train: pl.DataFrame, run_dir: Path) -> tuple[dict[str, int], Parts]:
    """Rollout → the step that had tokens of its row in the loss; and the parts that were read for their masks.

    `train` holds the columns of that table without arrays.
    """
    rows = train.filter(pl.col("sample_mask") == 1)
    whole, partly = rows.filter(pl.col("left_out").is_null()), rows.filter(pl.col("left_out").is_not_null())
    # Of a row that is left out in part the mask alone says whether anything remained.
    paths = [run_dir / "train" / f"step-{step}.parquet" for step in partly["step"].unique().sort()]
    masks = scan_parts("train", paths, (*_ROW, "loss_mask"))
    remaining = partly.join(masks.frame.filter(pl.col("loss_mask").list.sum() > 0), on=_ROW, how="semi")
    return dict(pl.concat([whole, remaining]).select("rollout_id", "step").rows()), masks


def with_steps(
    rows: pl.DataFrame,
    groups: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    trained: Mapping[str, int],
) -> pl.DataFrame:
    """Stored rows, in their order, with `step` and `task_seed` of their group's line, `taken_step` from the line of the
    step that took the group, placeholders too, and their own `trained_step`."""
    step_of = {group["group_id"]: group.get("step") for group in groups}
    seed_of = {group["group_id"]: group.get("task_seed") for group in groups}
    taken = {group_id: line.get("step") for line in steps for group_id in line.get("group_ids") or ()}
    return (
        rows.join(_keyed("group_id", "step", step_of), on="group_id", how="left", maintain_order="left")
        .join(_keyed("group_id", "task_seed", seed_of), on="group_id", how="left", maintain_order="left")
        .join(_keyed("group_id", "taken_step", taken), on="group_id", how="left", maintain_order="left")
        .join(_keyed("rollout_id", "trained_step", trained), on="rollout_id", how="left", maintain_order="left")
    )


def _keyed(key: str, name: str, values: Mapping[str, int | None]) -> pl.DataFrame:
    """A mapping as two columns, to be joined."""
    columns = {key: list(values), name: list(values.values())}
    return pl.DataFrame(columns, schema={key: pl.String, name: pl.Int64}, strict=False)
