"""Replay buffer: which finalised groups wait for the trainer, and in which order it gets them.

    reserve(group, rollouts) -> commit_finalized(group, train keys) -> take(n) -> the trainer
                             -> abort(group)                           remove(group) / evicted as too stale

It holds ids and key names, never tensors. Every group is in exactly one state (reserved, ready, consumed, discarded)
and is found by its id, never by a remembered position, so removing one while another is being removed is safe.
Invariants: no group is taken twice; a group that was not asked for stays; at most `capacity` groups are
reserved or ready; a group that was discarded while its finalizer was still writing is told so at commit.
Everything that leaves without being trained on comes back as `Discarded`, which names what must be cleared in
TransferQueue. Not here: clearing it (controller), advantages (trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from workbench.errors import RecipeError, ReplayBufferError

State = Literal["reserved", "ready", "consumed", "discarded"]


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


@dataclass(frozen=True, slots=True)
class Discarded:
    """A group that left untrained. What it still holds: train rows under `train_keys` (a ready group), or staged
    calls of `rollout_ids` (a reserved one, whose finalizer may still be at work)."""

    group_id: str
    rollout_ids: tuple[str, ...]
    train_keys: tuple[str, ...]
    reason: str


#: (entries in reservation order, asked for, trainer's version) -> (chosen ready entries, entries too stale to keep)
Sampler = Callable[[Sequence[Entry], int, int], tuple[list[Entry], list[Entry]]]


def in_order(entries: Sequence[Entry], count: int, version: int) -> tuple[list[Entry], list[Entry]]:
    """Groups in the order of their reservation: a group waits for the earlier ones, so that a run is repeatable."""
    chosen: list[Entry] = []
    for entry in entries:
        if len(chosen) == count or not entry.ready:
            break
        chosen.append(entry)
    return chosen, []


def weight_fifo(entries: Sequence[Entry], count: int, version: int) -> tuple[list[Entry], list[Entry]]:
    """Ready groups, the oldest weights first, whatever is still being finalised."""
    ready = sorted((e for e in entries if e.ready), key=lambda e: (e.weight_version, e.order))
    return ready[:count], []


def windowed(max_staleness: int) -> Sampler:
    """`weight_fifo` over groups at most `max_staleness` versions behind the trainer; staler ones are given up."""
    if max_staleness < 0:
        raise RecipeError(f"train.max_staleness: expected 0 or more, got {max_staleness}")

    def sampler(entries: Sequence[Entry], count: int, version: int) -> tuple[list[Entry], list[Entry]]:
        stale = [e for e in entries if version - e.weight_version > max_staleness]
        gone = {e.group_id for e in stale}
        chosen, _ = weight_fifo([e for e in entries if e.group_id not in gone], count, version)
        return chosen, stale

    return sampler


SAMPLERS = ("in_order", "weight_fifo", "windowed")


def make_sampler(name: str, max_staleness: int | None = None) -> Sampler:
    """Sampler by name; `windowed` needs `max_staleness`. RecipeError names the choices."""
    if name == "windowed":
        if max_staleness is None:
            raise RecipeError("sampler windowed needs train.max_staleness; set it to 0 for on-policy groups only")
        return windowed(max_staleness)
    known: dict[str, Sampler] = {"in_order": in_order, "weight_fifo": weight_fifo}
    if name not in known:
        raise RecipeError(f"unknown sampler {name!r}; allowed: {', '.join(SAMPLERS)}")
    return known[name]


class ReplayBuffer:
    """Groups between dispatch and training. Single-threaded: it belongs to the controller's event loop.

    `capacity` bounds reserved + ready groups; `sampler` is one of `SAMPLERS`; `max_staleness` (versions) is what
    `windowed` needs and the others leave to whoever dispatches.
    """

    def __init__(self, capacity: int, sampler: str = "in_order", *, max_staleness: int | None = None) -> None:
        if capacity < 1:
            raise RecipeError(f"the replay buffer needs room for 1 group or more, got {capacity}")
        self.capacity = capacity
        self._sampler = make_sampler(sampler, max_staleness)
        self._entries: dict[str, Entry] = {}  # insertion order = reservation order
        self._gone: dict[str, State] = {}
        self._evicted: list[Discarded] = []
        self._reserved_ever = 0

    # what is in it

    @property
    def free(self) -> int:
        """Groups that may still be reserved."""
        return self.capacity - len(self._entries)

    def state(self, group_id: str) -> State | None:
        """State of a group, None for one that was never reserved."""
        if group_id in self._entries:
            return "ready" if self._entries[group_id].ready else "reserved"
        return self._gone.get(group_id)

    def groups(self, state: Literal["reserved", "ready"]) -> list[Entry]:
        """Entries of one state, in reservation order."""
        return [e for e in self._entries.values() if e.ready == (state == "ready")]

    # the life of a group

    def reserve(self, group_id: str, rollout_ids: Iterable[str], weight_version: int = 0) -> None:
        """Make room for a group, dispatched at `weight_version`.

        Raises ReplayBufferError when the buffer is full or the id was used before.
        """
        rollouts = tuple(rollout_ids)
        if (state := self.state(group_id)) is not None:
            raise ReplayBufferError(f"group {group_id} is already {state}; a new attempt needs a new group id")
        if not rollouts or len(set(rollouts)) != len(rollouts):
            raise ReplayBufferError(f"group {group_id} needs one distinct id a rollout, got {rollouts}")
        if self.free < 1:
            raise ReplayBufferError(
                f"group {group_id} does not fit: {len(self._entries)} of {self.capacity} places are taken; "
                f"take or remove groups before reserving more"
            )
        self._entries[group_id] = Entry(group_id, rollouts, weight_version, self._reserved_ever)
        self._reserved_ever += 1

    def commit_finalized(
        self,
        group_id: str,
        train_keys: Iterable[str],
        *,
        weight_version: int | None = None,
        payload: Any = None,
    ) -> bool:
        """The group's rows are published: one train key a rollout, in index order.

        `weight_version` is the oldest version in its rows (None keeps the version of its dispatch). Returns False
        when the group was discarded meanwhile: the caller then clears the train keys it just published.
        """
        keys = tuple(train_keys)
        state = self.state(group_id)
        if state == "discarded":
            return False
        if state != "reserved":
            raise ReplayBufferError(f"group {group_id} cannot become ready: it is {state or 'not reserved'}")
        entry = self._entries[group_id]
        if len(keys) != len(entry.rollout_ids) or len(set(keys)) != len(keys):
            raise ReplayBufferError(
                f"group {group_id} reserved {len(entry.rollout_ids)} rollouts but {len(keys)} train keys "
                f"({len(set(keys))} distinct) were committed; the finalizer must publish exactly N rows"
            )
        version = entry.weight_version if weight_version is None else weight_version
        self._entries[group_id] = replace(entry, train_keys=keys, weight_version=version, payload=payload)
        return True

    def abort(self, group_id: str, reason: str = "aborted") -> Discarded | None:
        """Give up a reserved group (its finalizer failed). None when it was discarded before."""
        if self.state(group_id) == "ready":
            raise ReplayBufferError(f"group {group_id} is ready and cannot be aborted; remove it instead")
        return self.remove(group_id, reason)

    def remove(self, group_id: str, reason: str = "removed") -> Discarded | None:
        """Discard a reserved or ready group. None when it is not in the buffer (any more)."""
        entry = self._entries.pop(group_id, None)
        if entry is None:
            return None
        self._gone[group_id] = "discarded"
        return Discarded(group_id, entry.rollout_ids, entry.train_keys, reason)

    def take(self, count: int, current_version: int) -> list[Entry]:
        """Exactly `count` ready groups for a trainer at `current_version`, or none at all when fewer can be had.

        Groups found too stale by the sampler leave the buffer and wait in `drain_evicted`.
        """
        if count < 1:
            raise ReplayBufferError(f"expected to take 1 group or more, got {count}")
        chosen, stale = self._sampler(tuple(self._entries.values()), count, current_version)
        for entry in stale:
            gone = self.remove(entry.group_id, f"stale: version {entry.weight_version} at {current_version}")
            if gone is not None:
                self._evicted.append(gone)
        if len(chosen) < count:
            return []
        for entry in chosen:
            del self._entries[entry.group_id]
            self._gone[entry.group_id] = "consumed"
        return chosen

    def drain_evicted(self) -> list[Discarded]:
        """Groups evicted since the last call; the caller clears what they hold and counts them."""
        evicted, self._evicted = self._evicted, []
        return evicted
