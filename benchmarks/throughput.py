"""Throughput: tokens a second of a real engine at 32 concurrent calls, captured and not.

SmolLM2-135M in a policy worker, Ray and TransferQueue beside it. Captured: through the gateway, each call resolved,
admitted, captured, staged and recorded. Not captured: the same requests straight to that worker, untagged. Log-probs:
these once more, with the log-probs that training needs, so that what the engine takes for them can be told apart.
In turn, on one engine, so that all see the same machine. 32 agents have a conversation of three calls each, of lengths
that differ: calls that all end in one step would be staged while the engine has nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.measure import Figure, Growth, rate, ratio
from workbench.campaign.fleet import WORKER_TOKEN, Fleet
from workbench.config import load_recipe

CONCURRENT, CALLS, ROUNDS = 32, 3, 8
SHORTEST, LONGEST = 24, 72
KINDS = ("captured", "not captured", "not captured, with log-probs")
RECIPE = [
    "model.path=smollm2-135m",
    "model.dtype=bfloat16",
    "engine.max_num_seqs=32",
    f"sampling.max_tokens={LONGEST}",
    "finalizer.actors=1",
]


async def batch(client: httpx.AsyncClient, fleet: Fleet, round_: int, kind: str) -> float:
    """Seconds a sampled token of 32 agents at once."""
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
                answer = await client.post(f"{rollout}/v1/chat/completions", json=asked)
            else:
                asked |= {"logprobs": True, "top_logprobs": 0} if kind == KINDS[2] else {}
                headers = {"authorization": f"Bearer {os.environ[WORKER_TOKEN]}"}
                answer = await client.post(f"{fleet.policy.urls[0]}/v1/chat/completions", json=asked, headers=headers)
            answer.raise_for_status()
            served = answer.json()
            messages.append({"role": "assistant", "content": served["choices"][0]["message"]["content"]})
            tokens += int(served["usage"]["completion_tokens"])
        return tokens

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(agent, range(CONCURRENT))))
    return (time.perf_counter() - began) / tokens


async def _measured() -> list[Figure | Growth]:
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        async with Fleet(load_recipe("cpu_smoke", RECIPE), Path(scratch) / "run", training=False) as fleet:
            limits = httpx.Limits(max_connections=CONCURRENT)
            async with httpx.AsyncClient(timeout=180.0, trust_env=False, limits=limits) as client:
                for kind in KINDS:
                    await batch(client, fleet, 0, kind)
                for number in range(1, ROUNDS + 1):
                    for kind in KINDS if number % 2 else reversed(KINDS):
                        samples[kind].append(await batch(client, fleet, number, kind))
    on, off, scored = (np.array(samples[kind]) for kind in KINDS)
    name = f"generation throughput, {CONCURRENT} concurrent"
    return [
        ratio(f"{name}: captured over not captured", off, on, at_least=0.95),
        ratio(f"{name}: captured over not captured, with log-probs", scored, on),
        *(rate(f"{name}: {kind}", 1.0, np.array(samples[kind]), "tokens/s") for kind in KINDS),
    ]


def measure() -> list[Figure | Growth]:
    """All of them, in turn, on one engine."""
    return asyncio.run(_measured())
