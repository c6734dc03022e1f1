"""Replay buffer: which finalised groups wait for the trainer, and in which order it gets them.

    reserve(group, rollouts) -> commit_finalized(group, train keys) -> take(n) -> the trainer
                             -> abort(group)                           remove(group) / evicted as too stale

It holds ids and key names, never tensors. Every group is in exactly one state (reserved, ready, consumed, discarded)
and is found by its id, never by a remembered position, so removing one while another is being removed is safe.
Invariants: no group is taken twice; a group that was not asked for stays; at most `capacity` groups are
reserved or ready; a group that was discarded while its finalizer was still writing is told so at commit.
Everything that leaves without being trained on comes back as `Discarded`, which names what must be cleared in
TransferQueue.
Not here: clearing it (campaign.sampling), the order (samplers), waiting for room or groups (campaign.supply).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import RecipeError, ReplayBufferError
from workbench.train.samplers import Entry, Sampler, Selection, sampler

if TYPE_CHECKING:
    from workbench.recipe_training import Train

State = Literal["reserved", "ready", "consumed", "discarded"]


@dataclass(frozen=True, slots=True)
class Discarded:
    """A group that left untrained. What it still holds: train rows under `train_keys` (a ready group), or staged
    calls of `rollout_ids` (a reserved one, whose finalizer may still be at work)."""

    group_id: str
    rollout_ids: tuple[str, ...]
    train_keys: tuple[str, ...]
    reason: str


class ReplayBuffer:
    """Groups between dispatch and training. Single-threaded: it belongs to the controller's event loop.

    `capacity` bounds reserved + ready groups; `choose` decides who is next (a `Sampler`, or the name of one without
    options).
    """

    def __init__(self, capacity: int, choose: Sampler | str = "in_order") -> None:
        if capacity < 1:
            raise RecipeError(f"the replay buffer needs room for 1 group or more, got {capacity}")
        self.capacity = capacity
        self._sampler = sampler(choose) if isinstance(choose, str) else choose
        self._entries: dict[str, Entry] = {}  # insertion order = reservation order
        self._gone: dict[str, State] = {}
        self._evicted: list[Discarded] = []
        self._reserved_ever = 0

    @classmethod
    def of(cls, train: Train) -> ReplayBuffer:
        """The buffer that a recipe's `train` section asks for.

        Raises RecipeError for an unknown sampler or option, and for a capacity with which a step could never be
        filled, naming the number needed.
        """
        try:
            chosen = sampler(train.sampler.name, train.max_staleness, **train.sampler.options)
        except RecipeError as error:
            raise RecipeError(f"train.sampler: {error}") from error
        needed = chosen.places_needed(train.groups_per_step)
        if train.buffer_groups is not None and train.buffer_groups < needed:
            raise RecipeError(
                f"train.buffer_groups: expected at least {needed}, because the sampler {train.sampler.name} could "
                f"never fill a step of {train.groups_per_step} groups (train.groups_per_step) with fewer places; got "
                f"{train.buffer_groups}"
            )
        # Groups of the step being trained, of the one being sampled, and of each further step that may run ahead.
        roomy = train.groups_per_step * (train.max_staleness + 2)
        return cls(train.buffer_groups or max(needed, roomy), chosen)

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

        Groups found too stale by the sampler leave the buffer and wait in `drain_evicted`. Raises ReplayBufferError
        for a sampler that breaks the rules of `samplers.base`.
        """
        if count < 1:
            raise ReplayBufferError(f"expected to take 1 group or more, got {count}")
        selection = self._sampler.select(tuple(self._entries.values()), count, current_version)
        chosen, stale = self._checked(selection, count)
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
        """Groups evicted since the last call; the caller clears what they hold, counts them and replaces them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _checked(self, selection: Selection, count: int) -> Selection:
        chosen, stale = selection
        ids = [entry.group_id for entry in (*chosen, *stale)]
        held = all(self._entries.get(entry.group_id) is entry for entry in (*chosen, *stale))
        if len(chosen) > count or len(set(ids)) != len(ids) or not held or not all(e.ready for e in chosen):
            raise ReplayBufferError(
                f"sampler {type(self._sampler).__name__}, asked for {count} groups, chose "
                f"{[e.group_id for e in chosen]} and gave up {[e.group_id for e in stale]}; expected at most {count} "
                f"ready groups of the buffer, each once, and none of them given up"
            )
        return selection
