"""GDPO: several rewards, each put on its own scale within the group before they are added.

For every reward k: (r_k - mean) / sample deviation over the group's valid rows; the weighted sum of these, divided by
its deviation over the batch (Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization"). Adding
the rewards first, as grpo does with their total, lets the one with the largest spread drown the others: (0, 1) and
(1, 0) of two rewards become the same number. A reward that is equal throughout a group contributes exactly 0 there.

Rewards are (N, K), one column a reward; (N,) is K = 1. In a campaign the columns are the reward's components.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workbench.errors import TrainerError
from workbench.train.estimators.base import Estimator, GroupCentred, over_batch_deviation

CANCELLED = 1e-9
"""A sum of scaled rewards (each of size 1) below this part of its weights is 0."""


@dataclass(frozen=True)
class _OneReward(GroupCentred):
    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        return (rewards_G - rewards_G.mean()) / rewards_G.std(ddof=1)


@dataclass(frozen=True)
class Gdpo(Estimator):
    weights: Mapping[str, float] | Sequence[float] | None = None
    """A weight for each reward, in the order of the columns; in a recipe by the component's name, which also chooses
    the components. None: all of them, each with weight 1."""
    normalize_batch: bool = True
    """Divide the sum by its deviation over the batch, so that its size does not grow with the number of rewards."""

    group_centred: ClassVar[bool] = True
    many_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        given: object = self.weights.values() if isinstance(self.weights, Mapping) else self.weights
        values = list(given) if isinstance(given, Iterable) else [None]
        if not all(map(_is_weight, values)) or not any(values):
            raise TrainerError(f"gdpo: weights are finite numbers, one of them not 0, got {self.weights!r}.")

    def __call__(self, rewards_N: np.ndarray, group_ids: Sequence[Hashable], valid_N: np.ndarray) -> np.ndarray:
        rewards_NK = rewards_N.reshape(len(rewards_N), -1)
        weights_K = self._weights(rewards_NK.shape[1])
        one = _OneReward()
        parts_KN = [one(reward_N, group_ids, valid_N) for reward_N in rewards_NK.T]
        sum_N = np.sum([weight * part_N for weight, part_N in zip(weights_K, parts_KN, strict=True)], axis=0)
        # Rewards that cancel leave rounding behind, and dividing by the deviation would make advantages of it.
        sum_N[np.abs(sum_N) <= CANCELLED * sum(map(abs, weights_K))] = 0.0
        return over_batch_deviation(sum_N, valid_N) if self.normalize_batch else sum_N

    def _weights(self, count: int) -> list[float]:
        if self.weights is None:
            return [1.0] * count
        given = list(self.weights.values()) if isinstance(self.weights, Mapping) else list(self.weights)
        if len(given) != count:
            raise TrainerError(f"gdpo: {len(given)} weights for {count} rewards.")
        return [float(weight) for weight in given]


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
