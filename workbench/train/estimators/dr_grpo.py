"""Dr. GRPO: reward minus the group's mean and nothing else (Liu et al. 2025, "Understanding R1-Zero-Like Training").

Its other half, no division by a response's own length, is the loss's: `reduction="constant"` to the letter; with
`"token"`, the default here, all responses of a step share one divisor, which is their length together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.train.estimators.base import GroupCentred


@dataclass(frozen=True)
class DrGrpo(GroupCentred):
    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G - rewards_G.mean()
