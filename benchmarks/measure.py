"""Measure: alternating samples, medians with their intervals, ratios and growth.

In: callables that time themselves and return seconds. Out: `Figure` and `Growth`, which is all that a question gives.
Invariant: whatever is compared was sampled in turn (A B, B A, …) in one run on one machine, and a ratio is the median
of the ratios of neighbouring samples, so that a machine that slows down slows both sides.
Clocks: processor seconds where nothing is waited for (another program on the machine then disturbs little), wall
seconds wherever a disk, a network or another process is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

processor = time.process_time
wall = time.perf_counter
Sampler = Callable[[], float]

RESAMPLES = 2_000


@dataclass
class Figure:
    """One number with its 95 % interval. `target` is what it should reach, in words and as a bound in the same unit."""

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    kind: Literal["figure"] = "figure"

    @property
    def met(self) -> bool | None:
        """Whether the median reaches its target; None where there is none, or nothing was measured."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass
class Growth:
    """Seconds at several sizes, and the exponent e of seconds ~ size^e, fitted by least squares in logarithms.

    What is measured may be in another `unit`; the field keeps its name.
    """

    name: str
    of: str
    sizes: list[float]
    seconds: list[float]
    exponent: float = field(init=False)
    note: str = ""
    unit: str = "s"
    kind: Literal["growth"] = "growth"

    def __post_init__(self) -> None:
        self.exponent = float(np.polyfit(np.log(self.sizes), np.log(self.seconds), 1)[0])


def timed(function: Callable[[], Any], clock: Callable[[], float] = processor, repeats: int = 1) -> Sampler:
    """A sampler: the seconds of one call of `function`, averaged over `repeats` calls in a row."""

    def sample() -> float:
        began = clock()
        for _ in range(repeats):
            function()
        return (clock() - began) / repeats

    return sample


def alternate(sides: dict[str, Sampler], rounds: int) -> dict[str, np.ndarray]:
    """`rounds` samples of every side, in turn, the order turned round each time; one sample of each is thrown away."""
    for sample in sides.values():
        sample()
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in names:
            samples[name].append(sides[name]())
    return {name: np.array(values) for name, values in samples.items()}


def median(name: str, samples: Sequence[float] | np.ndarray, unit: str, scale: float = 1.0, **fields: Any) -> Figure:
    """The median of samples, times `scale`, with a bootstrap interval."""
    values = np.asarray(samples, dtype=float) * scale
    low, high = _interval(values)
    return Figure(name, float(np.median(values)), unit, low, high, **fields)


def ratio(name: str, over: np.ndarray, under: np.ndarray, unit: str = "×", scale: float = 1.0, **fields: Any) -> Figure:
    """The median of `over / under`, sample by sample, times `scale`."""
    return median(name, over / under, unit, scale, **fields)


def rate(name: str, count: float, samples: np.ndarray, unit: str, **fields: Any) -> Figure:
    """`count` a second: the median of count / samples."""
    return median(name, count / samples, unit, **fields)


def unmeasured(name: str, unit: str, why: str, **fields: Any) -> Figure:
    """A figure that could not be had, and the reason."""
    return Figure(name, None, unit, note=why, **fields)


def in_memory() -> Path | None:
    """A directory that no disk stands behind, for what is not to wait for one; None where there is none."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


def _interval(values: np.ndarray) -> tuple[float, float]:
    if values.size < 2:
        return float(values[0]), float(values[0])
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, values.size))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)
