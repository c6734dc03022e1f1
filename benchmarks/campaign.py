"""Campaign: what the controller costs, and the weight sync, in a real campaign of two small steps.

SmolLM2-135M, everything as in `make campaign`, but two steps of two groups. Controller overhead: processor seconds of
the process that runs the controller's loop, over the time of the steps. Weight sync: the engine's loading and
repacking of the new weights, beside copying the same bytes twice (out of the page cache into memory, and once more).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.measure import Figure, Growth, median, unmeasured
from workbench.campaign.controller import run_campaign
from workbench.config import load_recipe

STEPS = 2
RECIPE = ["train.groups_per_step=2", f"train.steps={STEPS}", "rollouts.max_inflight_groups=2"]


class Clocked:
    """A run directory's events with the processor seconds of this process at each of them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.spent[name], self.wall[name] = time.process_time(), time.perf_counter()

    def share(self) -> float:
        """Processor seconds a second between the two marks."""
        return (self.spent["end"] - self.spent["begin"]) / (self.wall["end"] - self.wall["begin"])


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
    from workbench.campaign.controller import Campaign

    clock = Clocked()
    run = Campaign.run

    async def clocked(self: Campaign, *args: Any) -> Any:
        clock.mark("begin")
        result = await run(self, *args)
        clock.mark("end")
        return result

    Campaign.run = clocked  # type: ignore[method-assign, assignment]
    try:
        await run_campaign(load_recipe("cpu_smollm2", RECIPE), run_dir)
    finally:
        Campaign.run = run  # type: ignore[method-assign]
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
            100 * clock.share(),
            "%",
            at_most=2.0,
            note="All of that process: the pumps, the agents' HTTP clients, receipts and the run store.",
        ),
        unmeasured(lag, "ms", "the run did not say", at_most=50.0)
        if lag_s is None
        else Figure(lag, 1e3 * lag_s, "ms", at_most=50.0),
        median("weight sync, 135M: loading and repacking", loads, "s"),
        median("weight sync, 135M: the same bytes copied twice", copies, "s"),
        Figure(
            "weight sync, 135M: over copying the bytes twice",
            float(np.median(loads) / np.median(copies)),
            "×",
            note="Close to 1 is the aim; the engine also converts to its dtype and packs matrices for the processor.",
        ),
        median("weight sync, 135M: comparing with the file, held calls", [sync["compare_s"] for sync in syncs], "s"),
    ]
    return figures
