"""Policy: the policy workers of a campaign, asked as one. There is one of them, or several with the same weights.

Invariants: nothing is sampled from new weights by any worker before all of them hold them (`load`, then `resume`); an
error names the worker at fault. Which worker a rollout's calls go to is the gateway's (gateway.upstream).
Not here: what a worker does (serving.worker), where it stands (placement).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from workbench.actors import within
from workbench.campaign.handles import WorkerActor

START_S = "deadlines.start_s"
"""The recipe's key for what has no deadline of its own at the start."""
PARTS_S = "engine.start_timeout_s"
"""The one for what starts beside the engines: the trainer and the finalizers too."""


class PolicyWorkers:
    """`actors` in the order of their numbers."""

    def __init__(self, actors: Sequence[WorkerActor]) -> None:
        self.actors = list(actors)
        self.urls: list[str] = []
        """Base address of each, once it serves."""

    @property
    def names(self) -> list[str]:
        """For a sentence: `the policy worker`, or with a number where there are several."""
        if len(self.actors) == 1:
            return ["the policy worker"]
        return [f"policy worker {number}" for number in range(len(self.actors))]

    async def start(self, timeout_s: float) -> None:
        """Start every engine; a worker ends its own wait at `timeout_s`, with a better reason than ours."""
        self.urls = await self._all("start", (), timeout_s + 30.0, "starting its engine", key=PARTS_S)

    async def probe(self, timeout_s: float) -> dict[str, Any]:
        """Hold the start-up conversation with every worker; the report of the first, they are all of one model."""
        return (await self._all("probe", (), timeout_s, "the start-up probe", key=START_S))[0]

    async def load(self, path: str, version: int, timeout_s: float, *, straddle: bool = False) -> dict[str, float]:
        """Have every worker hold its calls and load `path`; returns the longest that any took for each part, and of
        calls that straddle (`straddling`) the number at all of them."""
        asked = (path, version, True, straddle)
        timings = await self._all("update_weights", asked, timeout_s, f"loading step {version}")
        put_together = {part: sum if part == "straddling" else max for part in timings[0]}
        return {part: over([each.get(part, 0.0) for each in timings]) for part, over in put_together.items()}

    async def resume(self, version: int, timeout_s: float) -> None:
        """Let all of them sample again."""
        await self._all("resume", (), timeout_s, f"resuming at step {version}")

    async def scores(self, ids: list[list[int]], version: int, timeout_s: float) -> list[list[list[float]]]:
        """Log-probs of the proof prompt by each worker."""
        return await self._all("score", (ids,), timeout_s, f"the proof of version {version}")

    async def quiet(self, timeout_s: float) -> bool:
        """Whether no worker has a call under way."""
        statuses = await self._all("status", (), timeout_s, "ending its calls")
        return not any(status["running_generations"] or status.get("live_calls") for status in statuses)

    async def check_alive(self, timeout_s: float) -> None:
        """Raise ComponentDied where a worker, or its engine, is gone."""
        await self._all("check_alive", (), timeout_s, "answering")

    async def facts(self, call_ids: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Sampled tokens and finish reason of those of the calls that were captured lately."""
        answers = await self._all("facts", (list(call_ids),), timeout_s, "telling how calls ended")
        return {call_id: fact for answer in answers for call_id, fact in answer.items()}

    def heartbeats(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name, a call that fails when that worker is dead."""
        return {name: partial(_ask_alive, actor) for name, actor in zip(self.names, self.actors, strict=True)}

    async def _all(
        self, method: str, arguments: tuple[Any, ...], timeout_s: float, doing: str, *, key: str = ""
    ) -> list[Any]:
        asked = [
            within(getattr(actor, method).remote(*arguments), timeout_s, name, doing, key=key)
            for name, actor in zip(self.names, self.actors, strict=True)
        ]
        return await asyncio.gather(*asked)


def _ask_alive(actor: WorkerActor) -> Awaitable[None]:
    return actor.check_alive.remote()
