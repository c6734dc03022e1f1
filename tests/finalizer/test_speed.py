"""A generous bound on the two hot paths, in processor time over SHA-256's own on the same bytes, so that a Python step
a token would be noticed and a busy machine is not. What they really take is measured by `make bench`."""

from __future__ import annotations

import pytest

from benchmarks import capture_core, verifier
from benchmarks.measure import timed

CALLS, TOKENS = 40, 1_000


@pytest.mark.parametrize(
    ("job", "hashed", "bound"),
    [
        (verifier.job(CALLS, TOKENS), [32 * TOKENS] * CALLS, 12),
        (capture_core.job(CALLS, TOKENS), capture_core.hashed_bytes(CALLS, TOKENS), 12),
        (capture_core.job(CALLS, TOKENS, ids="list", prefix="list"), capture_core.hashed_bytes(CALLS, TOKENS), 25),
    ],
    ids=["verifier", "capture, arrays", "capture, lists"],
)
def test_hashing_is_a_fair_part_of_what_it_takes(job, hashed, bound) -> None:
    took, floor = timed(job), timed(capture_core.hashing(hashed))
    assert min(took() for _ in range(5)) < bound * min(floor() for _ in range(5))
