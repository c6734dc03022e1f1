"""Added latency: what gateway, capture and staging add to one call, one call at a time.

The engine is scripted and answers at once, so that nothing but the road is timed. Each call of a conversation goes to
the gateway (resolved, admitted, spliced on ids in the cache of the worker, captured, staged, recorded) and, in turn,
straight to the worker, untagged and uncaptured. With TransferQueue, gateway and worker are processes of their own, as
in a campaign; without, staging is a dictionary and all parts share this process. A rollout's first call makes its files
and is told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.measure import Figure, Growth, median, unmeasured
from workbench.campaign.fleet import WORKER_TOKEN, Fleet
from workbench.config import load_recipe
from workbench.demo.bench import open_bench

ROLLOUTS, TURNS = 15, 4
SIZES = (4, 8, 16, 32)
LINE = {"text": "Guess: 12"}
OF_ONE_PROCESS = "Gateway, worker and the client that times are one process; what is staged goes to a dictionary."
OF_A_CAMPAIGN = "As in a campaign: gateway and worker are processes of their own, TransferQueue is real, under Ray."
FIRST = "Makes the rollout's files, whose names are fsynced too. For information; the target is for the calls after it."
NOTE = (
    "One more HTTP exchange in Python, to the worker, about as long as the straight call, and three fsyncs one after "
    "the other: served bytes, the line that says where they are, and the ledger row."
)


class _Fleet(Fleet):
    """A campaign's parts with an engine that has no weights, which a campaign would refuse."""

    def _check_machine(self) -> None:
        return


@contextlib.asynccontextmanager
async def with_transfer_queue(folder: Path) -> AsyncIterator[tuple[str, str, str]]:
    """URLs of gateway and worker, and the worker's token; all parts as in a campaign."""
    import os

    script = folder / "script.jsonl"
    script.write_text(json.dumps(LINE))
    recipe = load_recipe("cpu_smoke", ["engine.kind=scripted", f"engine.script_path={script}", "finalizer.actors=1"])
    async with _Fleet(recipe, folder / "run", training=False) as fleet:
        yield fleet.gateway_url, fleet.policy.urls[0], os.environ[WORKER_TOKEN]


@contextlib.asynccontextmanager
async def without_transfer_queue(folder: Path) -> AsyncIterator[tuple[str, str, str]]:
    """The same of a bench in this process."""
    async with open_bench([LINE], path=folder / "bench", max_model_len=4_096) as bench:
        yield bench.url, bench.worker.url, bench.worker._token


async def conversation(
    client: httpx.AsyncClient, name: str, road: tuple[str, str, str], turns: int = TURNS
) -> list[tuple[float, float]]:
    """One rollout; for each call the seconds through the gateway and straight to the worker."""
    gateway, worker, token = road
    messages: list[dict[str, Any]] = [{"role": "user", "content": "A number from 1 to 20?"}]
    took = []
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        began = time.perf_counter()
        answer = await client.post(f"{gateway}/ng-rollout/{name}/v1/chat/completions", json=body)
        middle = time.perf_counter()
        answer.raise_for_status()
        limits = {"max_tokens": 16}  # the gateway pins the recipe's; the worker's own default is the whole window
        headers = {"authorization": f"Bearer {token}"}
        plain = await client.post(f"{worker}/v1/chat/completions", json=body | limits, headers=headers)
        end = time.perf_counter()
        plain.raise_for_status()
        took.append((middle - began, end - middle))
        said = answer.json()["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "higher"}]
    return took


async def compared(road: tuple[str, str, str]) -> np.ndarray:
    """Seconds (through the gateway, straight to the worker) of every call, float64[rollouts, turns, 2]."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        await conversation(client, "warm.0.0.0", road)
        rollouts = [await conversation(client, f"bench.0.{number}.0", road) for number in range(ROLLOUTS)]
    return np.array(rollouts)


async def growing(road: tuple[str, str, str]) -> Growth:
    """What a call takes more through the gateway, the more calls its conversation has before it."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        last = max(SIZES)
        rollouts = [await conversation(client, f"long.0.{number}.0", road, last + 1) for number in range(7)]
    seconds = np.array(rollouts)[:, 1:]
    added = seconds[..., 0] - seconds[..., 1]
    # Every size with the calls around it: one alone is a single sample a rollout.
    grown = [float(np.median(added[:, max(0, size - 3) : size])) for size in SIZES]
    note = "Three fsyncs and an exchange do not grow; the request's items and the row's staging keys do."
    name = "latency added to a call, without TransferQueue"
    return Growth(name, "calls before it", [float(size) for size in SIZES], grown, note=note)


async def _both() -> list[Figure | Growth]:
    figures: list[Figure | Growth] = []
    for where, what, opened, bound in (
        ("without TransferQueue", OF_ONE_PROCESS, without_transfer_queue, 3.0),
        ("with TransferQueue", OF_A_CAMPAIGN, with_transfer_queue, 12.0),
    ):
        name = f"latency added to a call, p50, {where}"
        with tempfile.TemporaryDirectory() as scratch:
            try:
                async with opened(Path(scratch)) as road:
                    pairs = await compared(road)
                    grown = [await growing(road)] if opened is without_transfer_queue else []
            except Exception as error:  # one road that cannot be had must not hide the other
                figures.append(unmeasured(name, "ms", f"{type(error).__name__}: {error}", at_most=bound))
                continue
        added, straight = pairs[..., 0] - pairs[..., 1], pairs[:, 1:, 1]
        figures.append(median(name, added[:, 1:].ravel(), "ms", 1e3, at_most=bound, note=f"{what} {NOTE}"))
        figures.append(median(f"the same call straight to the worker, {where}", straight.ravel(), "ms", 1e3, note=what))
        first = f"latency added to a rollout's first call, p50, {where}"
        figures.append(median(first, added[:, 0], "ms", 1e3, note=f"{what} {FIRST}"))
        figures += grown
    return figures


def measure() -> list[Figure | Growth]:
    """Both roads."""
    return asyncio.run(_both())
