"""Verify compare: what a file of a run says, held against what was recomputed, field by field.

In: a stored mapping and the one that was recomputed of it. Out: a sentence for each field that differs. Numbers differ
where they are further apart than a bound, relative to max(1, |value|); everything else must be equal.
Invariant: what an older line does not have, and what a newer one says more, is no difference.
Not here: where the values come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

DOUBLE, SINGLE = 1e-9, 1e-6
"""Bounds: of what was computed in float64, and from float32 log-probs."""


def changed(stored: Mapping[str, Any], found: Mapping[str, Any], bound: float = DOUBLE) -> Iterator[str]:
    """The fields of `stored` that are not what was `found`."""
    for name, now in found.items():
        if name in stored and not _alike(stored[name], now, bound):
            yield f"{name} is {stored[name]!r}, recomputed {now!r}"


def dotted(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`values` with the mappings under `names` taken apart, to any depth: agreement.temperature.slope."""
    apart: dict[str, Any] = {}
    for name, value in values.items():
        if name in names and isinstance(value, Mapping):
            inner = {f"{name}.{key}": item for key, item in value.items()}
            apart |= dotted(inner, *inner)
        else:
            apart[name] = value
    return apart


def _alike(was: Any, now: Any, bound: float) -> bool:
    if isinstance(now, float) and not math.isfinite(now):
        now = None  # JSON knows no other word for it
    if isinstance(was, int | float) and isinstance(now, int | float):
        return abs(was - now) <= bound * max(1.0, abs(now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_alike(was[name], now[name], bound) for name in now)
    if isinstance(was, list) and isinstance(now, list | tuple):
        return len(was) == len(now) and all(_alike(*pair, bound) for pair in zip(was, now, strict=True))
    return bool(was == now)
