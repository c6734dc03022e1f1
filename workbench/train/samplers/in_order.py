"""In order: groups in the order of their reservation.

A group waits for the earlier ones, however early it is ready itself; so what a run trains on does not depend on which
rollout was quick, and with repeatable rollouts the whole run is repeatable. The price: one slow group holds a step up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from workbench.train.samplers.base import Entry, Sampler, Selection


@dataclass(frozen=True)
class InOrder(Sampler):
    def select(self, entries: Sequence[Entry], count: int, version: int) -> Selection:
        return Selection(list(takewhile(lambda entry: entry.ready, entries[:count])), [])
