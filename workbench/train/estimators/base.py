"""Base of the advantage estimators: the rules that hold whatever the formula.

In: rewards_N (rewards_NK for several rewards a row), group ids, valid_mask_N. Out: advantages_N, float64. A group is
what shares a group id; prompts are never looked at. Invariants, proved over every registered estimator:
- a row without a vote (valid_mask 0) gets exactly 0, and its reward, NaN included, changes nothing;
- rewards of one group (of the batch, where that is the baseline) equal within 1e-6 * max(1, |r|) give exactly 0.
A new estimator is a new file with a subclass and one line in the registry (`estimators/__init__.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workbench.errors import TrainerError

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards this close, relative to max(1, |r|), are one reward: float32 noise must not become a gradient."""


@dataclass(frozen=True)
class Estimator(ABC):
    """One way from rewards to advantages. The options are the subclass's dataclass fields."""

    group_centred: ClassVar[bool] = False
    """Whether a rollout is compared with its own group, so that equal rewards in a group give exactly 0."""
    many_rewards: ClassVar[bool] = False
    """Whether it takes several rewards a row, (N, K)."""

    @abstractmethod
    def __call__(self, rewards_N: np.ndarray, group_ids: Sequence[Hashable], valid_N: np.ndarray) -> np.ndarray:
        """Advantages, float64 (N,); `valid_N` is bool and rewards are finite where it is true."""


@dataclass(frozen=True)
class GroupCentred(Estimator):
    """An estimator that compares each rollout with its own group."""

    group_centred: ClassVar[bool] = True

    @abstractmethod
    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Advantages of one group's valid rows: (G,) float64 to (G,), G >= 2 and the rewards not all equal."""

    def __call__(self, rewards_N: np.ndarray, group_ids: Sequence[Hashable], valid_N: np.ndarray) -> np.ndarray:
        out_N = np.zeros(len(rewards_N), dtype=np.float64)
        members: dict[Hashable, list[int]] = {}
        for row, group_id in enumerate(group_ids):
            if valid_N[row]:
                members.setdefault(group_id, []).append(row)
        for rows in members.values():
            rewards_G = rewards_N[rows]
            # One row alone has nobody to be compared with; it must not be compared with zero.
            if len(rows) > 1 and not all_equal(rewards_G):
                out_N[rows] = self.group(rewards_G)
        return out_N


def over_batch_deviation(advantages_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """Advantages that average 0, divided by their deviation (population) over valid rows; all zero stays zero."""
    deviation = float(advantages_N[valid_N].std()) if valid_N.any() else 0.0
    return advantages_N / deviation if deviation > 0.0 else advantages_N


def all_equal(rewards_G: np.ndarray) -> bool:
    """Whether rewards are one value up to `EQUAL_REWARDS_TOLERANCE`."""
    return bool(np.ptp(rewards_G) <= EQUAL_REWARDS_TOLERANCE * max(1.0, float(np.abs(rewards_G).max())))


def checked(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Hashable],
    valid_mask: Sequence[float] | np.ndarray,
    *,
    many_rewards: bool = False,
) -> tuple[np.ndarray, Sequence[Hashable], np.ndarray]:
    """Rewards as float64 (0 where there is no vote) and the mask as bool, of one length.

    Raises TrainerError when lengths differ, there are several rewards a row and `many_rewards` is false, the mask is
    not 0/1, or a row that votes has a reward that is not finite.
    """
    rewards_N = np.array(rewards, dtype=np.float64)
    mask_N = np.array(valid_mask, dtype=np.float64)
    one_length = rewards_N.ndim > 0 and len(rewards_N) == mask_N.size == len(group_ids) and mask_N.ndim == 1
    if not one_length or rewards_N.ndim > (2 if many_rewards else 1):
        raise TrainerError(
            f"Expected rewards, group ids and valid_mask of one length, got {rewards_N.shape}, "
            f"{len(group_ids)} and {mask_N.shape}."
        )
    if not np.isin(mask_N, (0.0, 1.0)).all():
        raise TrainerError(f"valid_mask has other values than 0 and 1: {np.unique(mask_N).tolist()}.")
    valid_N = mask_N == 1.0
    finite_N = np.isfinite(rewards_N).reshape(len(rewards_N), -1).all(axis=1)
    broken = np.flatnonzero(valid_N & ~finite_N)
    if broken.size:
        row = int(broken[0])
        raise TrainerError(
            f"Row {row} of group {group_ids[row]} votes but its reward is {rewards_N[row]}; "
            f"a rollout without a finite reward must be a placeholder (sample_mask 0)."
        )
    votes = valid_N if rewards_N.ndim == 1 else valid_N[:, None]
    return np.where(votes, rewards_N, 0.0), group_ids, valid_N
