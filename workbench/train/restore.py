"""Restore: bring a fresh trainer to the weights after a step that an earlier process took.

    newest whole checkpoint ─► weights, optimiser, generators ─► the steps after it, taken again from their stored rows

What makes a step taken is its part `train/step-<n>.parquet`: it is written before anything else hears of the step, and
names the rows in the order of the batch. So after a checkpoint of step 5 and parts up to step 8, steps 6 to 8 are taken
again on just those rows, read from the finalizer's parts. No group is trained on twice: these weights have not seen
them. Invariant: the trainer's log-probs of a step taken again are those of its part, or this ends in an error.
Not here: which steps there are and what else a run needs to go on (campaign.resume).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.errors import RunStoreError, TrainerError
from workbench.finalizer.rows import pack_row
from workbench.finalizer.stored import read_group
from workbench.runs.frames import read_parts
from workbench.train import checkpoint
from workbench.train.checkpoint import Checkpoint
from workbench.train.rows import TrainRow, match_rows, unpack_row

SAME_WEIGHTS = 0.05
"""Largest mean |log-prob then − now| (nat) of a step taken again: another machine or thread count stays far below in
float32 and at about half of it in bfloat16, the weights of a step earlier at a high learning rate do not."""


@dataclass(frozen=True)
class StoredStep:
    """A step that was taken: its rows in the order of the batch, and the trainer's log-probs (T,) of each."""

    step: int
    rows: list[TrainRow]
    trainer_logprobs: list[np.ndarray]


def newest_checkpoint(directory: Path, upto: int) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a step ≤ `upto`, None where there is none; and what is wrong with newer ones."""
    wrong: list[str] = []
    for step in reversed([step for step in checkpoint.steps(directory) if step <= upto]):
        try:
            return checkpoint.load(directory, step), wrong
        except TrainerError as error:
            wrong.append(str(error))
    return None, wrong


def stored_step(run_dir: Path, step: int) -> StoredStep:
    """Read back step `step` and its rows. Raises RunStoreError naming the part that is missing or damaged."""
    path = run_dir / "train" / f"step-{step}.parquet"
    if not path.exists():
        raise RunStoreError(f"{path} is missing; step {step} cannot be taken again without it")
    part = read_parts("train", [path]).to_dict(as_series=False)
    rows = []
    for group_id in dict.fromkeys(part["group_id"]):
        group = read_group(run_dir, group_id)
        if group is None:
            raise RunStoreError(f"group {group_id} of step {step} has lost a part in {run_dir}; see workbench verify")
        rows += [unpack_row(pack_row(row)) for row in group.rows]
    logprobs = [np.asarray(values, dtype=np.float32) for values in part["trainer_logprobs"]]
    return StoredStep(step, match_rows(part["rollout_id"], rows), logprobs)


def check_same_weights(stored: StoredStep, now: list[np.ndarray]) -> float:
    """Mean |log-prob then − now| over the step's tokens, in nat. Raises TrainerError when the weights must differ."""
    masks = [row.loss_mask for row in stored.rows]
    deltas = [np.abs(a - b)[mask] for a, b, mask in zip(stored.trainer_logprobs, now, masks, strict=True)]
    delta_T = np.concatenate(deltas) if deltas else np.zeros(0)
    mean = float(delta_T.mean()) if delta_T.size else 0.0
    if not mean <= SAME_WEIGHTS:
        raise TrainerError(
            f"Step {stored.step}, taken again, scores its rows {mean:.3f} nat off its own record (allowed "
            f"{SAME_WEIGHTS}): these are not the weights it was taken with. Next: see whether the model of the recipe "
            f"or a checkpoint was exchanged."
        )
    return mean
