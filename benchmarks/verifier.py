"""Verifier: verify and linearise a chain whose staged calls are arrays, as they come from the data plane.

Every timed call has a receipt and rows of its own, unpacked from columns as a fetch unpacks them, outside the timing.
Floor: 32 bytes a token must be hashed (call digest 16, chain hash 8, cumulative hash 8).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks import inputs
from benchmarks.capture_core import captured, hashing
from benchmarks.measure import Figure, Growth, Sampler, alternate, median, medians, rate, ratio, timed, timed_on
from benchmarks.reference import against_reference
from workbench.capture.staged_row import pack, unpack
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


def fetched(calls: int, tokens: int) -> Callable[[], tuple[RolloutReceipt, list[StagedCall]]]:
    """What makes the receipt and the rows of one chain anew, from the bytes and columns in which they travel."""
    receipt, staged = custody(calls, tokens)
    sent, rows = receipt.model_dump_json(), [(call.staging_key, pack(call)) for call in staged]

    def fetch() -> tuple[RolloutReceipt, list[StagedCall]]:
        calls = [unpack(key, {name: column.copy() for name, column in row.items()}) for key, row in rows]
        return RolloutReceipt.model_validate_json(sent), calls

    return fetch


def job(calls: int, tokens: int, repeats: int) -> Sampler:
    """Seconds to verify and linearise one chain, as fetched."""
    return timed_on(fetched(calls, tokens), lambda chain: verify_and_linearize(*chain), repeats=repeats)


def measure() -> list[Figure | Growth]:
    """Against the reference, in tokens a second, against the floor, and how it grows."""
    ours = job(CALLS, TOKENS, repeats=5)
    name = "verify + linearise, 100 × 1,000 tokens"
    figures: list[Figure | Growth] = []
    arguments = {"calls": CALLS, "tokens": TOKENS}
    figures += against_reference(name, ours, "verify", arguments, rounds=25, at_least=25.0)
    floor = [32 * TOKENS] * CALLS
    samples = alternate({"floor": timed(hashing(floor), repeats=5), "ours": ours}, rounds=41)
    figures.append(rate(name, CALLS * TOKENS / 1e6, samples["ours"], "M tokens/s", at_least=20.0))
    figures.append(ratio(f"{name}: over the hashing floor", samples["ours"], samples["floor"]))
    per_s = CALLS * TOKENS / float(np.median(samples["floor"]))
    note = (
        f"32 bytes a token, at the {32 * per_s / 1e9:.2f} GB/s that SHA-256 took here: {per_s / 1e6:.0f} M tokens/s. "
        "The rest is the memory of the row that comes out (16 bytes a token of fresh pages) and some microseconds of "
        "Python a call, so it is nearer to the floor the longer the calls are."
    )
    figures.append(median(f"{name}: the hashing floor", samples["floor"], "ms", 1e3, note=note))
    samples = alternate({"ours": job(50, TOKENS, repeats=5)}, rounds=21)
    figures.append(rate("verify + linearise, 50 × 1,000 tokens", 0.05, samples["ours"], "M tokens/s"))
    grown = alternate({str(calls): job(calls, TOKENS, repeats=3) for calls in SIZES}, rounds=21)
    figures.append(
        Growth(
            "verify + linearise",
            "tokens, 1,000 a call",
            [float(calls * TOKENS) for calls in SIZES],
            medians(grown, SIZES),
        )
    )
    return figures
