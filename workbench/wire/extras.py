"""Extras: facts about a call that upstream leaves outside the digest, and the typed tree they are digested as.

In: `None` or a JSON-like mapping. Out: bytes, and their SHA-256.
    N null · B00/B01 bool · I i64 · F f64 (finite) · S text · L u64 count + items · D u64 count + (text key, value)
    in order of the keys' UTF-8 bytes.
Invariant: anything a second implementation could encode differently (tuple, bytes, NaN, numpy scalar, an int beyond
i64, a non-string key) is an error, never a guess. `None` and `{}` differ.
Not here: the meaning of routed-experts envelopes (`routes`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any, Final

from workbench.errors import WireError
from workbench.wire.encoding import text, u64

EXTRAS_DIGEST_VERSION: Final = 1
EXTRAS_DOMAIN = b"nemo-gym-staging-extras-v1"

# The keys, named once.
FINISH_REASON = "finish_reason"
"""What the engine said: `stop`, `length`, `abort`."""
STOP_REASON = "stop_reason"
"""The stop string or stop token id that ended the call, or null."""
TRUNCATED = "truncated"
"""True when the call was cut by length, whatever its finish label says."""
SAMPLING = "sampling"
"""Mapping: temperature, top_p, top_k, min_p, penalties, bias and log-prob mode the tokens were sampled with."""
WEIGHT_SPANS = "weight_spans"
"""List of `[start, end, version]` over the generated tokens of a call that straddled a weight update."""
ROUTED_EXPERTS = "routed_experts"
"""Envelope of the experts each token was routed to."""

_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1


def encode_extras(value: Any) -> bytes:
    """Encode one value of the tree. Raises WireError for a type or value outside it."""
    out: list[bytes] = []
    _encode(value, out, "extras")
    return b"".join(out)


def _encode(value: Any, out: list[bytes], path: str) -> None:
    kind = type(value)
    if value is None:
        out.append(b"N")
    elif kind is bool:
        out.append(b"B\x01" if value else b"B\x00")
    elif kind is int:
        if not _I64_MIN <= value <= _I64_MAX:
            raise WireError(f"{path} is {value}, outside a signed 64-bit integer")
        out.append(b"I" + struct.pack(">q", value))
    elif kind is float:
        if not math.isfinite(value):
            raise WireError(f"{path} is {value!r}; extras floats must be finite")
        out.append(b"F" + struct.pack(">d", value))
    elif kind is str:
        out.append(b"S" + text(value, path))
    elif kind is list:
        out.append(b"L" + u64(len(value)))
        for index, item in enumerate(value):
            _encode(item, out, f"{path}[{index}]")
    elif kind is dict:
        for key in value:
            if type(key) is not str:
                raise WireError(f"{path} has the key {key!r}; keys must be strings")
        out.append(b"D" + u64(len(value)))
        for encoded, key in sorted((text(key, path)[8:], key) for key in value):
            out.append(u64(len(encoded)) + encoded)
            _encode(value[key], out, f"{path}.{key}")
    else:
        raise WireError(f"{path} is a {kind.__name__}; extras hold null, bool, int, float, str, list and dict only")


def extras_digest(extras: Mapping[str, Any] | None) -> str:
    """SHA-256 (hex) of one extras tree; the top level is null or a mapping. Raises WireError otherwise."""
    if extras is not None and not isinstance(extras, Mapping):
        raise WireError(f"extras must be a mapping or null, got {type(extras).__name__}")
    tree = encode_extras(None if extras is None else dict(extras))
    return hashlib.sha256(EXTRAS_DOMAIN + bytes([EXTRAS_DIGEST_VERSION]) + tree).hexdigest()


EMPTY_EXTRAS_DIGEST = extras_digest(None)
