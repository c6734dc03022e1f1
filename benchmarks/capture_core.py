"""Capture core: a chain of calls through `begin` and `complete`, the sink a list in memory.

The contract makes every call hash its whole sequence so far (8 bytes a token) besides its delta (24 bytes a token),
so the floor is SHA-256 over exactly those bytes, and bytes grow with the square of a rollout's length.
Token ids as arrays, which is how the worker keeps them, and as lists, which is what an engine hands over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from benchmarks import inputs
from benchmarks.measure import Figure, Growth, alternate, median, rate, ratio, timed
from benchmarks.reference import against_reference
from workbench.capture import CaptureCore
from workbench.wire import CaptureAdmission, CommitCoords, StagedCall

CALLS, TOKENS = 100, 1_000
SIZES = (13, 25, 50, 100)


class Memory:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[StagedCall] = []

    def stage(self, call: StagedCall) -> None:
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
    figures: list[Figure | Growth] = []
    arrays = job(CALLS, TOKENS)
    figures += against_reference(
        "capture core, 100 × 1,000 tokens, arrays",
        timed(arrays),
        "capture",
        {"calls": CALLS, "tokens": TOKENS},
        rounds=7,
        at_least=25.0,
    )
    figures += against_reference(
        "capture core, 100 × 1,000 tokens, all as lists",
        timed(job(CALLS, TOKENS, ids="list", prefix="list")),
        "capture",
        {"calls": CALLS, "tokens": TOKENS},
        rounds=5,
        at_least=25.0,
        note="The very lists that the reference takes. Reading an int out of a list costs 2.3 ns at least and its hash "
        "3.7 ns; prefix and prompt are 10 million of them, so some 15 times is the limit.",
    )
    sides: dict[str, Any] = {
        "floor": timed(hashing(hashed_bytes(CALLS, TOKENS))),
        "arrays": timed(arrays),
        "lists": timed(job(CALLS, TOKENS, ids="list")),
        "all lists": timed(job(CALLS, TOKENS, ids="list", prefix="list")),
    }
    samples = alternate(sides, rounds=11)
    named = "capture core, 100 × 1,000 tokens"
    figures.append(ratio(f"{named}, arrays: over the hashing floor", samples["arrays"], samples["floor"], at_most=2.0))
    figures.append(
        ratio(
            f"{named}, the engine's lists: over the hashing floor",
            samples["lists"],
            samples["floor"],
            at_most=2.0,
            note="How the worker calls it: the prefix is its own array, the prompt a list of the engine's. To read an "
            "int out of a list costs more than half as much as to hash it.",
        )
    )
    figures.append(
        ratio(
            f"{named}, prefix as a list too: over the hashing floor",
            samples["all lists"],
            samples["floor"],
            at_most=2.0,
            note="Not how the worker calls it. Ten million separate int objects are read, 40 bytes of memory each.",
        )
    )
    figures.append(median(f"{named}: the hashing floor", samples["floor"], "ms", 1e3))
    figures.append(rate(f"{named}, arrays: delta tokens", CALLS * TOKENS / 1e6, samples["arrays"], "M tokens/s"))
    runs = {str(calls): timed(job(calls, TOKENS)) for calls in SIZES}
    grown = alternate(runs, rounds=7)
    figures.append(
        Growth(
            "capture core",
            "bytes hashed by contract",
            [float(sum(hashed_bytes(calls, TOKENS))) for calls in SIZES],
            [float(min(grown[str(calls)])) for calls in SIZES],
            note="Bytes grow with the square of the number of calls, by contract; time grows with bytes.",
        )
    )
    return figures
