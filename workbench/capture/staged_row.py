"""Staged row: one staged call as few columns, and back.

A row is few columns, because every column costs at put and get: `token_ids` int64[T] (the bits of the wire's uint64),
`logprobs` float32[G] (the G generated tokens; a carry's are 0 by contract), `meta` uint8[...] (JSON of the
other fields) and, where the call has routed experts, `routes` [T, layers, topk] in its wire dtype.
Invariants: `unpack(pack(call)) == call`, bit for bit; a row that says it is another call than its key is refused.
Not here: where rows are kept (staging), whether their digests are right (`workbench.finalizer.verify`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from workbench.errors import StagingError, WireError
from workbench.wire import Cause, StagedCall, decode_routes, encode_routes, staging_key
from workbench.wire.extras import ROUTED_EXPERTS

COLUMNS = ("token_ids", "logprobs", "meta")
ROUTES = "routes"
_ARRAYS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")
_INTEGERS = (
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
)
_TEXTS = ("rollout_id", "model_call_id", "mode", "digest", "extras_digest", "chain_hash", "cumulative_hash")
_FIELDS = {*_INTEGERS, *_TEXTS, "parent_call_id", "extras"}


def tags_of(call: StagedCall) -> dict[str, Any]:
    """The fixed tag schema of the staging partition."""
    return {"rollout_id": call.rollout_id, "weight_version": call.weight_version}


def pack(call: StagedCall) -> dict[str, np.ndarray]:
    """Columns of one staged call (see the head). Raises StagingError when the delta is not carry, then generation."""
    mask_T = np.asarray(call.token_mask_delta)
    carry = int(np.count_nonzero(mask_T == 0))
    logprobs_T = np.asarray(call.generation_log_probs_delta, dtype=np.float32)
    if mask_T[:carry].any() or (mask_T[carry:] != 1).any() or logprobs_T[:carry].view(np.uint32).any():
        raise invalid_row(
            call.staging_key, "its mask is not carry (0) then generation (1), with log-prob exactly 0.0 on the carry"
        )
    meta: dict[str, Any] = {name: getattr(call, name) for name in _FIELDS}
    columns: dict[str, np.ndarray] = {
        "token_ids": np.asarray(call.token_ids_delta, dtype=np.uint64).view(np.int64),
        "logprobs": logprobs_T[carry:],
    }
    extras = call.extras or {}
    values = _plain_routes(extras.get(ROUTED_EXPERTS))
    if values is not None:
        columns[ROUTES] = values
        meta["extras"] = {k: v for k, v in extras.items() if k != ROUTED_EXPERTS}
        meta[ROUTES] = True
    columns["meta"] = np.frombuffer(orjson.dumps(meta), dtype=np.uint8)
    return columns


def _plain_routes(envelope: Any) -> np.ndarray | None:
    """Routes that come back as they went; what is no envelope, or one of another form, stays in the metadata."""
    if not isinstance(envelope, str):
        return None
    try:
        values = decode_routes(envelope).values
        return values if encode_routes(values) == envelope else None
    except WireError:
        return None


def unpack(key: str, columns: Mapping[str, np.ndarray]) -> StagedCall:
    """The staged call under `key`, digests unchecked. Raises StagingError(invalid_staging_row) for any other row."""
    meta = _read_meta(key, columns)
    ids_T, logprobs_G = columns["token_ids"], columns["logprobs"]
    for name, column, dtype in (("token_ids", ids_T, np.int64), ("logprobs", logprobs_G, np.float32)):
        if column.dtype != dtype or column.ndim != 1:
            raise invalid_row(key, f"{name} must be {np.dtype(dtype)}[T], got {column.dtype}{list(column.shape)}")
    carry = ids_T.size - logprobs_G.size
    if carry < 0:
        raise invalid_row(key, f"it has {logprobs_G.size} log-probs for {ids_T.size} token ids")
    if meta.pop(ROUTES, None):
        if ROUTES not in columns:
            raise invalid_row(key, "its routed experts did not come back with it")
        try:
            meta["extras"] = {**(meta["extras"] or {}), ROUTED_EXPERTS: encode_routes(columns[ROUTES])}
        except WireError as error:
            raise invalid_row(key, f"its routed experts cannot be read: {error}") from error
    mask_T = np.ones(ids_T.size, dtype=np.float32)
    mask_T[:carry] = 0.0
    logprobs_T = np.zeros(ids_T.size, dtype=np.float32)
    logprobs_T[carry:] = logprobs_G
    arrays = dict(zip(_ARRAYS, (ids_T.view(np.uint64), mask_T, logprobs_T), strict=True))
    return StagedCall.unverified(**meta, **arrays)


def _read_meta(key: str, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    absent = [name for name in COLUMNS if name not in columns]
    if absent:
        raise invalid_row(key, f"it has no column {', '.join(absent)}")
    meta_column = columns["meta"]
    try:
        meta = orjson.loads(np.ascontiguousarray(meta_column, dtype=np.uint8).tobytes())
    except (orjson.JSONDecodeError, TypeError, ValueError) as error:
        raise invalid_row(key, f"its metadata is not JSON: {error}") from error
    if not isinstance(meta, dict) or _FIELDS - meta.keys() or meta.keys() - _FIELDS - {ROUTES}:
        raise invalid_row(key, f"its metadata must have exactly the fields {', '.join(sorted(_FIELDS))}")
    well_typed = (
        all(type(meta[name]) is int and meta[name] >= 0 for name in _INTEGERS)
        and all(isinstance(meta[name], str) for name in _TEXTS)
        and isinstance(meta["parent_call_id"], str | None)
        and isinstance(meta["extras"], dict | None)
    )
    if not well_typed:
        raise invalid_row(key, "its metadata has a field of another type than the record's")
    identity = f"{meta['rollout_id']}/{meta['model_call_id']}"
    if identity != key:
        raise invalid_row(key, f"it says that it is call {identity}")
    return meta


def invalid_row(key: str, why: str) -> StagingError:
    return StagingError(
        f"staged call {key} cannot be used: {why}; its rollout is masked, see `workbench inspect`",
        cause=Cause.INVALID_STAGING_ROW,
        key=key,
    )


def missing_row(key: str) -> StagingError:
    return StagingError(
        f"staged call {key} is not in TransferQueue, though it was acknowledged once; a storage unit that died takes "
        f"its rows along, or the group was cleared before",
        cause=Cause.MISSING_STAGING_ROW,
        key=key,
    )


def identity(columns: Mapping[str, np.ndarray]) -> str | None:
    """The key a row says it belongs to, None when its metadata does not say."""
    try:
        meta = orjson.loads(columns["meta"].tobytes())
        return staging_key(meta["rollout_id"], meta["model_call_id"])
    except (KeyError, TypeError, ValueError):
        return None


def has_routes(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether the row was staged with a `routes` column, as its metadata says."""
    try:
        return orjson.loads(columns["meta"].tobytes()).get(ROUTES) is not None
    except (ValueError, AttributeError):
        return False
