"""Pack: numpy columns and a few words as one compressed block of bytes for the browser.

Layout before compression (zlib, which browsers call "deflate"): u32 little-endian length of the JSON text, the text,
padding to a multiple of 8, then each column at the offset the JSON names, each padded to a multiple of 8. Read by
`js/columns.js`. Columns: name -> u1 u2 u4 u8 i4 f4 f8, little-endian.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

_DTYPES = {"u1", "u2", "u4", "u8", "i4", "f4", "f8"}


def pack(meta: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """One block. `meta` is JSON; ValueError for a column of another dtype than the layout knows."""
    described, body, at = {}, [], 0
    for name, column in columns.items():
        kind = f"{column.dtype.kind}{column.dtype.itemsize}"
        if kind not in _DTYPES or column.ndim != 1:
            raise ValueError(f"column {name}: expected one dimension of {sorted(_DTYPES)}, got {column.dtype}")
        data = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<")).tobytes()
        described[name] = [kind, at, column.size]
        padded = data + b"\0" * (-len(data) % 8)
        body.append(padded)
        at += len(padded)
    text = orjson.dumps({**meta, "columns": described})
    head = len(text).to_bytes(4, "little") + text
    return zlib.compress(head + b"\0" * (-len(head) % 8) + b"".join(body), 4)


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The way back, for tests and for whoever saved a block."""
    raw = zlib.decompress(block)
    size = int.from_bytes(raw[:4], "little")
    meta = orjson.loads(raw[4 : 4 + size])
    start = 4 + size + (-(4 + size) % 8)
    columns = {
        name: np.frombuffer(raw, dtype=f"<{kind}", count=count, offset=start + at)
        for name, (kind, at, count) in meta.pop("columns").items()
    }
    return meta, columns
