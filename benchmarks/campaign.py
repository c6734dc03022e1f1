"""Campaign: what the controller costs, and the weight sync, in a real campaign of a few small steps.

SmolLM2-135M, everything as in `make campaign`, but three steps of two groups. Controller overhead: processor seconds of
the process that runs the controller's loop, over the time of the steps. The agents run in that process too, each with
an OpenAI client of its own; their processor time is measured apart, step by step of their coroutines, and left out.
Weight sync: the engine's loading and repacking of the new weights, beside copying the same bytes twice (out of the page
cache into memory, and once more).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.measure import Figure, Growth, median, unmeasured
from workbench.campaign.controller import Campaign, run_campaign
from workbench.campaign.environments import GuessNumber
from workbench.config import load_recipe

STEPS = 3
RECIPE = ["train.groups_per_step=2", f"train.steps={STEPS}", "rollouts.max_inflight_groups=2"]


class Clocked:
    """Processor and wall seconds of a campaign's run, and the agents' part of the former."""

    def __init__(self) -> None:
        self.spent = self.took = self.agents = 0.0

    def of_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        async def clocked(*arguments: Any) -> Any:
            spent, began = time.process_time(), time.perf_counter()
            try:
                return await run(*arguments)
            finally:
                self.spent, self.took = time.process_time() - spent, time.perf_counter() - began

        return clocked

    def of_agents(self, run: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        clock = self

        class Clocked:
            """A coroutine, resumed by hand; what it does between two waits is the agent's."""

            def __init__(self, *arguments: Any) -> None:
                self._coroutine = run(*arguments)

            def __await__(self) -> Generator[Any, Any, Any]:
                step, value = self._coroutine.send, None
                while True:
                    began = time.thread_time()
                    try:
                        waited_for = step(value)
                    except StopIteration as end:
                        return end.value
                    finally:
                        clock.agents += time.thread_time() - began
                    try:
                        step, value = self._coroutine.send, (yield waited_for)
                    except BaseException as error:
                        step, value = self._coroutine.throw, error

        async def clocked(*arguments: Any) -> Any:
            return await Clocked(*arguments)

        return clocked


def copy_twice(weights: Path) -> float:
    """Seconds to read the files of a weights folder out of the page cache and copy them once more in memory."""
    files = sorted(weights.glob("*.safetensors"))
    [file.read_bytes() for file in files]
    buffers = [bytearray(file.stat().st_size) for file in files]
    others = [np.zeros(len(buffer), dtype=np.uint8) for buffer in buffers]
    began = time.perf_counter()
    for file, buffer, other in zip(files, buffers, others, strict=True):
        with file.open("rb", buffering=0) as handle:
            handle.readinto(buffer)
        other[:] = np.frombuffer(buffer, dtype=np.uint8)
    return time.perf_counter() - began


async def _campaign(run_dir: Path) -> tuple[Clocked, list[dict[str, Any]], list[float]]:
    clock = Clocked()
    run, agent = Campaign.run, GuessNumber.run
    Campaign.run, GuessNumber.run = clock.of_run(run), clock.of_agents(agent)  # type: ignore[method-assign]
    try:
        await run_campaign(load_recipe("cpu_smollm2", RECIPE), run_dir)
    finally:
        Campaign.run, GuessNumber.run = run, agent  # type: ignore[method-assign]
    steps = [orjson.loads(line) for line in (run_dir / "steps.jsonl").read_bytes().splitlines()]
    newest = max((run_dir / "weights").iterdir(), key=lambda folder: folder.stat().st_mtime)
    return clock, steps, [copy_twice(newest) for _ in range(5)]


def measure() -> list[Figure | Growth]:
    """One campaign."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "bench"
        clock, steps, copies = asyncio.run(_campaign(run_dir))
        events = [orjson.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    finished: dict[str, Any] = next((event for event in events if event["kind"] == "finished"), {})
    lag_s = finished.get("loop_lag_p99_s")
    lag = "controller: loop lag p99"
    syncs = [step["worker_timings_s"] for step in steps if "worker_timings_s" in step]
    loads = [sync["load_s"] + sync["repack_s"] for sync in syncs]
    figures: list[Figure | Growth] = [
        Figure(
            "controller: processor time over step time",
            100 * (clock.spent - clock.agents) / clock.took,
            "%",
            at_most=2.0,
            note="All of that process but the agents: pumps, control plane, receipts and the run store.",
        ),
        Figure("agents: processor time over step time", 100 * clock.agents / clock.took, "%"),
        unmeasured(lag, "ms", "the run did not say", at_most=50.0)
        if lag_s is None
        else Figure(lag, 1e3 * lag_s, "ms", at_most=50.0),
        median("weight sync, 135M: loading and repacking", loads, "s"),
        median("weight sync, 135M: the same bytes copied twice", copies, "s"),
        Figure(
            "weight sync, 135M: over copying the bytes twice",
            float(np.median(loads) / np.median(copies)),
            "×",
            note="Close to 1 is the aim. Of 0.3 s on a quiet machine, by a profile of the engine's process: 0.12 s "
            "oneDNN packs 123 matrices for the processor, 0.04 s copying, 0.1 s vLLM's bookkeeping layer by layer.",
        ),
        median("weight sync, 135M: comparing with the file, held calls", [sync["compare_s"] for sync in syncs], "s"),
    ]
    return figures
