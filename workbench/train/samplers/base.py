"""Base of the samplers: what a choice looks like, and what every sampler promises.

In: the buffer's entries in reservation order, how many groups a step takes, the trainer's version. Out: a `Selection`.
The buffer holds samplers to these rules: `chosen` are ready entries, each once, at most as many as asked for; `stale`
are entries to give up, none of them chosen. A sampler is pure: it sees a snapshot, keeps nothing and changes nothing.
A new sampler is a new file with a subclass and one line in the registry (`samplers/__init__.py`), or, outside the
package, a subclass that a recipe names as `package.module:Class`. Its options are its dataclass fields; one called
`max_staleness` that the recipe leaves out is `train.max_staleness`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Entry:
    """One group in the buffer. `train_keys` is empty until the group is ready; `order` counts reservations.

    `weight_version` is the version at dispatch while reserved, then the oldest version in the group's rows.
    """

    group_id: str
    rollout_ids: tuple[str, ...]
    weight_version: int
    order: int
    train_keys: tuple[str, ...] = ()
    payload: Any = None

    @property
    def ready(self) -> bool:
        return bool(self.train_keys)


class Selection(NamedTuple):
    """`chosen`: entries for the next step, in the order they enter the batch. `stale`: entries that must leave."""

    chosen: list[Entry]
    stale: list[Entry]


@dataclass(frozen=True)
class Sampler(ABC):
    """One way to choose the groups of the next step."""

    @abstractmethod
    def select(self, entries: Sequence[Entry], count: int, version: int) -> Selection:
        """Choose up to `count` ready groups for a trainer at `version`; fewer than `count` means: not yet."""

    def places_needed(self, groups_per_step: int) -> int:
        """The smallest buffer, in groups, with which a step of `groups_per_step` groups can always be filled."""
        return groups_per_step
