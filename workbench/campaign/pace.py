"""Pace: how long the steps that are left will take, by those that were taken.

The first step of a process waits for groups that later ones find ready, so it counts only while no other is known; a
run that is gone on with knows the steps of the processes before. The median of the last few, so that one step with a
checkpoint or a slow group is no trend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import Any

_LAST = 8
_PARTS = ("rollout_s", "train_s", "publish_s", "sync_s")


class Pace:
    """Seconds a step. `stored` are the lines of steps that were taken before this process, in order; `first_steps` are
    those that a process began with."""

    def __init__(self, stored: Iterable[Mapping[str, Any]] = (), first_steps: Collection[int] = (1,)) -> None:
        timed = [line for line in stored if all(line.get(part) for part in _PARTS)]
        took = {line["step"]: sum(line[part] for part in _PARTS) for line in timed}
        self._first = [took[step] for step in took if step in first_steps][-1:]
        self._later = deque((took[step] for step in took if step not in first_steps), maxlen=_LAST)
        self._waits_for_first = True

    def took(self, seconds: float) -> None:
        """A step of this process has taken so long."""
        if self._waits_for_first:
            self._waits_for_first = False
            self._first = self._first or [seconds]
        else:
            self._later.append(seconds)

    def for_steps(self, steps: int) -> float:
        """Seconds that `steps` more will take. At least one step must have been taken."""
        return median(self._later or self._first) * steps
