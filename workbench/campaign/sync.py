"""Sync: the weights that a step made reach the workers, are proved there, and only then is anything sampled from them.

    trainer publishes ─► workers hold calls and load ─► proof on a fixed prompt ─► workers resume ─► version := step

Invariant: `version` is the last one that every worker has confirmed and the proof has passed; whoever waits for a
version starts after that. Not here: how an engine loads weights (serving.weights), what the proof compares (proof).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from workbench.actors import within
from workbench.campaign.fleet import Fleet
from workbench.campaign.watch import Watch
from workbench.config import Recipe
from workbench.runs.writer import RunWriter


class Weights:
    """The weight version of a campaign; 0 is what the model came with."""

    def __init__(self, recipe: Recipe, fleet: Fleet, writer: RunWriter, watch: Watch) -> None:
        self.version = 0
        self._recipe = recipe
        self._fleet = fleet
        self._writer = writer
        self._watch = watch
        self._changed = asyncio.Condition()

    async def reached(self, version: int) -> None:
        """Wait until calls are sampled from `version` or newer."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def advance(self, step: int) -> dict[str, Any]:
        """Make the weights after `step` the ones that are sampled from; returns what it took, for the step's record.

        Raises WeightSyncError where worker and trainer disagree, DeadlineExceeded and ComponentDied naming the part.
        """
        fleet, timeout_s = self._fleet, self._recipe.train.sync_timeout_s
        self._writer.status_soon(phase="weight sync", step=step)
        began = time.monotonic()
        path = await within(fleet.trainer.publish.remote(step), timeout_s, "the trainer", f"publishing step {step}")
        published = time.monotonic()
        straddle = self._recipe.train.live_calls == "straddle"
        timings = await fleet.policy.load(path, step, timeout_s, straddle=straddle)
        loaded = time.monotonic()
        proof = await fleet.prove(step)
        await fleet.policy.resume(step, timeout_s)
        async with self._changed:
            self.version = step
            self._changed.notify_all()
        self._watch.moved()
        return {
            "publish_s": published - began,
            "load_s": loaded - published,
            "sync_s": time.monotonic() - published,
            "proof_mean_abs_delta": proof.mean_abs_delta,
            "proof_max_abs_delta": proof.max_abs_delta,
            "worker_timings_s": timings,
        }
