"""A whole campaign on a scripted engine: everything else (Ray, TransferQueue, gateway, finalizers, trainer) is real.

A recipe that names the scripted engine is refused, because such a run trains on words that nobody sampled. Here the
fleet is made by hand, which is the one way around that. It joins the Ray that the tests share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from workbench import dataplane
from workbench.campaign.controller import CampaignResult, run_campaign
from workbench.campaign.fleet import Fleet
from workbench.campaign.proof import SyncProof
from workbench.config import Recipe, load_recipe

REPLIES = ["Guess: 5", "Guess: 12", "Guess: 9", "I would say 14"]


class ScriptedFleet(Fleet):
    """`Fleet` in a running Ray, with an engine that has no weights: nothing to prove, nothing to refuse.

    Where this process is connected to a data plane already, the campaign joins it and leaves it as it was: three
    processes less to start, which is a third of the start.
    """

    joined: frozenset[str] = frozenset()
    """Names of parts that were there before this campaign and outlive it."""

    def _check_machine(self) -> None:
        return

    async def _start_ray(self) -> None:
        return

    async def _start_data_plane(self) -> None:
        if not dataplane._connected:
            await super()._start_data_plane()
            return
        self._stops.append(("data plane", lambda: dataplane.drain_clears(self._patience_s)))
        self._data_plane_actors = await asyncio.to_thread(dataplane.actors, self.recipe.data_plane.storage_units)
        self.joined = frozenset(self._data_plane_actors)

    async def prove(self, version: int) -> SyncProof:
        return SyncProof(version, 0.0, 0.0)


STARTS_WITHIN_S = 400.0
"""Half a minute alone; what the tests are about begins when the parts run."""
REAL_DEADLINES = os.environ.get("SOAK_DEADLINES") == "real"
SHORT_DEADLINES = (
    "finalizer.timeout_s=20", "data_plane.send_recv_timeout_s=5", "data_plane.max_attempts=1",
    "data_plane.sweep_every_s=0.5", "deadlines.heartbeat_s=0.2", "deadlines.control_s=10", "deadlines.stop_s=10",
    "deadlines.replace_s=150",
    "rollouts.timeout_s=20", "gateway.request_timeout_s=20", "train.sync_timeout_s=20", "train.timeout_s=60",
)  # fmt: skip


def scripted_recipe(folder: Path, *overrides: str, delay_s: float = 0.1) -> Recipe:
    """The smoke recipe on a scripted engine that takes `delay_s` a call; deadlines of a few seconds, or the real ones
    where the environment says SOAK_DEADLINES=real."""
    script = folder / "script.jsonl"
    script.write_text("\n".join(json.dumps({"text": text, "delay_s": delay_s}) for text in REPLIES))
    fixed = ("engine.kind=scripted", f"engine.script_path={script}", "finalizer.actors=2", "train.threads=1")
    return load_recipe("cpu_smoke", [*fixed, *(() if REAL_DEADLINES else SHORT_DEADLINES), *overrides])


@contextlib.contextmanager
def own_data_plane() -> Iterator[None]:
    """The shared Ray without the shared data plane: campaigns start and stop their own."""
    shared = dataplane._connected
    dataplane.stop()
    yield
    dataplane.stop()
    if shared:
        dataplane.start(storage_units=2, send_recv_timeout_s=5.0, max_attempts=1, start_timeout_s=300.0)


async def empty_data_plane() -> None:
    """Remove what a campaign that failed has left in the shared data plane, so that the next one finds it empty."""
    for partition in (dataplane.STAGING, dataplane.TRAIN):
        await dataplane.clear(partition, list(await dataplane.tags(partition, deadline_s=10)), deadline_s=10)


class Running:
    """A campaign under way in this event loop. `fleet` is there once its parts have been made."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.fleet: ScriptedFleet | None = None
        self.pids: dict[str, int] = {}
        self._processes: dict[int, psutil.Process] = {}
        self.task: asyncio.Task[CampaignResult] = asyncio.create_task(
            run_campaign(recipe, run_dir, make_fleet=self._make_fleet)
        )

    def _make_fleet(self, *args: Any, **kwargs: Any) -> ScriptedFleet:
        self.fleet = ScriptedFleet(*args, **kwargs)
        return self.fleet

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Whatever the test came to: nothing of the campaign runs on into the next one."""
        self.task.cancel()
        await asyncio.wait([self.task])

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run_dir / "events.jsonl").read_bytes().splitlines()
            found = [json.loads(line) for line in lines]
            return [event for event in found if kind in (None, event["kind"])]
        return []

    async def until(self, condition: Callable[[], Any], timeout_s: float = 200.0) -> Any:
        """Wait until `condition()` is true; the campaign must still run then."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.task.done():
                await self.task
                raise AssertionError("the campaign ended before")
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s; the last events: {self.events()[-3:]}"
            await asyncio.sleep(0.02)
        return found

    async def until_under_way(self) -> None:
        """Wait until a first step was trained and further groups are being played; learns every part's pid."""
        await self.until(lambda: self.events("started"), STARTS_WITHIN_S)
        await self.look()
        await self.until(lambda: (self.run_dir / "steps.jsonl").stat().st_size)

    async def look(self) -> None:
        """Learn the pids of all parts."""
        fleet = self.fleet
        assert fleet is not None
        actors = {
            **{
                name.removeprefix("the "): actor
                for name, actor in zip(fleet.policy.names, fleet.policy.actors, strict=True)
            },
            "trainer": fleet.trainer,
            **fleet._further_ranks,
            **{f"finalizer {number}": actor for number, actor in enumerate(fleet.finalizers.actors)},
            **fleet._data_plane_actors,
        }
        asked = [_pid(actor) for actor in actors.values()]
        self.pids = dict(zip(actors, await asyncio.gather(*asked), strict=True)) | {"gateway": fleet.gateway.pids[0]}
        self._processes |= {pid: psutil.Process(pid) for part, pid in self.pids.items() if part not in fleet.joined}

    async def survivors(self, timeout_s: float = 15.0) -> list[str]:
        """Parts that outlive their campaign."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, list(self._processes.values()), timeout=timeout_s)
        names = {pid: name for name, pid in self.pids.items()}
        return [f"{p.pid} {names.get(p.pid)}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


async def _pid(actor: Any) -> int:
    return await actor.__ray_call__.remote(lambda self: os.getpid())
