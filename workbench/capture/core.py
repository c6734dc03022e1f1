"""Capture core: turn one finished call into one durable delta, and only then into coordinates.

    admission, prefix ──begin──▶ ActiveCall ──complete(prompt, generated, log-probs)──▶ sink.stage ──▶ CommitCoords
In: exact engine ids and sampled log-probs. Out: a `StagedCall` in the sink, token-free coordinates for the gateway.
Invariants: coordinates of disposition `staged` exist only after the sink returned; a call completes at most once; the
weight version is the one at `begin`; nothing is repaired, so a call that breaks the contract is a typed failure while
its completion is still served.
Not here: engines and HTTP (`engine`, `transport`), where deltas are stored (`staging`), how prompts are spliced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from workbench.capture.deadline import call_with_deadline
from workbench.errors import CaptureError, StagingError, WireError
from workbench.wire import CaptureAdmission, Cause, CommitCoords, StagedCall, extras_digest, staging_key
from workbench.wire.digests import chain_encoded_ids, hash_call_columns, hash_encoded_ids
from workbench.wire.encoding import Floats, TokenIds, big_endian, float32_array, token_array

_LOG = logging.getLogger(__name__)

_BIG_ENDIAN_ID = np.dtype(">u8")

REMEMBERED_CALLS = 65_536
"""How many call ids are remembered: those begun (to refuse a second `begin`) and those failed (for `detail`)."""


@runtime_checkable
class StagingSink(Protocol):
    """Where deltas become durable. Both forms return only when the row would survive this process; they raise else.

    A sink may leave out `stage_async`; `stage` is then called in a thread.
    """

    def stage(self, call: StagedCall) -> None: ...

    async def stage_async(self, call: StagedCall) -> None: ...


@runtime_checkable
class StagingSource(Protocol):
    """Where deltas are read back."""

    async def fetch(self, keys: Sequence[str]) -> list[StagedCall | StagingError]:
        """One batched read, one result a key in the order asked; a bad or missing row is its StagingError."""
        ...

    async def clear(self, keys: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class CaptureFailure:
    """Why one call has `capture_failed` coordinates."""

    rollout_id: str
    model_call_id: str
    cause: Cause
    detail: str


class _CaptureFailed(Exception):
    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


@dataclass(eq=False)
class ActiveCall:
    """One admitted call: the version it samples from and the ids its prompt must begin with, uint64[prev_len]."""

    admission: CaptureAdmission
    weight_version: int
    prefix_token_ids: np.ndarray
    completed: bool = field(default=False, init=False)
    encoded_ids: np.ndarray | None = field(default=None, init=False)
    """The whole sequence as it was hashed, `>u8`[cum_len], once the delta was built."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """The whole sequence, uint64[cum_len], once the delta was built; what a child's prompt must begin with."""
        return None if self.encoded_ids is None else self.encoded_ids.astype(np.uint64)

    @property
    def key(self) -> str:
        return staging_key(self.admission.rollout_id, self.admission.model_call_id)


class CaptureCore:
    """Stages calls through `sink`; `weight_version()` is read at every `begin`.

    `sink_timeout_s` bounds each staging (None: no bound, no thread). `on_failure` hears of every failed call.
    `counts` holds the number of calls staged, and failed by cause.
    """

    def __init__(
        self,
        sink: StagingSink,
        weight_version: Callable[[], int],
        *,
        sink_timeout_s: float | None = 10.0,
        on_failure: Callable[[CaptureFailure], None] | None = None,
    ) -> None:
        self._sink = sink
        self._weight_version = weight_version
        self._sink_timeout_s = sink_timeout_s
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._begun: OrderedDict[str, None] = OrderedDict()
        self._failures: OrderedDict[str, CaptureFailure] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def begin(self, admission: CaptureAdmission, prefix_token_ids: TokenIds | None = None) -> ActiveCall:
        """Admit one call. A child brings its parent's cumulative ids, inline in the admission or as `prefix_token_ids`.

        Raises CaptureError, naming the call, for a second `begin` of it, a prefix that is missing, of another length
        than `prev_len` or different from the inline one, and for a weight version that is no non-negative int.
        """
        key = staging_key(admission.rollout_id, admission.model_call_id)
        prefix_T = _prefix(admission, prefix_token_ids, key)
        version = self._weight_version()
        if type(version) is not int or version < 0:
            raise CaptureError(f"call {key}: the weight version must be an int >= 0, got {version!r}")
        with self._lock:
            if key in self._begun:
                raise CaptureError(f"call {key} was begun before; every attempt needs a call id of its own")
            self._begun[key] = None
            if len(self._begun) > REMEMBERED_CALLS:
                self._begun.popitem(last=False)
        return ActiveCall(admission, version, prefix_T)

    def complete(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: TokenIds,
        generated_token_ids: TokenIds,
        logprobs: Floats,
        extras: dict[str, Any] | None = None,
    ) -> CommitCoords:
        """Stage prompt[prev_len:] + generated, and return coordinates: staged, or capture_failed (see `detail`).

        `prompt_token_ids` are the ids the engine ran, `logprobs` one a generated id (nats). Raises CaptureError for a
        second completion, and for nothing else.
        """
        self._claim(call)
        try:
            staged = _build(call, prompt_token_ids, generated_token_ids, logprobs, extras)
            self._stage(staged)
        except _CaptureFailed as failure:
            return self._failed(call, failure.cause, failure.detail)
        return self._staged(staged)

    async def complete_async(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: TokenIds,
        generated_token_ids: TokenIds,
        logprobs: Floats,
        extras: dict[str, Any] | None = None,
    ) -> CommitCoords:
        """`complete` on an event loop: the sink is awaited, with the same deadline."""
        self._claim(call)
        try:
            staged = _build(call, prompt_token_ids, generated_token_ids, logprobs, extras)
            await self._stage_async(staged)
        except _CaptureFailed as failure:
            return self._failed(call, failure.cause, failure.detail)
        except asyncio.CancelledError:
            self._failed(call, Cause.SINK_ERROR, "cancelled while the delta was being staged")
            raise
        return self._staged(staged)

    def fail(self, call: ActiveCall, cause: Cause, detail: str) -> CommitCoords:
        """Give up a call that was begun: coordinates of disposition `capture_failed`."""
        self._claim(call)
        return self._failed(call, cause, detail)

    def detail(self, model_call_id: str) -> CaptureFailure | None:
        """Cause and detail of a call whose capture failed, None for any other."""
        with self._lock:
            return self._failures.get(model_call_id)

    def _claim(self, call: ActiveCall) -> None:
        with self._lock:
            if call.completed:
                raise CaptureError(f"call {call.key} was completed before; coordinates are given once")
            call.completed = True

    def _stage(self, staged: StagedCall) -> None:
        try:
            if self._sink_timeout_s is None:
                answer = self._sink.stage(staged)
            else:
                answer = call_with_deadline(lambda: self._sink.stage(staged), self._sink_timeout_s)
        except Exception as error:  # whatever a sink raises poisons this call only, never the completion
            raise self._sink_failure(staged, error) from error
        self._check_answer(staged, answer)

    async def _stage_async(self, staged: StagedCall) -> None:
        stage_async = getattr(self._sink, "stage_async", None)
        if stage_async is None:
            return await asyncio.to_thread(self._stage, staged)
        task = asyncio.ensure_future(stage_async(staged))
        try:
            await asyncio.wait({task}, timeout=self._sink_timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            # Cancelled and not awaited: a sink that swallows cancellation must not hold the completion back.
            task.add_done_callback(_swallow)
            task.cancel()
            raise self._sink_failure(staged, TimeoutError())
        if task.cancelled():
            raise self._sink_failure(staged, RuntimeError("the sink was cancelled"))
        error = task.exception()
        if error is not None:
            raise self._sink_failure(staged, error) from error
        self._check_answer(staged, task.result())

    def _sink_failure(self, staged: StagedCall, error: BaseException) -> _CaptureFailed:
        sink = type(self._sink).__name__
        if isinstance(error, TimeoutError):
            waited = f"within {self._sink_timeout_s:g} s" if self._sink_timeout_s is not None else "in time"
            return _CaptureFailed(Cause.SINK_TIMEOUT, f"{sink} did not acknowledge {staged.staging_key} {waited}")
        return _CaptureFailed(Cause.SINK_ERROR, f"{sink} raised {type(error).__name__}: {error}")

    def _check_answer(self, staged: StagedCall, answer: Any) -> None:
        # Returning is the acknowledgement; False, or a result object that says it is not ok, is a refusal.
        if answer is False or getattr(answer, "ok", True) is False:
            why = getattr(answer, "error", None) or "no reason given"
            raise _CaptureFailed(Cause.SINK_ERROR, f"{type(self._sink).__name__} refused {staged.staging_key}: {why}")

    def _staged(self, staged: StagedCall) -> CommitCoords:
        with self._lock:
            self.counts["staged"] += 1
        return CommitCoords(
            rollout_id=staged.rollout_id,
            model_call_id=staged.model_call_id,
            parent_call_id=staged.parent_call_id,
            prev_len=staged.prev_len,
            delta_len=staged.delta_len,
            cum_len=staged.cum_len,
            weight_version=staged.weight_version,
            digest=staged.digest,
            extras_digest=staged.extras_digest,
            staging_key=staged.staging_key,
            chain_hash=staged.chain_hash,
            cumulative_hash=staged.cumulative_hash,
        )

    def _failed(self, call: ActiveCall, cause: Cause, detail: str) -> CommitCoords:
        admission = call.admission
        failure = CaptureFailure(admission.rollout_id, admission.model_call_id, cause, detail)
        with self._lock:
            self.counts[cause] += 1
            self._failures[admission.model_call_id] = failure
            if len(self._failures) > REMEMBERED_CALLS:
                self._failures.popitem(last=False)
        _LOG.warning("call %s was not captured: %s: %s", call.key, cause, detail)
        if self._on_failure is not None:
            try:
                self._on_failure(failure)
            except Exception:
                _LOG.exception("the failure listener raised for call %s", call.key)
        return CommitCoords(
            rollout_id=admission.rollout_id,
            model_call_id=admission.model_call_id,
            parent_call_id=admission.parent_call_id,
            prev_len=admission.prev_len,
            delta_len=0,
            cum_len=admission.prev_len,
            weight_version=call.weight_version,
            disposition="capture_failed",
        )


def _swallow(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _prefix(admission: CaptureAdmission, prefix: TokenIds | None, key: str) -> np.ndarray:
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


def _build(
    call: ActiveCall, prompt: TokenIds, generated: TokenIds, logprobs: Floats, extras: dict[str, Any] | None
) -> StagedCall:
    """The staged delta of one call, hashed; raises _CaptureFailed when there is none."""
    admission, prev_len = call.admission, call.admission.prev_len
    prompt_T, generated_T, sampled_T = _engine_columns(call.key, prompt, generated, logprobs)
    if not np.array_equal(prompt_T[:prev_len], call.prefix_token_ids):
        raise _CaptureFailed(Cause.PREFIX_MISMATCH, _first_difference(call.key, prompt_T, call.prefix_token_ids))
    cum_len = prompt_T.size + generated_T.size
    carry, delta_len = prompt_T.size - prev_len, cum_len - prev_len
    if delta_len == 0:
        raise _CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {call.key}: no token after the first {prev_len}")
    # Written straight into its big-endian form: one pass over the prompt, and the three hashes below share it.
    ids_be_T = np.empty(cum_len, dtype=_BIG_ENDIAN_ID)
    ids_be_T[: prompt_T.size] = prompt_T
    ids_be_T[prompt_T.size :] = generated_T
    mask_T = np.ones(delta_len, dtype=np.float32)
    mask_T[:carry] = 0.0
    logprobs_T = np.zeros(delta_len, dtype=np.float32)
    logprobs_T[carry:] = sampled_T
    identity = {
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
        hashes = {
            "extras_digest": extras_digest(extras),
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
        raise _CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {call.key}: {error}") from error
    call.encoded_ids = ids_be_T
    return StagedCall.unverified(
        **identity,
        **hashes,
        digest=digest,
        token_ids_delta=ids_be_T[prev_len:].astype(np.uint64),
        token_mask_delta=mask_T,
        generation_log_probs_delta=logprobs_T,
        extras=extras,
    )


def _engine_columns(
    key: str, prompt: TokenIds, generated: TokenIds, logprobs: Floats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if prompt is None or generated is None:
        raise _CaptureFailed(Cause.INVALID_STAGING_ROW, f"call {key}: the engine returned no token ids")
    try:
        prompt_T = token_array(prompt, f"call {key} prompt ids")
        generated_T = token_array(generated, f"call {key} sampled ids")
    except WireError as error:
        raise _CaptureFailed(Cause.INVALID_STAGING_ROW, str(error)) from error
    came = 0 if logprobs is None else len(logprobs)
    if came != generated_T.size:
        raise _CaptureFailed(
            Cause.LOGPROB_COUNT_MISMATCH,
            f"call {key} has {generated_T.size} sampled ids but {came} log-probs; the engine must return one each",
        )
    try:
        return prompt_T, generated_T, float32_array(logprobs, f"call {key} log-probs")
    except WireError as error:
        raise _CaptureFailed(Cause.NONFINITE_LOGPROB, str(error)) from error


def _first_difference(key: str, prompt_T: np.ndarray, prefix_T: np.ndarray) -> str:
    if prompt_T.size < prefix_T.size:
        return f"call {key}: the prompt has {prompt_T.size} ids, its parent's sequence {prefix_T.size}"
    at = int(np.flatnonzero(prompt_T[: prefix_T.size] != prefix_T)[0])
    return f"call {key}: at position {at} the prompt has {int(prompt_T[at])}, its parent's sequence {int(prefix_T[at])}"
