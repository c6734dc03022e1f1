"""Gradient: what of a run's steps could teach the policy nothing, and why.

In: a run's steps, its rollouts, the recipe's section `train`. Out: a sentence where no step at all learned from a
reward; the steps that certainly changed no weight.
Invariant: only what was recorded counts; a step of which neither gradient nor advantages are known is taken for one
that taught something. Not here: what a step did (inspect.optimisation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

NO_GRADIENT = "no optimiser step had a gradient from a reward"


def had_gradient(step: Mapping[str, Any]) -> bool:
    """Whether a step's gradient, from rewards or the KL penalty, may have been other than 0."""
    norm = step.get("grad_norm")
    return bool(step.get("advantage_abs_mean") != 0 if norm is None else norm > 0)


def learned_nothing(steps: pl.DataFrame, rollouts: pl.DataFrame) -> bool:
    """Steps were taken on tokens, and in each the gradient was 0 or every advantage was. Of a step whose line is
    missing, as where a run ended before its weights were out, that is not known."""
    taken = steps.to_dicts()
    if set(rollouts["trained_step"].drop_nulls().to_list()) - {step["step"] for step in taken}:
        return False
    with_tokens = any(step.get("loss_tokens") != 0 for step in taken)
    return with_tokens and not any(had_gradient(step) and step.get("advantage_abs_mean") != 0 for step in taken)


def nothing_learned(steps: pl.DataFrame, rollouts: pl.DataFrame, train: Mapping[str, Any]) -> str | None:
    """That no step learned from a reward, why, and the next step; None where one may have."""
    if not learned_nothing(steps, rollouts):
        return None
    votes = rollouts.filter(pl.col("trained_step").is_not_null()).group_by("group_id")
    groups = votes.agg(pl.len().alias("votes"), pl.col("reward").n_unique().alias("rewards"))
    alone = groups.filter(pl.col("votes") == 1).height
    equal = groups.filter(pl.col("votes") > 1, pl.col("rewards") == 1).height
    next_step = "tasks that some rollouts of a group solve and others do not, or a reward that tells them apart"
    if any(step.get("advantage_abs_mean") != 0 and step.get("loss_tokens") != 0 for step in steps.to_dicts()):
        why = "advantages there were, but no token kept one (clipping, rows left out)"
        next_step = "Optimisation(run), step by step"
    elif alone and equal:
        why = (
            f"in {alone:,} of {groups.height:,} groups only one rollout had a vote, in {equal:,} all rewards were equal"
        )
    elif alone and alone == groups.height:
        why = f"only one rollout had a vote in {_each(alone)}, with nothing to be compared with"
    elif equal and equal == groups.height:
        why = f"the rewards were equal in {_each(equal)}"
    else:
        why = "every advantage was 0"
    if alone > equal:
        next_step = "see why the others have no vote (PoisonTable, Optimisation), or more train.rollouts_per_group"
    moved = other_movers(train, before=False)
    moved_words = f"; only {' and '.join(moved)} moved the weights" if moved else ""
    return f"{NO_GRADIENT}: {why}{moved_words}. Next, if not meant: {next_step}"


def other_movers(train: Mapping[str, Any], *, before: bool) -> list[str]:
    """What moves weights in a step without a gradient from a reward; `before`: an earlier step had a gradient."""
    moved = []
    if decay := train.get("weight_decay"):
        moved.append(f"weight decay (train.weight_decay = {decay:g})")
    if before:
        moved.append("AdamW's memory of earlier gradients")
    if (train.get("kl") or {}).get("coefficient"):
        moved.append("the KL penalty")
    return moved


def unchanged(steps: pl.DataFrame, train: Mapping[str, Any]) -> set[int]:
    """The steps that certainly changed no weight: none was taken, or nothing moved any, then or in AdamW's memory.

    Where a gradient norm or the recipe's weight decay is not known, that is not certain.
    """
    found, before = set(), False
    for step in steps.sort("step").to_dicts():
        before = before or step.get("grad_norm") != 0
        if step.get("optimizer_stepped") == 0 or (not before and train.get("weight_decay") == 0):
            found.add(step["step"])
    return found


def _each(groups: int) -> str:
    return "the only group" if groups == 1 else f"each of the {groups:,} groups"
