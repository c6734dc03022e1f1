"""Supply: the replay buffer as the pumps wait on it.

    rollout pump: await reserve ─► commit | abort          train pump: await take(count) ─► trained

Invariants: `reserve` waits until there is room (back-pressure), `take` until there are enough groups; whatever makes
room or a group ready wakes both; of a group evicted while `take` waits the pump hears at once, since without another in
its place the step might wait for ever. It knows at any time whose rows in TransferQueue are still wanted.
Not here: which groups are chosen (train.buffer), clearing what nobody wants (finalizer.sweeper).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from workbench.finalizer.messages import FinalizedGroup
from workbench.train.buffer import Discarded, Entry, ReplayBuffer


class Supply:
    """`buffer` belongs to one event loop; so does this."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.on_evicted: Callable[[Discarded], None] = lambda discarded: None
        """Called for each group that the sampler gives up as too stale."""
        self._changed = asyncio.Condition()
        # An evicted group leaves the buffer while agents and a finalizer may still be at work on it.
        self._in_play: dict[str, set[str]] = {}
        self._in_training: dict[str, set[str]] = {}

    def staging(self) -> set[str]:
        """Rollouts whose staged calls somebody still writes, reads or clears: those being played or finalised."""
        return set[str]().union(*self._in_play.values())

    def training(self) -> set[str]:
        """Rollouts whose training rows are wanted: being published, ready, or in the step that is being taken."""
        ready = (set(entry.rollout_ids) for entry in self.buffer.groups("ready"))
        return set[str]().union(*self._in_play.values(), *ready, *self._in_training.values())

    async def reserve(self, group_id: str, rollout_ids: Sequence[str], weight_version: Callable[[], int]) -> int:
        """Wait for room, then reserve it at the version that `weight_version` gives then, which is returned."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.buffer.free > 0)
            version = weight_version()
            self.buffer.reserve(group_id, rollout_ids, version)
            self._in_play[group_id] = set(rollout_ids)
        return version

    async def commit(self, group: FinalizedGroup, weight_version: int) -> bool:
        """Make a reserved group ready; False when it was discarded meanwhile."""
        async with self._changed:
            self._in_play.pop(group.group_id, None)
            kept = self.buffer.commit_finalized(
                group.group_id, group.train_keys, weight_version=weight_version, payload=group
            )
            self._changed.notify_all()
        return kept

    async def abort(self, group_id: str) -> Discarded | None:
        """Give up a reserved group."""
        async with self._changed:
            self._in_play.pop(group_id, None)
            discarded = self.buffer.abort(group_id)
            self._changed.notify_all()
        return discarded

    async def take(self, count: int, version: int) -> list[Entry]:
        """Wait for `count` groups and take them for a trainer at `version`."""
        async with self._changed:
            while not (taken := self._take(count, version)):
                await self._changed.wait()
            self._in_training |= {entry.group_id: set(entry.rollout_ids) for entry in taken}
            self._changed.notify_all()
        return taken

    def _take(self, count: int, version: int) -> list[Entry]:
        taken = self.buffer.take(count, current_version=version)
        if evicted := self.buffer.drain_evicted():
            self._changed.notify_all()  # there is room now
        for discarded in evicted:
            self.on_evicted(discarded)
        return taken

    def trained(self, entries: Sequence[Entry]) -> None:
        """The step on these groups has been taken: what is left of their rows may go."""
        for entry in entries:
            self._in_training.pop(entry.group_id, None)
