"""RLOO: reward minus the mean of the group's other valid members (Ahmadian et al. 2024, "Back to Basics", eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.train.estimators.base import GroupCentred


@dataclass(frozen=True)
class Rloo(GroupCentred):
    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        others_G = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
        return rewards_G - others_G
