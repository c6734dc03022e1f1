"""Votes: which rows and tokens of a batch enter the loss, and with what advantage; all that is decided before a pass.

In: rows as they were published, the version of the weights being trained. Out: a `Ballot`. A token's version is that of
the span it was sampled in (of its call, where the weights did not change during the call); it is *old* when it lags
more than `max_lag` versions behind the weights being trained. Policies for old tokens:

    allow      they are trained like the others; the ratio and its clip are what bounds them
    mask_old   they leave the loss; the row's reward keeps its place in the group's baseline
    reject     a row with any of them has no vote at all, as if it were a placeholder

An estimator of several rewards needs the same components of every row. Without names in its `weights` they are those
that most voting rows of the batch have (of as many, the larger set); a row with others has no vote.

Invariants: a row without a vote has advantage 0 and no token in the loss; what is left out has its reason.
Not here: rows that leave because trainer and sampler disagree about them (agreement), which needs a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.errors import RecipeError
from workbench.train.estimators import advantages, estimator
from workbench.train.rows import TrainRow

OffPolicy = Literal["allow", "mask_old", "reject"]

PLACEHOLDER, OFF_POLICY, DISAGREES, NO_COMPONENTS = "placeholder", "off_policy", "mult_prob_error", "reward_components"
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
    other_components: dict[str, str]
    """Rollout -> what its reward's components were, of rows that left because of them."""

    def metrics(self, rows: Sequence[TrainRow]) -> dict[str, Any]:
        """Rewards, votes and staleness of the batch."""
        rewards_V = np.array([row.reward for row in rows])[self.valid]
        tokens = sum(self.lags.values())
        others = {"other_components": self.other_components} if self.other_components else {}
        return others | {
            "reward_mean": float(rewards_V.mean()) if rewards_V.size else None,
            "valid_row_rate": float(self.valid.mean()),
            "advantage_abs_mean": float(np.abs(self.advantages[self.valid]).mean()) if rewards_V.size else None,
            "off_policy_rows": sum(why == OFF_POLICY for why in self.left_out),
            "other_component_rows": len(self.other_components),
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
    RecipeError where it needs reward components that no row of the first step has: then none ever will.
    """
    valid_N = np.array([row.sample_mask for row in rows], dtype=bool)
    masks_NT = [row.loss_mask for row in rows]
    left_out: list[str | None] = [None if valid else PLACEHOLDER for valid in valid_N]
    names, others = _components(rows, valid_N, advantage, first=version == 0)
    for place in others:
        left_out[place] = NO_COMPONENTS
        valid_N[place] = False
        masks_NT[place] = np.zeros_like(masks_NT[place])
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
    advantage_N = advantages(name, _rewards(rows, names), group_ids, valid_N, **options)
    if advantage.get("shuffle"):
        advantage_N = _shuffled(advantage_N, group_ids, valid_N, np.random.default_rng([shuffle_seed, version]))
    return Ballot(
        advantage_N,
        valid_N,
        masks_NT,
        left_out,
        lags,
        {rows[place].rollout_id: had for place, had in others.items()},
    )


def _components(
    rows: Sequence[TrainRow], valid_N: np.ndarray, advantage: dict[str, Any], *, first: bool
) -> tuple[list[str] | None, dict[int, str]]:
    """Names of the rewards that count (None: the total alone), and the voting rows that have others, by place, with
    what they have. Raises RecipeError where these are all rows of a run's `first` step."""
    chosen = estimator(advantage["name"], **advantage.get("options", {}))
    if not chosen.many_rewards:
        return None, {}
    weights = getattr(chosen, "weights", None)
    had = {place: sorted(rows[place].reward_components) for place in np.flatnonzero(valid_N).tolist()}
    kinds = Counter(tuple(names) for names in had.values() if names)
    # Which row comes first must not decide what is learned from.
    most = max(kinds, key=lambda names: (kinds[names], len(names), names), default=())
    names = list(weights) if isinstance(weights, Mapping) else list(most)
    if isinstance(weights, Mapping):
        others = {place: own for place, own in had.items() if not set(names) <= set(own)}
    else:
        others = {place: own for place, own in had.items() if own != names or not names}
    said = {place: ", ".join(own) or "none" for place, own in others.items()}
    if first and had and len(others) == len(had):
        place = min(others)
        if not others[place]:
            raise RecipeError(
                f"train.advantage.name: {advantage['name']} needs the parts of each reward, and row "
                f"{rows[place].rollout_id} has none; its environment must return `components`, or the recipe must name "
                "another estimator."
            )
        lacking = next(name for name in names if name not in others[place])
        raise RecipeError(
            f"train.advantage: row {rows[place].rollout_id} has no reward component {lacking}; it has: {said[place]}."
        )
    # Nobody votes: a column is all that is asked of their rewards.
    return names or list(map(str, weights or "1")), said


def _rewards(rows: Sequence[TrainRow], names: list[str] | None) -> np.ndarray:
    """Rewards (N,), or (N, K) of the rows' components called `names`; NaN of a row that lacks one."""
    if names is None:
        return np.array([row.reward for row in rows])
    return np.array([[row.reward_components.get(name, np.nan) for name in names] for row in rows]).reshape(
        len(rows), -1
    )


def _shuffled(
    advantage_N: np.ndarray, group_ids: Sequence[str], valid_N: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    out_N = advantage_N.copy()
    for group_id in dict.fromkeys(group_ids):
        members = np.flatnonzero([valid and mine == group_id for mine, valid in zip(group_ids, valid_N, strict=True)])
        out_N[members] = advantage_N[rng.permutation(members)]
    return out_N
