"""Trained: which rows a step has trained, read from what the trainer wrote.

In: the parts of table `train`. Out: rollout → step. Invariant: a row counts only where a token of it was in the loss;
a verified row that no step has used, or that was left out of its step, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from workbench.runs.frames import read_parts

_COLUMNS = ("rollout_id", "step", "sample_mask", "left_out")


def trained_steps(parts: Iterable[Path]) -> dict[str, int]:
    """Rollout → the step that had tokens of its row in the loss. Raises RunStoreError for a part it cannot read."""
    trained: dict[str, int] = {}
    for path in parts:
        rows = read_parts("train", [path], _COLUMNS).filter(pl.col("sample_mask") == 1)
        if rows["left_out"].null_count() < rows.height:
            # Of a row that is left out in part the mask alone says whether anything remained.
            masks = read_parts("train", [path], ["rollout_id", "loss_mask"])
            rows = rows.join(masks, on="rollout_id").filter(pl.col("loss_mask").list.sum() > 0)
        trained |= dict(rows.select("rollout_id", "step").rows())
    return trained
