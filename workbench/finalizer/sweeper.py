"""Sweeper: finds rows in TransferQueue that nobody will fetch any more, and clears them, during a run and at its end.

    keys listed in `staging` and `train`  −  rollouts that somebody still works on  =  rows left behind ──▶ cleared

What is left behind: calls of rollouts whose group was given up or whose attempt was superseded, calls staged after
their rollout was frozen, rows whose clear failed, keys listed without a row.
Invariants: a row of a rollout that is live is never touched; a key is cleared while the run goes on only after it has
been left behind for `grace_s`, at least as long as a clear that was begun before, here or elsewhere, can take. Why:
TransferQueue looks a key up, clears the slot, and gives the slot to the next put; of two clears of one key at the same
time, the later one can empty a slot that holds somebody else's new row.
Not here: clearing what was finalised or trained (its finalizer, the trainer), who is live (campaign.supply).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Set

from workbench import dataplane

_LOG = logging.getLogger(__name__)

Live = Callable[[], Set[str]]
"""Rollout ids whose rows in one partition are still wanted. Asked after the keys have been listed."""


class Sweeper:
    """`live` gives, for each partition, what is still wanted; `swept` counts what was cleared, by partition.

    `deadline_s` bounds each request to the data plane.
    """

    def __init__(self, live: Mapping[str, Live], *, deadline_s: float, every_s: float, grace_s: float) -> None:
        self.swept = dict.fromkeys(live, 0)
        self._live = live
        self._deadline_s = deadline_s
        self._every_s = every_s
        self._grace_s = grace_s
        self._left_since: dict[str, dict[str, float]] = {partition: {} for partition in live}

    async def run(self) -> None:
        """Sweep for ever. A sweep that fails is one that comes later: who is dead is found out elsewhere."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.sweep()
            except Exception as error:
                _LOG.warning("a sweep failed and will be repeated: %s", error)

    async def sweep(self) -> int:
        """Clear what has been left behind for `grace_s`; returns how many keys."""
        count = 0
        for partition in self._live:
            left = self._left_since[partition]
            now = time.monotonic()
            found = await self._left_behind(partition)
            left = self._left_since[partition] = {key: left.get(key, now) for key in found}
            due = [key for key, since in left.items() if now - since >= self._grace_s]
            # A clear that fails may go on in the background: it has its time before the next one too.
            left.update(dict.fromkeys(due, now))
            count += await self._clear(partition, due)
        return count

    async def finish(self, timeout_s: float) -> dict[str, int]:
        """Clear everything that is left behind at once, until nothing is; for when nobody stages or clears any more.

        Returns the keys that are still listed in each partition: 0, unless `timeout_s` ran out or a rollout is live.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = {partition: await self._left_behind(partition) for partition in self._live}
            if not any(left.values()) or time.monotonic() > deadline:
                return {
                    partition: len(await dataplane.tags(partition, deadline_s=self._deadline_s))
                    for partition in self._live
                }
            for partition, keys in left.items():
                try:
                    await self._clear(partition, keys)
                except Exception as error:
                    _LOG.warning("%d keys of %s are not cleared yet: %s", len(keys), partition, error)
                    await asyncio.sleep(min(1.0, timeout_s / 10))

    async def _left_behind(self, partition: str) -> list[str]:
        # Listed first, and only then who is live: a row that came in between belongs to somebody and is not listed.
        listed = await dataplane.tags(partition, deadline_s=self._deadline_s)
        live = self._live[partition]()
        return [key for key in listed if key.partition("/")[0] not in live]

    async def _clear(self, partition: str, keys: list[str]) -> int:
        if keys:
            await dataplane.clear(partition, keys, deadline_s=self._deadline_s)
            self.swept[partition] += len(keys)
        return len(keys)
