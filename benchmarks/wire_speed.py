"""Wire speed: tokens per second of the capture core and the verifier, beside what SHA-256 alone would take.

    python benchmarks/wire_speed.py [--repeats N]
In: synthetic rollouts of several shapes, in memory. Out: one line a shape; the best of N runs, so that a busy machine
disturbs it little. The floor hashes exactly the bytes that the contract hashes, from one buffer.
Not here: engines, storage, HTTP.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.capture import CaptureCore
from workbench.finalizer import verify_and_linearize
from workbench.wire import CallRecord, CaptureAdmission, RolloutReceipt, StagedCall

# name, calls in the chain, carried tokens a call, sampled tokens a call
SHAPES = [
    ("short turns", 10, 200, 100),
    ("agent turns", 20, 1000, 500),
    ("long turns", 50, 2000, 2000),
    ("one long call", 1, 2000, 30_000),
]


class Memory:
    def __init__(self) -> None:
        self.calls: list[StagedCall] = []

    def stage(self, call: StagedCall) -> None:
        self.calls.append(call)


@dataclass
class Turn:
    admission: CaptureAdmission
    prefix: np.ndarray
    prompt: np.ndarray | list[int]
    sampled: np.ndarray | list[int]
    logprobs: np.ndarray | list[float]


def rollout(calls: int, carry: int, generated: int) -> tuple[list[Turn], list[StagedCall], RolloutReceipt]:
    """The inputs of every call, what capturing them staged, and the receipt."""
    rng = np.random.default_rng(0)
    sink, turns, records = Memory(), [], []
    core = CaptureCore(sink, lambda: 1)
    before, parent, chain = np.empty(0, dtype=np.uint64), None, None
    for number in range(calls):
        admission = CaptureAdmission(
            rollout_id="bench",
            model_call_id=f"c{number}",
            mode="token_in" if parent else "text",
            parent_call_id=parent,
            prev_len=before.size,
            staging_chain=[f"bench/c{earlier}" for earlier in range(number)],
            parent_chain_hash=chain,
        )
        prompt = np.concatenate((before, rng.integers(0, 150_000, carry).astype(np.uint64)))
        sampled = rng.integers(0, 150_000, generated).astype(np.uint64)
        turns.append(Turn(admission, before, prompt, sampled, -rng.random(generated).astype(np.float32)))
        coords = capture(core, turns[-1])
        row = coords.model_dump(exclude={"disposition", "rollout_id"})
        records.append(CallRecord(**row, mode=admission.mode, response_id=f"resp-{number}"))
        before, parent, chain = np.concatenate((prompt, sampled)), f"c{number}", coords.chain_hash
    receipt = RolloutReceipt(
        rollout_id="bench", terminal_model_call_id=parent, manifest=records, terminal_selection="declared"
    )
    return turns, sink.calls, receipt


def capture(core: CaptureCore, turn: Turn):
    call = core.begin(turn.admission, turn.prefix if turn.admission.parent_call_id else None)
    return core.complete(call, prompt_token_ids=turn.prompt, generated_token_ids=turn.sampled, logprobs=turn.logprobs)


def best_s(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def hashing_floor(sizes: list[int]) -> Callable[[], None]:
    buffers = [b"\0" * size for size in sizes]

    def run() -> None:
        for buffer in buffers:
            hashlib.sha256(buffer).digest()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    print(f"{'':<32}{'tokens':>9}{'M tokens/s':>12}{'x hashing floor':>17}")
    for name, calls, carry, generated in SHAPES:
        turns, staged, receipt = rollout(calls, carry, generated)
        lists = [Turn(t.admission, t.prefix, t.prompt.tolist(), t.sampled.tolist(), t.logprobs.tolist()) for t in turns]
        delta, whole = carry + generated, [len(t.prompt) + generated for t in turns]
        # Capture hashes the whole sequence, the delta's ids for the chain, and 16 bytes a token of the delta.
        floor = best_s(hashing_floor([8 * size for size in whole] + [24 * delta] * calls), repeats)
        for label, inputs in (("arrays", turns), ("lists", lists)):
            # A fresh core a run: it refuses to begin a call twice.
            took = best_s(lambda inputs=inputs: capture_all(inputs), repeats)
            report(f"capture, {label}, {name}", sum(whole), took, floor)
        floor = best_s(hashing_floor([8 * calls * delta] + [24 * delta] * calls), repeats)
        took = best_s(lambda r=receipt, s=staged: verify_and_linearize(r, s), repeats)
        report(f"verify, {name}", calls * delta, took, floor)


def capture_all(turns: list[Turn]) -> None:
    core = CaptureCore(Memory(), lambda: 1)
    for turn in turns:
        capture(core, turn)


def report(name: str, tokens: int, took_s: float, floor_s: float) -> None:
    print(f"{name:<32}{tokens:>9}{tokens / took_s / 1e6:>12.1f}{took_s / floor_s:>17.2f}")


if __name__ == "__main__":
    main()
