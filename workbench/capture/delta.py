"""Delta: build the staged form of one finished call, hashed once, or say with which cause there is none.

In: an admitted call and what the engine ran and sampled. Out: a `StagedCall` of delta ids_T, mask_T, logprobs_T.
Invariants: the prompt begins with the parent's cumulative ids; each token id is encoded once and the three hashes share
it; nothing is repaired.
Not here: storing the delta and answering for it (`core`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.errors import CaptureError, WireError
from workbench.wire import EMPTY_EXTRAS_DIGEST, CaptureAdmission, Cause, StagedCall, extras_digest, staging_key
from workbench.wire.digests import chain_encoded_ids, hash_call_columns, hash_encoded_ids
from workbench.wire.encoding import BIG_ENDIAN_ID, Floats, TokenIds, big_endian, float32_array, token_array


class CaptureFailed(Exception):
    """A call has no delta, or it was not stored; turned into `capture_failed` coordinates by the core."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True)
class CaptureFailure:
    """Why one call has `capture_failed` coordinates."""

    rollout_id: str
    model_call_id: str
    cause: Cause
    detail: str


@dataclass(eq=False)
class ActiveCall:
    """One admitted call: the version it samples from and the ids its prompt must begin with, uint64[prev_len]."""

    admission: CaptureAdmission
    weight_version: int
    prefix_token_ids: np.ndarray
    completed: bool = field(default=False, init=False)
    failure: CaptureFailure | None = field(default=None, init=False)
    """Why it has `capture_failed` coordinates; None while it has none, and where it was staged."""
    delta_ids: np.ndarray | None = field(default=None, init=False)
    """The staged delta, uint64[delta_len], once it was built."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """The whole sequence, uint64[cum_len], once the delta was built; what a child's prompt must begin with."""
        return None if self.delta_ids is None else np.concatenate((self.prefix_token_ids, self.delta_ids))

    @property
    def key(self) -> str:
        return staging_key(self.admission.rollout_id, self.admission.model_call_id)


def checked_prefix(admission: CaptureAdmission, prefix: TokenIds | None, key: str) -> np.ndarray:
    inline = admission.required_prefix_token_ids
    if admission.mode == "text":
        if prefix is not None and len(prefix):
            raise CaptureError(f"call {key} is a root; it takes no prefix, got {len(prefix)} ids")
        return np.empty(0, dtype=np.uint64)
    if prefix is None:
        if not inline:
            raise CaptureError(
                f"call {key} names its prefix by staging_chain; pass its {admission.prev_len} ids to begin"
            )
        return token_array(inline, f"call {key} prefix")
    try:
        prefix_T = token_array(prefix, f"call {key} prefix")
    except WireError as error:
        raise CaptureError(str(error)) from error
    if prefix_T.size != admission.prev_len:
        raise CaptureError(f"call {key}: the prefix must have {admission.prev_len} ids (prev_len), got {prefix_T.size}")
    if inline and not np.array_equal(prefix_T, token_array(inline)):
        raise CaptureError(f"call {key}: the prefix differs from the one in its admission")
    return prefix_T


def build_delta(
    call: ActiveCall, prompt: TokenIds, generated: TokenIds, logprobs: Floats, extras: dict[str, Any] | None
) -> StagedCall:
    """The staged delta of one call, hashed; raises CaptureFailed when there is none."""
    admission, prev_len = call.admission, call.admission.prev_len
    prompt_T, generated_T, sampled_T = _engine_columns(call.key, prompt, generated, logprobs)
    if not np.array_equal(prompt_T[:prev_len], call.prefix_token_ids):
        raise CaptureFailed(Cause.PREFIX_MISMATCH, _first_difference(call.key, prompt_T, call.prefix_token_ids))
    cum_len = prompt_T.size + generated_T.size
    carry, delta_len = prompt_T.size - prev_len, cum_len - prev_len
    if delta_len == 0:
        raise CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {call.key}: no token after the first {prev_len}")
    # Written straight into its big-endian form: one pass over the prompt, and the three hashes below share it.
    ids_be_T = _scratch(cum_len)
    ids_be_T[: prompt_T.size] = prompt_T
    ids_be_T[prompt_T.size :] = generated_T
    mask_T = np.ones(delta_len, dtype=np.float32)
    mask_T[:carry] = 0.0
    logprobs_T = np.zeros(delta_len, dtype=np.float32)
    logprobs_T[carry:] = sampled_T
    identity: dict[str, Any] = {
        "rollout_id": admission.rollout_id,
        "model_call_id": admission.model_call_id,
        "parent_call_id": admission.parent_call_id,
        "mode": admission.mode,
        "prev_len": prev_len,
        "delta_len": delta_len,
        "cum_len": cum_len,
        "weight_version": call.weight_version,
    }
    try:
        hashes: dict[str, Any] = {
            "extras_digest": EMPTY_EXTRAS_DIGEST if extras is None else extras_digest(extras),
            "chain_hash": chain_encoded_ids(admission.parent_chain_hash, ids_be_T[prev_len:]),
            "cumulative_hash": hash_encoded_ids(ids_be_T),
        }
        digest = hash_call_columns(
            **identity,
            **hashes,
            ids_be_T=ids_be_T[prev_len:],
            mask_be_T=big_endian(mask_T),
            logprobs_be_T=big_endian(logprobs_T),
        )
    except WireError as error:
        raise CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {call.key}: {error}") from error
    call.delta_ids = ids_be_T[prev_len:].astype(np.uint64)
    return StagedCall.unverified(
        **identity,
        **hashes,
        digest=digest,
        token_ids_delta=call.delta_ids,
        token_mask_delta=mask_T,
        generation_log_probs_delta=logprobs_T,
        extras=extras,
    )


_thread = threading.local()


def _scratch(count: int) -> np.ndarray:
    """`>u8`[count] of this thread, overwritten by its next call: fresh memory would cost more than filling it."""
    buffer: np.ndarray | None = getattr(_thread, "buffer", None)
    if buffer is None or buffer.size < count:
        buffer = _thread.buffer = np.empty(max(count, 4096) * 5 // 4, dtype=BIG_ENDIAN_ID)
    return buffer[:count]


def _engine_columns(
    key: str, prompt: TokenIds, generated: TokenIds, logprobs: Floats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if prompt is None or generated is None:
        raise CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {key}: the engine returned no token ids")
    try:
        prompt_T = token_array(prompt, f"call {key} prompt ids")
        generated_T = token_array(generated, f"call {key} sampled ids")
    except WireError as error:
        raise CaptureFailed(Cause.INVALID_STAGING_ROW, str(error)) from error
    came = 0 if logprobs is None else len(logprobs)
    if came != generated_T.size:
        raise CaptureFailed(
            Cause.LOGPROB_COUNT_MISMATCH,
            f"call {key} has {generated_T.size} sampled ids but {came} log-probs; the engine must return one each",
        )
    try:
        return prompt_T, generated_T, float32_array(logprobs, f"call {key} log-probs")
    except WireError as error:
        raise CaptureFailed(Cause.NONFINITE_LOGPROB, str(error)) from error


def _first_difference(key: str, prompt_T: np.ndarray, prefix_T: np.ndarray) -> str:
    if prompt_T.size < prefix_T.size:
        return f"call {key}: the prompt has {prompt_T.size} ids, its parent's sequence {prefix_T.size}"
    at = int(np.flatnonzero(prompt_T[: prefix_T.size] != prefix_T)[0])
    return f"call {key}: at position {at} the prompt has {int(prompt_T[at])}, its parent's sequence {int(prefix_T[at])}"
