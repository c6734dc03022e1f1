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
from workbench.train.route_rows import coverage
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


def replay_metrics(
    rows: Sequence[TrainRow],
    masks: Sequence[np.ndarray],
    agreement_NT: Sequence[np.ndarray | None],
    layers: Sequence[int],
) -> dict[str, Any]:
    """Of router replay: `replay_coverage`, the share of positions in the loss whose routes were replayed;
    `router_agreement`, how often the model's own router would have chosen the same experts, over tokens and layers, and
    `router_agreement_by_layer`, by the layer's index in `layers`. None where nothing was replayed."""
    covered, positions = coverage(rows, masks, layers)
    held = [values for values in agreement_NT if values is not None]
    same_TL = np.concatenate(held) if held else np.zeros((0, 0))
    same_TL = same_TL[~np.isnan(same_TL).all(axis=1)] if same_TL.size else same_TL
    return {
        "replay_coverage": covered / positions if positions else None,
        "router_agreement": float(np.nanmean(same_TL)) if same_TL.size else None,
        "router_agreement_by_layer": dict(zip(map(str, layers), np.nanmean(same_TL, axis=0).tolist(), strict=True))
        if same_TL.size
        else None,
    }


def train_part(
    step: int,
    rows: Sequence[TrainRow],
    ballot: Ballot,
    trainer_NT: Sequence[np.ndarray],
    agreement_NT: Sequence[np.ndarray | None] | None = None,
) -> dict[str, list[Any]]:
    """The columns of table `train`: one entry a row. `agreement_NT`: (T, layers) a row, of router replay."""
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
        "route_agreement": [None] * len(rows) if agreement_NT is None else _by_token(rows, agreement_NT),
    }


def _by_token(rows: Sequence[TrainRow], agreement_NT: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """(T,) float32 a row: mean over layers, NaN where nothing was replayed."""
    out = []
    for row, values_TL in zip(rows, agreement_NT, strict=True):
        mean_T = np.full(len(row.token_ids), np.nan, dtype=np.float32)
        if values_TL is not None:
            known_T = ~np.isnan(values_TL).all(axis=1)
            mean_T[: len(values_TL)][known_T] = np.nanmean(values_TL[known_T], axis=1)
        out.append(mean_T)
    return out
