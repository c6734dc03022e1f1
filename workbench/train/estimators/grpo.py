"""GRPO: reward minus the group's mean, optionally divided by the group's sample standard deviation.

`leave_one_out` takes the mean of the *other* valid members, which leaves the gradient unbiased; `mean` is the baseline
of the paper (Shao et al. 2024, DeepSeekMath, section 4.1). Both centre: leave-one-out is the mean baseline times
G / (G - 1). The deviation is that of all valid members, with G - 1 degrees of freedom, for either baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from workbench.errors import TrainerError
from workbench.train.estimators.base import GroupCentred


@dataclass(frozen=True)
class Grpo(GroupCentred):
    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    """Whom a rollout is compared with: the others of its group, or all of it."""
    normalize_std: bool = False
    """Divide by the sample standard deviation. False keeps hard and easy tasks in proportion (see dr_grpo)."""

    def __post_init__(self) -> None:
        if self.baseline not in ("leave_one_out", "mean"):
            raise TrainerError(f"grpo: baseline is leave_one_out or mean, got {self.baseline!r}.")

    def group(self, rewards_G: np.ndarray) -> np.ndarray:
        centred_G = rewards_G - rewards_G.mean()
        if self.baseline == "leave_one_out":
            size = len(rewards_G)
            centred_G = centred_G * (size / (size - 1))
        return centred_G / rewards_G.std(ddof=1) if self.normalize_std else centred_G
