"""Votes: which rows and tokens of a batch enter the loss, and with what advantage; all that is decided before a pass.

In: rows as they were published, the version of the weights being trained. Out: a `Ballot`. A token's version is that of
the span it was sampled in (of its call, where the weights did not change during the call); it is *old* when it lags
more than `max_lag` versions behind the weights being trained. Policies for old tokens:

    allow      they are trained like the others; the ratio and its clip are what bounds them
    mask_old   they leave the loss; the row's reward keeps its place in the group's baseline
    reject     a row with any of them has no vote at all, as if it were a placeholder

Invariants: a row without a vote has advantage 0 and no token in the loss; what is left out has its reason.
Not here: rows that leave because trainer and sampler disagree about them (agreement), which needs a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.errors import RecipeError
from workbench.train.estimators import advantages, estimator
from workbench.train.rows import TrainRow

OffPolicy = Literal["allow", "mask_old", "reject"]

PLACEHOLDER, OFF_POLICY, DISAGREES = "placeholder", "off_policy", "mult_prob_error"
"""Why a row, or some of its tokens, stayed out of the loss."""


@dataclass
class Ballot:
    """What a step trains. One entry a row: advantage (N,), vote (N,) bool, tokens in the loss N x (T,) bool, and why
    something stayed out (None: nothing did). `lags` counts sampled tokens of voting rows by versions of lag."""

    advantages: np.ndarray
    valid: np.ndarray
    masks: list[np.ndarray]
    left_out: list[str | None]
    lags: dict[int, int]

    def metrics(self, rows: Sequence[TrainRow]) -> dict[str, Any]:
        """Rewards, votes and staleness of the batch."""
        rewards_V = np.array([row.reward for row in rows])[self.valid]
        tokens = sum(self.lags.values())
        return {
            "reward_mean": float(rewards_V.mean()) if rewards_V.size else None,
            "valid_row_rate": float(self.valid.mean()),
            "advantage_abs_mean": float(np.abs(self.advantages[self.valid]).mean()) if rewards_V.size else None,
            "off_policy_rows": sum(why == OFF_POLICY for why in self.left_out),
            "token_lag_mean": sum(lag * count for lag, count in self.lags.items()) / tokens if tokens else None,
            "token_lag_max": max(self.lags, default=None),
        }


def cast_votes(
    rows: Sequence[TrainRow],
    *,
    version: int,
    advantage: dict[str, Any],
    off_policy: OffPolicy = "allow",
    max_lag: int = 0,
    shuffle_seed: int = 0,
) -> Ballot:
    """The ballot of `rows` for weights of version `version`.

    `advantage`: `name`, `options`, and `shuffle`: true hands each group's advantages out to its rows at random (seeded
    by `shuffle_seed` and the version), a control that must not learn. Raises TrainerError as the estimator does, and
    RecipeError where it needs reward components that the rows lack.
    """
    valid_N = np.array([row.sample_mask for row in rows], dtype=bool)
    masks_NT = [row.loss_mask for row in rows]
    left_out: list[str | None] = [None if valid else PLACEHOLDER for valid in valid_N]
    lags: dict[int, int] = {}
    for place, row in enumerate(rows):
        if not valid_N[place]:
            continue
        lag_T = np.where(row.versions >= 0, version - row.versions, 0)
        for lag, count in zip(*np.unique(lag_T[masks_NT[place]], return_counts=True), strict=True):
            lags[int(lag)] = lags.get(int(lag), 0) + int(count)
        old_T = masks_NT[place] & (lag_T > max_lag)
        if off_policy == "allow" or not old_T.any():
            continue
        left_out[place] = OFF_POLICY
        if off_policy == "reject":
            valid_N[place] = False
            masks_NT[place] = np.zeros_like(masks_NT[place])
        else:
            masks_NT[place] = masks_NT[place] & ~old_T
    group_ids = [row.group_id for row in rows]
    name, options = advantage["name"], advantage.get("options", {})
    advantage_N = advantages(name, _rewards(rows, valid_N, advantage), group_ids, valid_N, **options)
    if advantage.get("shuffle"):
        advantage_N = _shuffled(advantage_N, group_ids, valid_N, np.random.default_rng([shuffle_seed, version]))
    return Ballot(advantage_N, valid_N, masks_NT, left_out, lags)


def _rewards(rows: Sequence[TrainRow], valid_N: np.ndarray, advantage: dict[str, Any]) -> np.ndarray:
    """Rewards (N,), or (N, K) of the rows' components for an estimator of several rewards."""
    chosen = estimator(advantage["name"], **advantage.get("options", {}))
    if not chosen.many_rewards:
        return np.array([row.reward for row in rows])
    weights = getattr(chosen, "weights", None)
    first = next((row for row, valid in zip(rows, valid_N, strict=True) if valid), None)
    if first is None:
        return np.zeros((len(rows), len(weights or "1")))
    names = list(weights) if isinstance(weights, dict) else sorted(first.reward_components)
    if not names:
        raise RecipeError(
            f"train.advantage.name: {advantage['name']} needs the parts of each reward, and row {first.rollout_id} has "
            f"none; its environment must return `components`, or the recipe must name another estimator."
        )
    matrix_NK = np.full((len(rows), len(names)), np.nan)
    for place, row in enumerate(rows):
        lacking = [name for name in names if name not in row.reward_components]
        if valid_N[place] and lacking:
            has = ", ".join(sorted(row.reward_components)) or "none"
            raise RecipeError(
                f"train.advantage: row {row.rollout_id} has no reward component {lacking[0]}; it has: {has}."
            )
        # Which row comes first must not decide what is learned from.
        more = sorted(set(row.reward_components) - set(names)) if valid_N[place] else []
        if more and not isinstance(weights, dict):
            raise RecipeError(
                f"train.advantage: row {first.rollout_id} has no reward component {more[0]}, which row "
                f"{row.rollout_id} has. Next: name those that count in train.advantage.options.weights."
            )
        matrix_NK[place] = [row.reward_components.get(name, np.nan) for name in names]
    return matrix_NK


def _shuffled(
    advantage_N: np.ndarray, group_ids: Sequence[str], valid_N: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    out_N = advantage_N.copy()
    for group_id in dict.fromkeys(group_ids):
        members = np.flatnonzero([valid and mine == group_id for mine, valid in zip(group_ids, valid_N, strict=True)])
        out_N[members] = advantage_N[rng.permutation(members)]
    return out_N
