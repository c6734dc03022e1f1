"""Throughput: tokens a second of a real engine at 32 concurrent calls, captured and not.

SmolLM2-135M in a policy worker, Ray and TransferQueue beside it. Captured: through the gateway, each call resolved,
admitted, captured, staged and recorded. Not captured: the same requests straight to that worker, untagged. Log-probs:
these once more, with the log-probs that training needs, so that what the engine takes for them can be told apart.
In turn, in every order, on one engine, so that all see the same machine. Processor time is that of all processes of the
machine, the agents' client among them, which is alike for all three. 32 agents have a conversation of three calls each,
of lengths that differ: calls that all end in one step would be staged while the engine has nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from benchmarks.measure import Figure, Growth, in_turn, median, rate, ratio
from workbench.campaign.fleet import WORKER_TOKEN, Fleet
from workbench.config import load_recipe

CONCURRENT, CALLS, ROUNDS, AT_LEAST = 32, 3, 6, 0.95
SHORTEST, LONGEST = 24, 72
KINDS = ("captured", "not captured", "not captured, with log-probs")
RECIPE = [
    "model.path=smollm2-135m",
    "model.dtype=bfloat16",
    "engine.max_num_seqs=32",
    f"sampling.max_tokens={LONGEST}",
    "finalizer.actors=1",
]


class Batch(NamedTuple):
    """What 32 agents at once took."""

    a_token_s: float
    processor_a_call_s: float
    in_use: float
    """Share of the machine's processors, of 1."""


async def batch(fleet: Fleet, round_: int, kind: str) -> Batch:
    """32 agents at once. The client is aiohttp's, because httpx takes a millisecond a call of the same processors."""
    lengths = np.random.default_rng(round_).integers(SHORTEST, LONGEST + 1, (CONCURRENT, CALLS))

    async def agent(number: int) -> int:
        tokens = 0
        messages: list[dict[str, Any]] = []
        for turn, length in enumerate(lengths[number]):
            told = "Tell me a long story about the sea." if turn == 0 else "Go on, and tell me more."
            messages.append({"role": "user", "content": f"{kind} {round_}, story {number}: {told}"})
            asked: dict[str, Any] = {"model": "policy", "max_tokens": int(length), "temperature": 1.0}
            asked["messages"] = messages
            if kind == "captured":
                rollout = f"{fleet.gateway_url}/ng-rollout/bench.{round_}.{number}"
                url, headers = f"{rollout}/v1/chat/completions", {}
            else:
                asked |= {"logprobs": True, "top_logprobs": 0} if kind == KINDS[2] else {}
                headers = {"authorization": f"Bearer {os.environ[WORKER_TOKEN]}"}
                url = f"{fleet.policy.urls[0]}/v1/chat/completions"
            async with client.post(url, json=asked, headers=headers) as answer:
                answer.raise_for_status()
                served = await answer.json()
            messages.append({"role": "assistant", "content": served["choices"][0]["message"]["content"]})
            tokens += int(served["usage"]["completion_tokens"])
        return tokens

    limits = aiohttp.ClientTimeout(total=180.0)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as client:
        spent, began = processors(), time.perf_counter()
        tokens = sum(await asyncio.gather(*map(agent, range(CONCURRENT))))
        spent, took = processors() - spent, time.perf_counter() - began
    return Batch(took / tokens, spent / (CONCURRENT * CALLS), spent / took / (psutil.cpu_count() or 1))


def processors() -> float:
    """Processor seconds that the machine has spent since it started."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system)


async def _measured() -> list[Figure | Growth]:
    samples: dict[str, list[Batch]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        async with Fleet(load_recipe("cpu_smoke", RECIPE), Path(scratch) / "run", training=False) as fleet:
            for kind in KINDS:
                await batch(fleet, 0, kind)
            for number in range(ROUNDS):
                for kind in in_turn(KINDS, number):
                    samples[kind].append(await batch(fleet, number + 1, kind))
    return figures({kind: np.array(batches) for kind, batches in samples.items()})


def figures(samples: dict[str, np.ndarray]) -> list[Figure | Growth]:
    """What batches of each kind say, float64[rounds, 3] with the columns of `Batch`."""
    on, off, scored = (samples[kind][:, 0] for kind in KINDS)
    name = f"generation throughput, {CONCURRENT} concurrent"
    return [
        ratio(f"{name}: captured over not captured", off, on, at_least=AT_LEAST, note=why(samples)),
        ratio(f"{name}: captured over not captured, with log-probs", scored, on),
        ratio(f"{name}: not captured, with log-probs over without", off, scored),
        *(rate(f"{name}: {kind}", 1.0, samples[kind][:, 0], "tokens/s") for kind in KINDS),
        *(median(f"processor time a call: {kind}", samples[kind][:, 1], "ms", 1e3) for kind in KINDS),
        *(median(f"processors in use: {kind}", samples[kind][:, 2], "%", 1e2) for kind in KINDS),
    ]


def why(samples: dict[str, np.ndarray]) -> str:
    """What capture costs, and what the target would let it cost, in processor time a call."""
    on, off, scored = (1e3 * samples[kind][:, 1] for kind in KINDS)
    a_call = float(np.median(off))
    more, of_logprobs = float(np.median(on - off)), float(np.median(scored - off))
    allowed = a_call * (1 / AT_LEAST - 1)
    shares = [100 * float(np.median(samples[kind][:, 2])) for kind in KINDS]
    return (
        f"With the processors at {min(shares):.0f} to {max(shares):.0f} % throughput follows processor time a token. "
        f"A call takes {a_call:.0f} ms of it; captured {more:.1f} ms more, {of_logprobs:.1f} of them for the log-probs "
        f"that training needs. {AT_LEAST:g} allows {allowed:.1f} ms, {abs(allowed - more):.1f} "
        f"{'less' if more > allowed else 'more'} than that."
    )


def measure() -> list[Figure | Growth]:
    """All of them, in turn, on one engine."""
    return asyncio.run(_measured())
