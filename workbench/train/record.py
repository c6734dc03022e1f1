"""Record: what one step says of itself, as metrics of the step and as the columns of the run store's table `train`.

In: rows, the ballot, the trainer's log-probs of every sampled token. Invariant: how the batch was split does not show;
rows are laid end to end. Agreement metrics are about every sampled token of a row that is no placeholder, so that what
was left out for disagreeing is still seen; ratio and clip metrics are about the tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workbench.runs.agreement import examine
from workbench.train.loss import AGREEMENT_METRICS, loss_metrics
from workbench.train.rows import TrainRow
from workbench.train.settings import TrainerConfig
from workbench.train.votes import DISAGREES, Ballot


def step_metrics(
    config: TrainerConfig, rows: Sequence[TrainRow], ballot: Ballot, trainer_NT: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Metrics of a step but those of the pass itself (loss, gradient, padding, times)."""
    scored_NT, sampler_NT = [row.loss_mask for row in rows], [row.logprobs for row in rows]
    ours, theirs, scored = (torch.from_numpy(np.concatenate(arrays)) for arrays in (trainer_NT, sampler_NT, scored_NT))
    in_loss = torch.from_numpy(np.concatenate(ballot.masks))
    advantage = torch.from_numpy(np.repeat(ballot.advantages, [len(mask) for mask in scored_NT]))
    # Under TIS the ratio is against this very pass, so it is 1 throughout and says nothing; the delta still does.
    base = ours if config.tis_cap is not None else None
    clips = config.clip_low, config.clip_high
    metrics = loss_metrics(ours, theirs, advantage, in_loss, *clips, base=base)
    agreement = loss_metrics(ours, theirs, advantage, scored, *clips, base=base)
    verdicts = examine(trainer_NT, sampler_NT, scored_NT)
    return (
        metrics
        | {name: agreement[name] for name in AGREEMENT_METRICS}
        | {
            "rows": len(rows),
            "tokens": sum(len(row.token_ids) for row in rows),
            "sampled_tokens": int(scored.sum()),
            "loss_tokens": int(in_loss.sum()),
            "disagreeing_rows": sum(why == DISAGREES for why in ballot.left_out),
            "agreement_suspect": ", ".join(verdict.name for verdict in verdicts if verdict.found) or None,
            "agreement": {verdict.name: {"found": verdict.found, **verdict.evidence} for verdict in verdicts},
        }
        | ballot.metrics(rows)
    )


def train_part(
    step: int, rows: Sequence[TrainRow], ballot: Ballot, trainer_NT: Sequence[np.ndarray]
) -> dict[str, list[Any]]:
    """The columns of table `train`: one entry a row."""
    delta_NT = [
        np.where(row.loss_mask, ours - row.logprobs, np.float32(0.0)).astype(np.float32)
        for ours, row in zip(trainer_NT, rows, strict=True)
    ]
    return {
        "step": [step] * len(rows),
        "group_id": [row.group_id for row in rows],
        "rollout_id": [row.rollout_id for row in rows],
        "index": [row.index for row in rows],
        "advantage": ballot.advantages.tolist(),
        "sample_mask": [int(row.sample_mask) for row in rows],
        "left_out": ballot.left_out,
        "loss_mask": [mask.astype(np.uint8) for mask in ballot.masks],
        "trainer_logprobs": list(trainer_NT),
        "delta": delta_NT,
    }
