"""Mutations: what goes wrong with bytes and with JSON, as Hypothesis strategies; and how long to go on.

`make test` plays one round of every property, the same one each time: whether it is green is up to the change that is
tested. `make fuzz` sets `FUZZ_SECONDS`; then a property is played in rounds of new seeds until its share of them is
over, and Hypothesis keeps what failed.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PROPERTIES = 10
"""How many share the time."""
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
ROUND = settings(
    max_examples=20 if SECONDS else 300,
    deadline=None,
    derandomize=not SECONDS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "assistant", "user", "tool", "function_call", "reasoning", "text", "0" * 64, "\x00", "\ud800"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def play(rounds: Callable[[], Any]) -> None:
    """Run a Hypothesis test until its time is over, at least once."""
    end = time.monotonic() + SECONDS / PROPERTIES
    rounds()
    while time.monotonic() < end:
        rounds()


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a JSON tree are, itself first."""
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


@st.composite
def mutated_json(draw: st.DrawFn, truth: Any, most: int = 3) -> Any:
    """`truth` with some of its values replaced, dropped, repeated, wrapped, renamed or taken from elsewhere."""
    value = copy.deepcopy(truth)
    for _ in range(draw(st.integers(1, most))):
        places = [path for path in paths(value) if path]
        if not places:
            return draw(junk)
        *way, key = draw(st.sampled_from(places))
        holder = value
        for step in way:
            holder = holder[step]
        match draw(st.sampled_from(["junk", "drop", "repeat", "wrap", "rename", "other"])):
            case "junk":
                holder[key] = draw(junk)
            case "drop":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=6))] = holder.pop(key)
            case "other":
                other = value
                for step in draw(st.sampled_from(places)):
                    other = other[step] if isinstance(other, list | dict) and _has(other, step) else other
                holder[key] = copy.deepcopy(other)
            case _:
                holder[key] = [holder[key]]
    return value


def _has(holder: Any, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


@st.composite
def mutated_bytes(draw: st.DrawFn, truth: bytes, most: int = 3) -> bytes:
    """`truth` with bytes flipped, inserted, cut out, doubled, or cut off."""
    data = bytearray(truth)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        upto = min(len(data), at + draw(st.integers(1, 40)))
        match draw(st.sampled_from(["flip", "insert", "cut", "double", "truncate"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=5))
            case "cut":
                del data[at:upto]
            case "double":
                data[at:at] = data[at:upto]
            case "truncate":
                del data[at:]
    return bytes(data)


@st.composite
def mutated_lines(draw: st.DrawFn, truth: bytes) -> bytes:
    """A file of lines with lines repeated, moved or put in again at the end, then perhaps with bytes mutated."""
    lines = truth.splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 2))):
        at, to = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines)))
        match draw(st.sampled_from(["repeat", "move"])):
            case "repeat":
                lines.insert(to, lines[at])
            case "move":
                lines.insert(min(to, len(lines) - 1), lines.pop(at))
    return draw(st.just(b"".join(lines)) | mutated_bytes(b"".join(lines)))
