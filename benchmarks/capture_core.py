"""Capture core: a chain of calls through `begin` and `complete`, the sink a list in memory.

The contract makes every call hash its whole sequence so far (8 bytes a token) besides its delta (24 bytes a token),
so the floor is SHA-256 over exactly those bytes, and bytes grow with the square of a rollout's length.
Token ids as arrays, which is how the worker keeps them, and as lists, which is what an engine hands over. Beside the
core alone also the worker's whole path: the prefix looked up and proved, captured, and the new sequence kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import inputs
from benchmarks.measure import Figure, Growth, alternate, median, medians, rate, ratio, timed
from benchmarks.reference import against_reference
from workbench.capture import CaptureCore
from workbench.capture.prefix import PrefixStore
from workbench.wire import CaptureAdmission, CommitCoords, StagedCall
from workbench.wire.encoding import token_array

CALLS, TOKENS = 100, 1_000
SIZES = (13, 25, 50, 100)


class Memory:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[StagedCall] = []

    def stage(self, call: StagedCall) -> None:
        self.calls.append(call)

    async def stage_async(self, call: StagedCall) -> None:
        self.calls.append(call)


def captured(turns: list[inputs.Turn], rollout_id: str = inputs.ROLLOUT) -> tuple[list[StagedCall], list[CommitCoords]]:
    """What capturing a chain stages and answers; parents' hashes are learnt on the way."""
    sink = Memory()
    answers: list[CommitCoords] = []
    core = CaptureCore(sink, lambda: 1, sink_timeout_s=None)
    for number, turn in enumerate(turns):
        parent = answers[-1].chain_hash if answers else None
        call = core.begin(
            CaptureAdmission.model_validate(inputs.admission(turn, parent, number, rollout_id)),
            turn.prefix if turn.parent else None,
        )
        answers.append(
            core.complete(call, prompt_token_ids=turn.prompt, generated_token_ids=turn.sampled, logprobs=turn.logprobs)
        )
    return sink.calls, answers


def job(calls: int, tokens: int, *, prefix: str = "array", ids: str = "array") -> Callable[[], None]:
    """Capture one chain; prefixes, and the ids of prompt and answer, as `array` or `list`."""
    turns = inputs.turns(calls, tokens)
    hashes = [None, *(coords.chain_hash for coords in captured(turns)[1])]
    prepared: list[tuple[dict[str, Any], Any, Any, Any, Any]] = [
        (
            inputs.admission(turn, hashes[number], number),
            (turn.prefix.tolist() if prefix == "list" else turn.prefix) if turn.parent else None,
            turn.prompt.tolist() if ids == "list" else turn.prompt,
            turn.sampled.tolist() if ids == "list" else turn.sampled,
            turn.logprobs.tolist() if ids == "list" else turn.logprobs,
        )
        for number, turn in enumerate(turns)
    ]

    def run() -> None:
        core = CaptureCore(Memory(), lambda: 1, sink_timeout_s=None)
        for admission, before, prompt, sampled, logprobs in prepared:
            call = core.begin(CaptureAdmission.model_validate(admission), before)
            core.complete(call, prompt_token_ids=prompt, generated_token_ids=sampled, logprobs=logprobs)

    return run


def through_worker(calls: int, tokens: int) -> Callable[[], list[StagedCall]]:
    """Capture one chain as the worker does (`CapturingEngine`), the engine's ids as lists; returns what was staged."""
    turns = inputs.turns(calls, tokens)
    hashes = [None, *(coords.chain_hash for coords in captured(turns)[1])]
    prepared = [
        (inputs.admission(turn, hashes[number], number), turn.prompt.tolist(), turn.sampled.tolist(), turn.logprobs)
        for number, turn in enumerate(turns)
    ]

    async def play(sink: Memory) -> None:
        core, prefixes = CaptureCore(sink, lambda: 1, sink_timeout_s=None), PrefixStore(None, capacity_bytes=2**30)
        for fields, prompt, sampled, logprobs in prepared:
            admission = CaptureAdmission.model_validate(fields)
            call = core.begin(admission, await prefixes.resolve(admission) if admission.parent_call_id else None)
            prompt_T, sampled_G = token_array(prompt), token_array(sampled)
            coords = await core.complete_async(
                call, prompt_token_ids=prompt_T, generated_token_ids=sampled_G, logprobs=logprobs
            )
            prefixes.remember(coords, np.concatenate([prompt_T, sampled_G], dtype=np.uint32))

    def run() -> list[StagedCall]:
        sink = Memory()
        asyncio.run(play(sink))  # returns nothing: asyncio spells out, for a message, what a main task returned
        return sink.calls

    return run


def hashed_bytes(calls: int, tokens: int) -> list[int]:
    """Bytes of each hash that the contract asks for: whole sequences, then deltas (chain hash and call digest)."""
    return [8 * tokens * (number + 1) for number in range(calls)] + [24 * tokens] * calls


def hashing(sizes: list[int]) -> Callable[[], None]:
    """SHA-256 over buffers of these sizes: the floor."""
    buffers = [memoryview(b"\0" * max(sizes))[:size] for size in sizes]

    def run() -> None:
        for buffer in buffers:
            hashlib.sha256(buffer).digest()

    return run


def measure() -> list[Figure | Growth]:
    """Against the reference, against the floor, and how it grows."""
    named = f"capture core, {CALLS} × {TOKENS:,} tokens"
    arrays = job(CALLS, TOKENS)
    all_lists = job(CALLS, TOKENS, ids="list", prefix="list")
    sides = {
        "floor": timed(hashing(hashed_bytes(CALLS, TOKENS))),
        "arrays": timed(arrays),
        "lists": timed(job(CALLS, TOKENS, ids="list")),
        "all lists": timed(all_lists),
        "worker": timed(through_worker(CALLS, TOKENS)),
    }
    samples = alternate(sides, rounds=10)
    over = {name: float(np.median(took / samples["floor"])) for name, took in samples.items()}
    reading = {name: over[name] - over["arrays"] for name in ("lists", "all lists")}
    hashed = sum(hashed_bytes(CALLS, TOKENS)) / 8
    floor_ns = 1e9 * float(np.median(samples["floor"])) / hashed
    read = {"lists": CALLS * (CALLS + 1) // 2 * TOKENS, "all lists": CALLS * CALLS * TOKENS}
    read_ns = {name: reading[name] * floor_ns * hashed / read[name] for name in reading}
    cost = "an int, where hashing its eight bytes takes"
    figures: list[Figure | Growth] = []
    arguments = {"calls": CALLS, "tokens": TOKENS}
    figures += against_reference(f"{named}, arrays", timed(arrays), "capture", arguments, rounds=7, at_least=25.0)
    figures += against_reference(
        f"{named}, all as lists",
        timed(all_lists),
        "capture",
        arguments,
        rounds=5,
        at_least=25.0,
        note=f"The very lists that the reference takes. To read {read['all lists'] / 1e6:.1f} million ints out of them "
        f"takes {read_ns['all lists']:.1f} ns {cost} {floor_ns:.1f}: of {over['all lists']:.2f} times the floor, "
        f"{reading['all lists']:.2f} are reading, which arrays do not pay.",
    )
    name = f"{named}, arrays: over the hashing floor"
    figures.append(ratio(name, samples["arrays"], samples["floor"], at_most=2.0))
    figures.append(
        ratio(
            f"{named}, the engine's lists: over the hashing floor",
            samples["lists"],
            samples["floor"],
            at_most=2.0,
            note=f"How the worker calls it: the prefix is its own array, prompt and answer are lists of the engine's. "
            f"{over['arrays']:.2f} of it is what arrays take too, {reading['lists']:.2f} is reading ints out of a "
            f"list: {read_ns['lists']:.1f} ns {cost} {floor_ns:.1f}.",
        )
    )
    figures.append(
        ratio(
            f"{named}, prefix as a list too: over the hashing floor",
            samples["all lists"],
            samples["floor"],
            at_most=2.0,
            note=f"Not how the worker calls it: {read['all lists'] / 1e6:.1f} million separate int objects are read, "
            "40 bytes of memory each.",
        )
    )
    figures.append(
        ratio(
            f"{named}, the worker's whole path: over the hashing floor",
            samples["worker"],
            samples["floor"],
            note="The prefix out of the worker's memory, with its proof; the engine's lists read; captured; the whole "
            "sequence kept for the next call.",
        )
    )
    figures.append(median(f"{named}, the worker's whole path", samples["worker"], "ms", 1e3))
    figures.append(median(f"{named}: the hashing floor", samples["floor"], "ms", 1e3))
    figures.append(rate(f"{named}, arrays: delta tokens", CALLS * TOKENS / 1e6, samples["arrays"], "M tokens/s"))
    runs = {str(calls): timed(job(calls, TOKENS)) for calls in SIZES}
    grown = alternate(runs, rounds=7)
    figures.append(
        Growth(
            "capture core",
            "bytes hashed by contract",
            [float(sum(hashed_bytes(calls, TOKENS))) for calls in SIZES],
            medians(grown, SIZES),
            note="Bytes grow with the square of the number of calls, by contract; time grows with bytes.",
        )
    )
    return figures
