"""REINFORCE++: one baseline and one scale for the whole batch, not for each group (Hu et al. 2025, "REINFORCE++").

    reinforce_plus_plus            (reward - mean of the batch) / deviation of the batch
    reinforce_plus_plus-baseline   (reward - mean of its group) / deviation of those differences over the batch

The paper recommends the second for rewards of tasks of unequal difficulty. Its differences add up to zero in every
group, so the batch's mean needs no subtraction and equal rewards stay exactly 0. Mean and deviation (population, as the
paper's code) are over valid rows; a row weighs the same whatever its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.train.estimators.base import Estimator, GroupCentred, all_equal, over_batch_deviation


@dataclass(frozen=True)
class ReinforcePlusPlus(Estimator):
    def __call__(self, rewards_N: np.ndarray, group_ids: Sequence[Hashable], valid_N: np.ndarray) -> np.ndarray:
        out_N = np.zeros(len(rewards_N), dtype=np.float64)
        voting_V = rewards_N[valid_N]
        if len(voting_V) > 1 and not all_equal(voting_V):
            out_N[valid_N] = voting_V - voting_V.mean()
        return over_batch_deviation(out_N, valid_N)


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GroupCentred):
    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G - rewards_G.mean()

    def __call__(self, rewards_N: np.ndarray, group_ids: Sequence[Hashable], valid_N: np.ndarray) -> np.ndarray:
        return over_batch_deviation(super().__call__(rewards_N, group_ids, valid_N), valid_N)
