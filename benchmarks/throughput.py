"""Throughput: tokens a second of a real engine at 32 concurrent calls, captured and not.

SmolLM2-135M in a policy worker, Ray and TransferQueue beside it. Captured: through the gateway, each call resolved,
admitted, captured, staged and recorded. Not captured: the same requests straight to that worker, untagged. Log-probs:
these once more, with the log-probs that training needs, so that what the engine takes for them can be told apart.
In turn, in every order, on one engine, so that all see the same machine, and in a round with the same lengths: an answer
ends where it is told to, not where the model would end it. Processor time is counted part by part and for the machine.
32 agents have a conversation of three calls each, of lengths that differ: calls that all end in one step would be
staged while the engine has nothing to do.
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

CONCURRENT, CALLS, ROUNDS, AT_LEAST = 32, 3, 12, 0.95
SHORTEST, LONGEST = 24, 72
KINDS = ("captured", "not captured", "not captured, with log-probs")
RECIPE = [
    "model.path=smollm2-135m",
    "model.dtype=bfloat16",
    "engine.max_num_seqs=32",
    f"sampling.max_tokens={LONGEST}",
    "finalizer.actors=1",
]


PARTS = {
    "engine": ("VLLM::EngineCore",),
    "worker's server": ("ray::PolicyWorker",),
    "gateway": ("workbench.gateway",),
    "TransferQueue": ("ray::TransferQueueController", "ray::SimpleStorageUnit"),
}
"""What the command lines of each part's processes contain."""


class Batch(NamedTuple):
    """What 32 agents at once took. Seconds; of processor time a call."""

    a_token_s: float
    processor_s: float
    """Of the whole machine."""
    in_use: float
    """Share of the machine's processors, of 1."""
    parts_s: dict[str, float]


async def batch(fleet: Fleet, round_: int, kind: str) -> Batch:
    """32 agents at once. The client is aiohttp's, because httpx takes a millisecond a call of the same processors."""
    name = "ABC"[KINDS.index(kind)]
    lengths = np.random.default_rng(round_).integers(SHORTEST, LONGEST + 1, (CONCURRENT, CALLS))

    async def agent(number: int) -> int:
        tokens = 0
        messages: list[dict[str, Any]] = []
        for turn, length in enumerate(lengths[number]):
            told = "Tell me a long story about the sea." if turn == 0 else "Go on, and tell me more."
            messages.append({"role": "user", "content": f"{name} {round_}, story {number}: {told}"})
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "temperature": 1.0}
            asked |= {"max_tokens": int(length), "ignore_eos": True}
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
        parts, spent, began = by_part(), processors(), time.perf_counter()
        tokens = sum(await asyncio.gather(*map(agent, range(CONCURRENT))))
        took, spent = time.perf_counter() - began, processors() - spent
    calls = CONCURRENT * CALLS
    in_use = spent / took / (psutil.cpu_count() or 1)
    return Batch(took / tokens, spent / calls, in_use, {k: (v - parts[k]) / calls for k, v in by_part().items()})


def processors() -> float:
    """Processor seconds that the machine has spent since it started."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system)


def by_part() -> dict[str, float]:
    """Processor seconds that the processes of each of `PARTS` have spent since they started."""
    spent = dict.fromkeys(PARTS, 0.0)
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        command = " ".join(process.info["cmdline"] or ())
        for part, names in PARTS.items():
            if (times := process.info["cpu_times"]) and any(name in command for name in names):
                spent[part] += times.user + times.system
    return spent


async def _measured() -> list[Figure | Growth]:
    samples: dict[str, list[Batch]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        async with Fleet(load_recipe("cpu_smoke", RECIPE), Path(scratch) / "run", training=False) as fleet:
            for kind in KINDS:
                await batch(fleet, 0, kind)
            for number in range(ROUNDS):
                for kind in in_turn(KINDS, number):
                    samples[kind].append(await batch(fleet, number + 1, kind))
    return figures(samples)


def figures(samples: dict[str, list[Batch]]) -> list[Figure | Growth]:
    """What batches of each kind say, a list of them a round."""
    a_token, a_call, in_use = (
        {kind: np.array([batch[column] for batch in samples[kind]]) for kind in KINDS} for column in range(3)
    )
    parts = {kind: {part: np.array([one.parts_s[part] for one in samples[kind]]) for part in PARTS} for kind in KINDS}
    on, off, scored = (a_token[kind] for kind in KINDS)
    name = f"generation throughput, {CONCURRENT} concurrent"
    return [
        ratio(f"{name}: captured over not captured", off, on, at_least=AT_LEAST, note=why(parts, in_use)),
        ratio(f"{name}: captured over not captured, with log-probs", scored, on),
        ratio(f"{name}: not captured, with log-probs over without", off, scored),
        *(rate(f"{name}: {kind}", 1.0, a_token[kind], "tokens/s") for kind in KINDS),
        *(median(f"processor time a call: {kind}", a_call[kind], "ms", 1e3) for kind in KINDS),
        *(
            median(f"processor time a call, {part}: {kind}", parts[kind][part], "ms", 1e3)
            for part in PARTS
            for kind in KINDS
        ),
        *(median(f"processors in use: {kind}", in_use[kind], "%", 1e2) for kind in KINDS),
    ]


def why(parts: dict[str, dict[str, np.ndarray]], in_use: dict[str, np.ndarray]) -> str:
    """What capture costs, part by part, and what the target would let it cost, in processor time a call."""
    on, off, scored = ({part: 1e3 * float(np.median(parts[kind][part])) for part in PARTS} for kind in KINDS)
    around = [part for part in PARTS if part != "engine"]
    more = sum(on[part] - off[part] for part in around)
    of_logprobs = scored["worker's server"] - off["worker's server"]
    shares = [100 * float(np.median(in_use[kind])) for kind in KINDS]
    return (
        f"The engine takes {off['engine']:.0f} ms of processor time a call where nothing is captured, and "
        f"{AT_LEAST:g} allows {sum(off.values()) * (1 / AT_LEAST - 1):.1f} ms more. Around the engine capture takes "
        f"{more:.1f} ms: "
        + ", ".join(f"{on[part] - off[part]:.1f} in {part}" for part in around)
        + f". Handing on the log-probs is {of_logprobs:.1f} of them; sampling with them costs the engine itself "
        f"{scored['engine'] - off['engine']:+.1f} ms. Ray's own processes and the kernel are not counted here. The "
        f"processors are in use at {min(shares):.0f} to {max(shares):.0f} %: each of the engine's steps waits for its "
        f"slower thread, so what runs beside it costs it more than that time."
    )


def measure() -> list[Figure | Growth]:
    """All of them, in turn, on one engine."""
    return asyncio.run(_measured())
