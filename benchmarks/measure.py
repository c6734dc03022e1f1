"""Measure: alternating samples, medians with their intervals, ratios and growth.

In: callables that time themselves and return seconds. Out: `Figure` and `Growth`, which is all that a question gives.
Invariant: whatever is compared was sampled in turn (A B, B A, … and of three in every order) in one run on one machine,
and a ratio is the median of the ratios of neighbouring samples, so that a machine that slows down slows both sides.
Clocks: processor seconds where nothing is waited for (another program on the machine then disturbs little), wall
seconds wherever a disk, a network or another process is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

processor = time.process_time
wall = time.perf_counter
Sampler = Callable[[], float]
Made = TypeVar("Made")

RESAMPLES = 2_000


@dataclass
class Figure:
    """One number with its 95 % interval (None: measured once), and the bound that it should reach, in its unit."""

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    """What it is, or why it is what it is; the report shows it below the table."""
    kind: Literal["figure"] = "figure"

    @property
    def reached(self) -> Literal["yes", "within its interval", "no"] | None:
        """Whether the bound is reached: by the whole interval, by some of it, by none of it.

        None where there is no bound, or nothing was measured.
        """
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        ends = [self._fits(value) for value in (self.low, self.value, self.high) if value is not None]
        return "yes" if all(ends) else "within its interval" if any(ends) else "no"

    @property
    def median_fits(self) -> bool:
        """Whether the median alone satisfies the bound."""
        return self.value is not None and self._fits(self.value)

    def _fits(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass
class Growth:
    """Median seconds at several sizes, and the exponent e of seconds ~ size^e, by least squares in logarithms.

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


def timed_on(
    make: Callable[[], Made], function: Callable[[Made], Any], clock: Callable[[], float] = processor, repeats: int = 1
) -> Sampler:
    """As `timed`, but each call gets a thing of its own that `make` made before the clock was started."""

    def sample() -> float:
        made = [make() for _ in range(repeats)]
        began = clock()
        for one in made:
            function(one)
        return (clock() - began) / repeats

    return sample


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: turned by one place every other round, and played backwards in every second.

    After 2 × len(names) rounds each has stood in each place twice; of three names all six orders were played once.
    """
    turned = number // 2 % len(names)
    order = [*names[turned:], *names[:turned]]
    return order[::-1] if number % 2 else order


def alternate(sides: dict[str, Sampler], rounds: int) -> dict[str, np.ndarray]:
    """`rounds` samples of every side, in the orders of `in_turn`; one sample of each is thrown away before."""
    for sample in sides.values():
        sample()
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in in_turn(list(sides), number):
            samples[name].append(sides[name]())
    return {name: np.array(values) for name, values in samples.items()}


def median(name: str, samples: Sequence[float] | np.ndarray, unit: str, scale: float = 1.0, **fields: Any) -> Figure:
    """The median of samples, times `scale`, with a bootstrap interval."""
    values = np.asarray(samples, dtype=float) * scale
    low, high = _interval(values)
    return Figure(name, float(np.median(values)), unit, low, high, **fields)


def medians(samples: Mapping[str, Sequence[float] | np.ndarray], sizes: Sequence[int]) -> list[float]:
    """The median at each size, for `Growth`; samples are named by their size."""
    return [float(np.median(samples[str(size)])) for size in sizes]


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
