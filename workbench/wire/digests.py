"""Digests: the three hashes that bind a call's tokens to its identity, its parent and the sequence so far.

In: ids, masks, log-probs and identity fields. Out: lowercase SHA-256 hex.
    cumulative hash   SHA-256(domain + token ids of the whole sequence so far)
    chain hash        SHA-256(domain + 00 | 01 parent's 32 bytes + token ids of the delta)
    call digest       SHA-256(domain + versions + identity + lengths + columns + the other digests)
Invariant: a digest is only ever computed over fields that have been checked; a contradictory call has none.
Not here: the order of the mask (carry, then generation), which is the verifier's.

`*_encoded` forms take columns that are big-endian already, so that a call hashed three times is encoded once.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import numpy as np

from workbench.errors import WireError
from workbench.wire.encoding import (
    Floats,
    TokenIds,
    big_endian,
    float32_array,
    float64_column,
    text,
    token_array,
)
from workbench.wire.extras import EMPTY_EXTRAS_DIGEST, EXTRAS_DIGEST_VERSION

SCHEMA_VERSION: Final = 2
DIGEST_VERSION: Final = 2

_PREFIX_DOMAIN = b"nemo-gym-staging-prefix-v2"
_CHAIN_DOMAIN = b"nemo-gym-staging-chain-v1"
_CALL_DOMAIN = b"nemo-gym-staging-call-v2"
_VERSION_BYTES = bytes((SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION))
_MODES = {mode: text(mode) for mode in ("text", "token_in")}
_NO_EXTRAS = bytes.fromhex(EMPTY_EXTRAS_DIGEST)
_COUNT = struct.Struct(">Q")
_COLUMN_HEAD = struct.Struct(">QQ")
_LENGTHS = struct.Struct(">QQQQ")


def digest_bytes(value: str, what: str) -> bytes:
    """The 32 bytes of a hex digest. Raises WireError for anything but 64 lowercase hex digits."""
    try:
        raw = bytes.fromhex(value)
    except (TypeError, ValueError):
        raw = b""
    # `fromhex` also reads upper case and spaces; the way back tells.
    if len(raw) != 32 or raw.hex() != value:
        raise WireError(f"{what} must be 64 lowercase hex digits, got {value!r}")
    return raw


def hash_token_ids(token_ids: TokenIds) -> str:
    """Cumulative hash of one whole sequence, T ids. Raises WireError for ids outside 0..2⁶⁴−1."""
    return hash_encoded_ids(big_endian(token_array(token_ids)))


def hash_encoded_ids(ids_be_T: np.ndarray) -> str:
    """`hash_token_ids` of a column that is `>u8` already."""
    digest = hashlib.sha256(_PREFIX_DOMAIN + _COUNT.pack(ids_be_T.size))
    digest.update(ids_be_T.data)
    return digest.hexdigest()


def chain_hash(parent_chain_hash: str | None, token_ids_delta: TokenIds) -> str:
    """Chain one delta (T ids) onto its parent's chain hash; None begins a chain."""
    return chain_encoded_ids(parent_chain_hash, big_endian(token_array(token_ids_delta)))


def chain_encoded_ids(parent_chain_hash: str | None, ids_be_T: np.ndarray) -> str:
    """`chain_hash` of a column that is `>u8` already."""
    if parent_chain_hash is None:
        head = b"\x00"
    else:
        head = b"\x01" + digest_bytes(parent_chain_hash, "parent_chain_hash")
    digest = hashlib.sha256(_CHAIN_DOMAIN + head + _COUNT.pack(ids_be_T.size))
    digest.update(ids_be_T.data)
    return digest.hexdigest()


def staged_call_digest(
    *,
    schema_version: int,
    digest_version: int,
    extras_digest_version: int,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: TokenIds,
    token_mask_delta: Floats,
    generation_log_probs_delta: Floats,
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """Digest of one staged call: T ids, T masks (0 or 1), T log-probs (nats, float32 after rounding).

    Raises WireError, naming the call, when versions, shape, lengths, mask, log-probs or hashes contradict the contract.
    """
    call = f"call {rollout_id}/{model_call_id}"
    check_versions(schema_version, digest_version, extras_digest_version, call)
    check_shape(rollout_id, model_call_id, parent_call_id, mode, prev_len, delta_len, cum_len, call)
    ids_T = token_array(token_ids_delta, f"{call} token ids")
    mask_T, logprobs_T = mask_and_logprobs(token_mask_delta, generation_log_probs_delta, call, strict=True)
    return hash_call_columns(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        parent_call_id=parent_call_id,
        mode=mode,
        prev_len=prev_len,
        delta_len=delta_len,
        cum_len=cum_len,
        weight_version=weight_version,
        ids_be_T=big_endian(ids_T),
        mask_be_T=big_endian(mask_T),
        logprobs_be_T=big_endian(logprobs_T),
        extras_digest=extras_digest,
        chain_hash=chain_hash,
        cumulative_hash=cumulative_hash,
    )


def check_versions(schema: int, digest: int, extras: int, call: str) -> None:
    """Raise WireError unless the three versions are the ones this code speaks."""
    expected = (SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION)
    came = (schema, digest, extras)
    if came != expected or not (type(schema) is type(digest) is type(extras) is int):
        raise WireError(f"{call}: schema/digest/extras versions must be {expected}, got {came}")


def check_shape(
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    call: str,
) -> None:
    """Raise WireError unless the call is a well-formed root (text, no parent, 0) or child (token_in, parent, > 0)."""
    if not (type(prev_len) is type(delta_len) is type(cum_len) is int):
        raise WireError(f"{call}: prev_len, delta_len and cum_len must be ints, got {(prev_len, delta_len, cum_len)}")
    if not rollout_id or not model_call_id or parent_call_id == "":
        raise WireError(f"{call}: rollout, call and parent ids must not be empty")
    if mode not in ("text", "token_in"):
        raise WireError(f"{call}: mode must be 'text' or 'token_in', got {mode!r}")
    if parent_call_id is None and (mode != "text" or prev_len != 0):
        raise WireError(f"{call}: a call without parent must be mode 'text' at prev_len 0, got {mode!r} at {prev_len}")
    if parent_call_id is not None and (mode != "token_in" or prev_len == 0):
        raise WireError(f"{call}: a child must be mode 'token_in' at prev_len > 0, got {mode!r} at {prev_len}")
    if delta_len == 0:
        raise WireError(f"{call}: a staged delta must hold at least one token")
    if cum_len != prev_len + delta_len:
        raise WireError(f"{call}: cum_len {cum_len} is not prev_len {prev_len} + delta_len {delta_len}")


def check_sizes(delta_len: int, ids_T: np.ndarray, mask_T: np.ndarray, logprobs_T: np.ndarray, call: str) -> None:
    """Raise WireError unless every column holds `delta_len` values."""
    if not ids_T.size == mask_T.size == logprobs_T.size == delta_len:
        raise WireError(
            f"{call}: delta_len {delta_len} but {ids_T.size} ids, {mask_T.size} masks, {logprobs_T.size} log-probs"
        )


def mask_and_logprobs(mask: Floats, logprobs: Floats, call: str, *, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """Check both columns before rounding and return them as float32[T].

    Masks are 0 or 1, a masked position has log-prob zero. `strict` refuses ints in plain lists.
    """
    if strict:
        for what, column in (("mask", mask), ("log-probs", logprobs)):
            if isinstance(column, (list, tuple)) and set(map(type, column)) - {float}:
                raise WireError(f"{call} {what} must be floats")
    raw_mask_T = float64_column(mask, f"{call} mask")
    raw_logprobs_T = float64_column(logprobs, f"{call} log-probs")
    if raw_mask_T.size != raw_logprobs_T.size:
        raise WireError(f"{call}: {raw_mask_T.size} masks but {raw_logprobs_T.size} log-probs")
    carry_T = raw_mask_T == 0.0
    neither = ~(carry_T | (raw_mask_T == 1.0))
    if neither.any():
        position = int(np.flatnonzero(neither)[0])
        raise WireError(f"{call}: mask at position {position} is {float(raw_mask_T[position])!r}, must be 0 or 1")
    # Before rounding: a tiny log-prob on a carried token must not vanish into float32 zero.
    bad = carry_T & (raw_logprobs_T != 0.0)
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        came = float(raw_logprobs_T[position])
        raise WireError(f"{call}: the carried token at position {position} must have log-prob 0, got {came!r}")
    return float32_array(raw_mask_T, f"{call} mask"), float32_array(raw_logprobs_T, f"{call} log-probs")


def hash_call_columns(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    ids_be_T: np.ndarray,
    mask_be_T: np.ndarray,
    logprobs_be_T: np.ndarray,
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """Digest of columns that are checked and big-endian already (`>u8`, `>f4`, `>f4`); lengths are checked here."""
    if not ids_be_T.size == mask_be_T.size == logprobs_be_T.size == delta_len:  # asked here: naming the call takes time
        check_sizes(delta_len, ids_be_T, mask_be_T, logprobs_be_T, f"call {rollout_id}/{model_call_id}")
    parts = (
        _CALL_DOMAIN,
        _VERSION_BYTES,
        text(rollout_id, "rollout_id"),
        text(model_call_id, "model_call_id"),
        b"\x00" if parent_call_id is None else b"\x01" + text(parent_call_id, "parent_call_id"),
        _MODES.get(mode) or text(mode, "mode"),
        _lengths(prev_len, delta_len, cum_len, weight_version),
        _COLUMN_HEAD.pack(8 + ids_be_T.nbytes, delta_len),
        ids_be_T.data,
        _COLUMN_HEAD.pack(8 + mask_be_T.nbytes, delta_len),
        mask_be_T.data,
        _COLUMN_HEAD.pack(8 + logprobs_be_T.nbytes, delta_len),
        logprobs_be_T.data,
        _NO_EXTRAS if extras_digest == EMPTY_EXTRAS_DIGEST else digest_bytes(extras_digest, "extras_digest"),
        b"\x01",
        digest_bytes(chain_hash, "chain_hash"),
        b"\x01",
        digest_bytes(cumulative_hash, "cumulative_hash"),
    )
    # Joined, because each `update` gives the interpreter's lock away and takes it back; copying costs less.
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _lengths(prev_len: int, delta_len: int, cum_len: int, weight_version: int) -> bytes:
    values = (prev_len, delta_len, cum_len, weight_version)
    if not (type(prev_len) is type(delta_len) is type(cum_len) is type(weight_version) is int):
        raise WireError(f"prev_len, delta_len, cum_len and weight_version must be ints, got {values}")
    try:
        return _LENGTHS.pack(*values)
    except struct.error as error:
        raise WireError(f"prev_len, delta_len, cum_len and weight_version must be 0..2^64-1, got {values}") from error
