"""Weight FIFO: ready groups, those of the oldest weights first, whatever is still being sampled.

A step never waits for a slow group, which then trains later and staler than the rest; `windowed` bounds by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.train.samplers.base import Entry, Sampler, Selection


@dataclass(frozen=True)
class WeightFifo(Sampler):
    def select(self, entries: Sequence[Entry], count: int, version: int) -> Selection:
        ready = [entry for entry in entries if entry.ready]
        return Selection(sorted(ready, key=lambda entry: (entry.weight_version, entry.order))[:count], [])
