"""Learned: whether a run's reward rose, as a difference with an interval instead of a look at a curve.

    mean reward of the last quarter of the steps - that of the first, and its one-sided 95 % lower bound

    one run        the steps' mean rewards are the samples, their spread within each quarter the noise (Welch's t)
    several seeds  each run's difference is one sample, their spread the noise (Student's t over runs)

A run, or a recipe, has learned where the bound is above 0. Steps of one run share their weights, so the first is about
the run; only the second says something about the recipe, and it is the wider one for few seeds. A control is flat where
0 lies between its two one-sided bounds. Not here: what a step's reward is (runs.frames).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_STEPS = 8
"""Fewer steps have no quarter to speak of."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The one-sided 95 % bounds of a difference."""

    lower: float
    upper: float

    @property
    def learned(self) -> bool:
        """Whether the rise is beyond chance; over several runs, beyond what differs between seeds."""
        return self.lower > 0.0


@dataclass(frozen=True, kw_only=True)
class RewardRise(Bounds):
    """`difference` of the quarters' means, its one-sided 95 % bounds, and how many steps a quarter holds."""

    first: float
    last: float
    difference: float
    quarter_steps: int


def reward_rise(rewards: Sequence[float | None]) -> RewardRise | None:
    """The rise over a run's mean rewards, one a step, in order; None for fewer than `MIN_STEPS` that have one."""
    values = np.array([value for value in rewards if value is not None], dtype=np.float64)
    if values.size < MIN_STEPS:
        return None
    quarter = values.size // 4
    first, last = values[:quarter], values[-quarter:]
    variances = np.array([first.var(ddof=1), last.var(ddof=1)]) / quarter
    error = math.sqrt(variances.sum())
    # Welch and Satterthwaite's degrees of freedom for two samples of one size.
    freedom = variances.sum() ** 2 * (quarter - 1) / (variances**2).sum() if error > 0 else quarter - 1
    reach = t_quantile_95(float(freedom)) * error
    difference = float(last.mean() - first.mean())
    return RewardRise(
        lower=difference - reach,
        upper=difference + reach,
        first=float(first.mean()),
        last=float(last.mean()),
        difference=difference,
        quarter_steps=quarter,
    )


@dataclass(frozen=True, kw_only=True)
class SeedsRise(Bounds):
    """The mean of the `differences` of runs that differ in their seed alone, and its one-sided 95 % bounds."""

    differences: tuple[float, ...]
    mean: float


def rise_over_seeds(runs: Sequence[Sequence[float | None]]) -> SeedsRise | None:
    """The rise over several runs' mean rewards; None for fewer than two runs that are long enough for `reward_rise`."""
    differences = [rise.difference for rewards in runs if (rise := reward_rise(rewards)) is not None]
    if len(differences) < 2:
        return None
    values = np.array(differences)
    reach = t_quantile_95(values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
    mean = float(values.mean())
    return SeedsRise(lower=mean - reach, upper=mean + reach, differences=tuple(differences), mean=mean)


def t_quantile_95(freedom: float) -> float:
    """95 % quantile of Student's t (Abramowitz and Stegun 26.7.5; the exact values for 1 and 2 degrees of freedom)."""
    if freedom < 1.5:
        return 6.3138
    if freedom < 2.5:
        return 2.9200
    z = 1.6448536
    corrections = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(corrections, start=1))
