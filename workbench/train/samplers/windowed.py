"""Windowed: `weight_fifo` over groups at most `max_staleness` versions behind the trainer; staler ones are given up.

Given up means evicted, also while a group is still being sampled: the controller clears what it holds and samples
another one in its place, so that no step trains short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import RecipeError
from workbench.train.samplers.base import Entry, Selection
from workbench.train.samplers.weight_fifo import WeightFifo


@dataclass(frozen=True)
class Windowed(WeightFifo):
    max_staleness: int | None = None
    """Versions that a group may lag behind. None: as much as `train.max_staleness` lets it."""

    def __post_init__(self) -> None:
        if type(self.max_staleness) is not int or self.max_staleness < 0:
            raise RecipeError(
                f"sampler windowed: expected max_staleness to be a whole number ≥ 0, got {self.max_staleness!r}; "
                "0 trains on groups of the current weights only"
            )

    def select(self, entries: Sequence[Entry], count: int, version: int) -> Selection:
        assert self.max_staleness is not None
        oldest = version - self.max_staleness
        fresh = [entry for entry in entries if entry.weight_version >= oldest]
        stale = [entry for entry in entries if entry.weight_version < oldest]
        return Selection(super().select(fresh, count, version).chosen, stale)
