"""Trained: which rows a step has trained, read from what the trainer wrote.

In: the parts of table `train`. Out: rollout → step. Invariant: a row counts only where a token of it was in the loss;
a verified row that no step has used, or that was left out of its step, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
