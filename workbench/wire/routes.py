"""Routes: the envelope in which routed experts ride in a call's extras.

    nrlre1:<int8|int16|int32>:<tokens>x<layers>x<topk>:<base64 of little-endian values>
In: integer arrays [tokens, layers, topk]. Out: the envelope, and back. Row i is the route of token i as input; −1
stands where there is none (the last sampled token was never an input).
Invariant: encoding a decoded envelope gives the same text, because the wire dtype is kept.
Not here: putting fragments of a chain together (`workbench.finalizer`).
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import WireError

ROUTES_MAGIC = "nrlre1"
NO_ROUTE = -1
LEGACY_DTYPE = "legacy-int"

_WIRE_DTYPES: dict[str, np.dtype[Any]] = {"int8": np.dtype("<i1"), "int16": np.dtype("<i2"), "int32": np.dtype("<i4")}
# An unsigned id needs the next signed width, so that −1 and the largest id both fit.
_WIDENED = {"int8": "int8", "uint8": "int16", "int16": "int16", "uint16": "int32", "int32": "int32"}
_SHAPE = re.compile(r"([1-9][0-9]{0,17})x([1-9][0-9]{0,17})x([1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class Routes:
    """Decoded routes: `values` [tokens, layers, topk] in the wire dtype (int64 where `dtype` is `legacy-int`)."""

    values: np.ndarray
    dtype: str

    @property
    def num_layers(self) -> int:
        return self.values.shape[1]

    @property
    def topk(self) -> int:
        return self.values.shape[2]


def encode_routes(values: np.ndarray) -> str:
    """Envelope of an integer array [tokens, layers, topk], none of them 0.

    int8, int16 and int32 keep their width, uint8 and uint16 are widened, other integers become int32 where every value
    fits. Raises WireError otherwise.
    """
    values = np.asarray(values)
    if values.ndim != 3 or 0 in values.shape or values.dtype.kind not in "iu":
        raise WireError(f"routes must be integers [tokens, layers, topk], got {values.dtype}{list(values.shape)}")
    values = widened(values)
    name = values.dtype.name
    raw = np.ascontiguousarray(values, dtype=_WIRE_DTYPES[name]).tobytes()
    shape = "x".join(map(str, values.shape))
    return f"{ROUTES_MAGIC}:{name}:{shape}:{base64.b64encode(raw).decode('ascii')}"


def widened(values: np.ndarray) -> np.ndarray:
    """Integer ids in the dtype they have on the wire; an unsigned one takes the next signed width. WireError beyond."""
    name = _WIDENED.get(values.dtype.name)
    if name is None:
        name, limits = "int32", np.iinfo(np.int32)
        if values.size and (int(values.min()) < limits.min or int(values.max()) > limits.max):
            raise WireError(f"routes of dtype {values.dtype} hold ids beyond int32")
    return values.astype(name, copy=False)


def decode_routes(payload: str | list[Any]) -> Routes:
    """Read an envelope, or the rectangular nested list of old writers. Raises WireError for anything else."""
    if not isinstance(payload, str):
        return Routes(_legacy(payload), LEGACY_DTYPE)
    parts = payload.split(":", 3)
    if len(parts) != 4 or parts[0] != ROUTES_MAGIC:
        raise WireError(f"a routes envelope has four parts beginning with {ROUTES_MAGIC!r}, got {payload[:40]!r}")
    _, name, shape_text, encoded = parts
    if name not in _WIRE_DTYPES:
        raise WireError(f"routes dtype must be one of {sorted(_WIRE_DTYPES)}, got {name!r}")
    match = _SHAPE.fullmatch(shape_text)
    if match is None:
        raise WireError(f"routes shape must be <tokens>x<layers>x<topk>, all positive, got {shape_text!r}")
    tokens, layers, topk = (int(size) for size in match.groups())
    try:
        raw = base64.b64decode(encoded.encode("ascii"), validate=True)
    except ValueError as error:
        raise WireError(f"routes are not base64: {error}") from error
    expected = tokens * layers * topk * _WIRE_DTYPES[name].itemsize
    if len(raw) != expected:
        raise WireError(f"routes of shape {shape_text} in {name} take {expected} bytes, got {len(raw)}")
    return Routes(np.frombuffer(raw, dtype=_WIRE_DTYPES[name]).reshape(tokens, layers, topk), name)


def classify_route_span(carry_len: int, generation_len: int, staged_route_len: int) -> str:
    """How a call's staged routes cover its delta: `full`, `tail` (the generated tokens at least) or `sentinel`.

    Raises WireError for a length that is no int >= 0.
    """
    lengths = (carry_len, generation_len, staged_route_len)
    if any(type(length) is not int or length < 0 for length in lengths):
        raise WireError(f"carry, generation and staged route lengths must be ints >= 0, got {lengths}")
    if staged_route_len == 0:
        return "sentinel"
    if staged_route_len == carry_len + generation_len:
        return "full"
    return "tail" if generation_len > 0 and staged_route_len >= generation_len else "sentinel"


def _legacy(payload: Any) -> np.ndarray:
    def rows(value: Any, what: str) -> list[Any]:
        if type(value) is not list or not value:
            raise WireError(f"legacy routes: {what} must be a non-empty list, got {type(value).__name__}")
        return value

    width: tuple[int, int] | None = None
    flat: list[int] = []
    for token_row in rows(payload, "the payload"):
        for layer_row in rows(token_row, "a token row"):
            if width is None:
                width = len(token_row), len(rows(layer_row, "a layer row"))
            if (len(token_row), len(rows(layer_row, "a layer row"))) != width:
                raise WireError(f"legacy routes must be rectangular, {width} layers x topk")
            flat.extend(layer_row)
    if set(map(type, flat)) != {int}:
        raise WireError("legacy routes must hold integers only")
    assert width is not None
    try:
        return np.array(flat, dtype=np.int64).reshape(-1, *width)
    except OverflowError as error:
        raise WireError("legacy routes hold an id beyond int64") from error
