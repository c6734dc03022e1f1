"""Verifier: verify and linearise a chain whose staged calls are arrays, as they come from the data plane.

Floor: 32 bytes a token must be hashed (call digest 16, chain hash 8, cumulative hash 8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import inputs
from benchmarks.capture_core import captured, hashing
from benchmarks.measure import Figure, Growth, alternate, median, rate, ratio, timed
from benchmarks.reference import against_reference
from workbench.finalizer import verify_and_linearize
from workbench.wire import RolloutReceipt, StagedCall

CALLS, TOKENS = 100, 1_000
SIZES = (25, 50, 100, 200)


def custody(
    calls: int, tokens: int, rollout_id: str = inputs.ROLLOUT, seed: int = 0
) -> tuple[RolloutReceipt, list[StagedCall]]:
    """The receipt and the staged calls of one captured chain."""
    staged, answers = captured(inputs.turns(calls, tokens, seed), rollout_id)
    records = [
        {**coords.model_dump(exclude={"disposition", "rollout_id"}), "mode": call.mode, "response_id": f"r{number}"}
        for number, (call, coords) in enumerate(zip(staged, answers, strict=True))
    ]
    return RolloutReceipt.model_validate(inputs.receipt(records, rollout_id)), staged


def job(calls: int, tokens: int) -> Callable[[], Any]:
    """Verify and linearise one chain."""
    receipt, staged = custody(calls, tokens)
    return lambda: verify_and_linearize(receipt, staged)


def measure() -> list[Figure | Growth]:
    """Against the reference, in tokens a second, against the floor, and how it grows."""
    ours = job(CALLS, TOKENS)
    name = "verify + linearise, 100 × 1,000 tokens"
    figures: list[Figure | Growth] = []
    arguments = {"calls": CALLS, "tokens": TOKENS}
    figures += against_reference(name, timed(ours, repeats=5), "verify", arguments, rounds=25, at_least=25.0)
    floor = [32 * TOKENS] * CALLS
    samples = alternate({"floor": timed(hashing(floor), repeats=5), "ours": timed(ours, repeats=5)}, rounds=41)
    figures.append(rate(name, CALLS * TOKENS / 1e6, samples["ours"], "M tokens/s", at_least=20.0))
    figures.append(ratio(f"{name}: over the hashing floor", samples["ours"], samples["floor"]))
    figures.append(median(f"{name}: the hashing floor", samples["floor"], "ms", 1e3))
    short = job(50, TOKENS)
    samples = alternate({"ours": timed(short, repeats=5)}, rounds=21)
    figures.append(rate("verify + linearise, 50 × 1,000 tokens", 0.05, samples["ours"], "M tokens/s"))
    grown = alternate({str(calls): timed(job(calls, TOKENS), repeats=3) for calls in SIZES}, rounds=21)
    figures.append(
        Growth(
            "verify + linearise",
            "tokens, 1,000 a call",
            [float(calls * TOKENS) for calls in SIZES],
            [float(min(grown[str(calls)])) for calls in SIZES],
        )
    )
    return figures
