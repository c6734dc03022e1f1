"""Encodings: the bytes that every digest of the wire contract is computed over.

In: token ids, float columns, texts and counts. Out: big-endian bytes, or arrays whose memory already is big-endian.
    u64(n)      8 bytes                      text(s)     u64(len) + UTF-8
    token ids   u64(count) + u64 each        floats      u64(count) + IEEE float32 each
Invariant: the same values give the same bytes, whether they came as a list, an `array` or a numpy array.
Not here: which fields enter which digest (`digests`), the typed tree of extras (`extras`).

Columns are encoded as whole arrays: a 100k-token prompt must not cost a Python step per token.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.errors import WireError

TokenIds = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray

U64_MAX = 2**64 - 1
BIG_ENDIAN_ID = np.dtype(">u8")
_UINT64 = np.dtype(np.uint64)  # made once: to compare with the type makes it every time
_BIG_ENDIAN: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint64): BIG_ENDIAN_ID,
    np.dtype(np.float32): np.dtype(">f4"),
    BIG_ENDIAN_ID: BIG_ENDIAN_ID,
}
_U64 = struct.Struct(">Q")


def u64(value: int, what: str = "value") -> bytes:
    """Eight big-endian bytes. Raises WireError for anything but an int in 0..2⁶⁴−1."""
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise WireError(f"{what} must be an int in 0..2^64-1, got {value!r}")
    return _U64.pack(value)


def text(value: str, what: str = "text") -> bytes:
    """`u64(len) + utf8`. Raises WireError for a non-string or a lone surrogate."""
    if not isinstance(value, str):
        raise WireError(f"{what} must be a string, got {type(value).__name__}")
    try:
        encoded = value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise WireError(f"{what} is not valid Unicode text: {error}") from error
    return _U64.pack(len(encoded)) + encoded


def token_array(values: TokenIds, what: str = "token ids") -> np.ndarray:
    """One column of token ids as np.uint64[T]; the array itself when it already is one.

    Raises WireError, naming the position, for negative ids, ids beyond 2⁶⁴−1, bools, floats and nested columns.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise WireError(f"{what} must be one column of integers, got {values.dtype}{list(values.shape)}")
        if values.dtype == _UINT64:
            return values
        if values.dtype.kind == "i" and values.size and int(values.min()) < 0:
            position = int(np.flatnonzero(values < 0)[0])
            raise WireError(f"{what}: position {position} is negative ({int(values[position])})")
        return values.astype(np.uint64)
    if isinstance(values, array.array) and values.typecode in "fd":
        raise WireError(f"{what} must be integers, got an array of floats")
    if isinstance(values, (str, bytes, bytearray)):
        raise WireError(f"{what} must be a column of integers, got {type(values).__name__}")
    try:
        # `array` reads a list of ints about five times faster than numpy does, and refuses floats and negatives.
        column = np.frombuffer(_read("Q", values), dtype=np.uint64)
    except (TypeError, OverflowError, ValueError) as error:
        raise WireError(f"{what} must be integers in 0..2^64-1: {_first_bad_id(values, error)}") from error
    if isinstance(values, (list, tuple)) and column.size and column.min() <= 1:
        # bool is an int to `array`; it can only hide where the value is 0 or 1.
        for position in np.flatnonzero(column <= 1):
            if isinstance(values[position], (bool, np.bool_)):
                raise WireError(f"{what}: position {int(position)} is a bool, not an id")
    return column


def _read(kind: str, values: Any) -> array.array[Any]:
    """`array.array(kind, values)`, which takes half as long again for a list: it asks a sequence for each item."""
    if not isinstance(values, list):
        return array.array(kind, values)
    read = array.array(kind)
    read.fromlist(values)
    return read


def _first_bad_id(values: Any, error: Exception) -> str:
    if isinstance(values, (list, tuple)):
        for position, value in enumerate(values):
            if not isinstance(value, (int, np.integer)) or not 0 <= int(value) <= U64_MAX:
                return f"position {position} is {value!r}"
    return str(error)


def float64_column(values: Floats, what: str = "floats") -> np.ndarray:
    """One column of floats before rounding, np.float64[T] (np.float32[T] when it came as that).

    Raises WireError for bools, non-numbers and nested columns; NaN and infinity pass (see `float32_array`).
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind != "f":
            raise WireError(f"{what} must be one column of floats, got {values.dtype}{list(values.shape)}")
        return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
    if isinstance(values, (str, bytes, bytearray)):
        raise WireError(f"{what} must be a column of floats, got {type(values).__name__}")
    try:
        column = np.frombuffer(_read("d", values), dtype=np.float64)
    except (TypeError, OverflowError, ValueError) as error:
        raise WireError(f"{what} must be a column of floats: {error}") from error
    if isinstance(values, (list, tuple)) and bool in set(map(type, values)):
        raise WireError(f"{what} must be floats, found a bool")
    return column


def float32_array(values: Floats, what: str = "floats") -> np.ndarray:
    """One column rounded to nearest float32, np.float32[T]; −0.0 keeps its sign.

    Raises WireError, naming the position, for NaN, infinities and finite values that overflow float32 (numpy would
    give inf without a word).
    """
    column = float64_column(values, what)
    if column.dtype == np.float32:
        rounded = column
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            rounded = column.astype(np.float32)
    if not np.isfinite(rounded).all():
        position = int(np.flatnonzero(~np.isfinite(rounded))[0])
        raise WireError(f"{what}: position {position} is {float(column[position])!r}, not a finite float32")
    return rounded


def big_endian(column: np.ndarray) -> np.ndarray:
    """The same column with its memory big-endian and contiguous: uint64 becomes `>u8`, float32 becomes `>f4`."""
    return np.ascontiguousarray(column, dtype=_BIG_ENDIAN[column.dtype])
