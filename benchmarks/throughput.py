"""Throughput: tokens a second of a real engine at 32 concurrent calls, captured and not.

SmolLM2-135M in a policy worker, Ray and TransferQueue beside it. Captured: through the gateway, each call resolved,
admitted, captured, staged and recorded. Not captured: the same requests straight to that worker, untagged. Log-probs:
these once more, with the log-probs that training needs, so that what the engine takes for them can be told apart.
In turn, in every order, on one engine, so that all see the same machine, and in a round with the same lengths: answers
end where they are told to, not where the model would end them. Processor time is counted part by part and in all.
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
    "server": ("ray::PolicyWorker",),
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
    on, off, scored = (a_token[kind] for kind in KINDS)
    name = f"generation throughput, {CONCURRENT} concurrent"
    parts = [figure for part in PARTS for figure in of_part(part, samples)]
    return [
        ratio(f"{name}: captured over not captured", off, on, at_least=AT_LEAST, note=why(parts, in_use)),
        ratio(f"{name}: captured over not captured, with log-probs", scored, on),
        ratio(f"{name}: not captured, with log-probs over without", off, scored),
        *(rate(f"{name}: {kind}", 1.0, a_token[kind], "tokens/s") for kind in KINDS),
        *(median(f"processor time a call: {kind}", a_call[kind], "ms", 1e3) for kind in KINDS),
        *parts,
        *(median(f"processors in use: {kind}", in_use[kind], "%", 1e2) for kind in KINDS),
    ]


def of_part(part: str, samples: dict[str, list[Batch]]) -> tuple[Figure, Figure, Figure]:
    """Processor time a call of one part: not captured, and what more it is, round by round, captured and scored."""
    on, off, scored = (np.array([batch.parts_s[part] for batch in samples[kind]]) for kind in KINDS)
    name = f"processor time a call, {part}"
    return (
        median(f"{name}: {KINDS[1]}", off, "ms", 1e3),
        median(f"{name}: captured, more than that", on - off, "ms", 1e3),
        median(f"{name}: with log-probs, more than not captured", scored - off, "ms", 1e3),
    )


def why(parts: list[Figure], in_use: dict[str, np.ndarray]) -> str:
    """What capture costs, part by part, and what the target would let it cost, in processor time a call."""
    off, more, for_logprobs = (
        dict(zip(PARTS, (float(one.value or 0.0) for one in parts[column::3]), strict=True)) for column in range(3)
    )
    around = [part for part in PARTS if part != "engine"]
    share = 100 * float(np.median([in_use[kind] for kind in KINDS]))
    return (
        f"Not captured, a call takes {sum(off.values()):.0f} ms of processor time in these parts, "
        f"{off['engine']:.0f} of them in the engine; {AT_LEAST:g} allows "
        f"{sum(off.values()) * (1 / AT_LEAST - 1):.1f} ms more. Around the engine capture takes "
        f"{sum(more[part] for part in around):.1f} ms: "
        + ", ".join(f"{more[part]:.1f} in {part}" for part in around)
        + f". {for_logprobs['server']:.1f} ms of them hand on the log-probs that training needs, beside what "
        f"the engine takes to make them. Ray's own processes and the kernel are not counted here. The processors are "
        f"in use at {share:.0f} %: a step of the engine waits for its slower thread."
    )


def measure() -> list[Figure | Growth]:
    """All of them, in turn, on one engine."""
    return asyncio.run(_measured())
