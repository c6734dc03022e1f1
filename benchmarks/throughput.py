"""Throughput: tokens a second of a real engine at 32 concurrent calls, captured and not.

SmolLM2-135M in a policy worker, Ray and TransferQueue beside it. Captured: 32 rollouts through the gateway, each call
resolved, admitted, captured, staged and recorded. Not captured: the same requests straight to that worker, untagged.
In turn, on one engine, so that both see the same machine; the fixed length of answers makes tokens comparable.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.measure import Figure, Growth, rate, ratio
from workbench.campaign.fleet import WORKER_TOKEN, Fleet
from workbench.config import load_recipe

CONCURRENT, TOKENS, ROUNDS = 32, 48, 14
RECIPE = [
    "model.path=smollm2-135m",
    "model.dtype=bfloat16",
    "engine.max_num_seqs=32",
    f"sampling.max_tokens={TOKENS}",
    "finalizer.actors=1",
]


async def batch(client: httpx.AsyncClient, fleet: Fleet, round_: int, *, captured: bool) -> float:
    """Seconds a sampled token of 32 calls at once."""
    body = {"model": "policy", "max_tokens": TOKENS, "temperature": 1.0}

    async def call(number: int) -> int:
        task = f"Round {round_}, story {number}: tell me a long story about the sea."
        asked = body | {"messages": [{"role": "user", "content": task}]}
        if captured:
            rollout = f"{fleet.gateway_url}/ng-rollout/bench.{round_}.{number}.0"
            answer = await client.post(f"{rollout}/v1/chat/completions", json=asked)
        else:
            headers = {"authorization": f"Bearer {os.environ[WORKER_TOKEN]}"}
            answer = await client.post(f"{fleet.policy.urls[0]}/v1/chat/completions", json=asked, headers=headers)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(call, range(CONCURRENT))))
    return (time.perf_counter() - began) / tokens


async def _measured() -> list[Figure | Growth]:
    samples: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        async with Fleet(load_recipe("cpu_smoke", RECIPE), Path(scratch) / "run", training=False) as fleet:
            limits = httpx.Limits(max_connections=CONCURRENT)
            async with httpx.AsyncClient(timeout=180.0, trust_env=False, limits=limits) as client:
                await batch(client, fleet, 0, captured=False)
                for number in range(1, ROUNDS + 1):
                    for captured in (True, False) if number % 2 else (False, True):
                        samples[captured].append(await batch(client, fleet, number, captured=captured))
    on, off = np.array(samples[True]), np.array(samples[False])
    name = f"generation throughput, {CONCURRENT} concurrent"
    return [
        ratio(f"{name}: captured over not captured", off, on, at_least=0.95),
        rate(f"{name}: captured", 1.0, on, "tokens/s"),
        rate(f"{name}: not captured", 1.0, off, "tokens/s"),
    ]


def measure() -> list[Figure | Growth]:
    """Both, in turn, on one engine."""
    return asyncio.run(_measured())
