"""Capture core: turn one finished call into one durable delta, and only then into coordinates.

    admission, prefix ──begin──▶ ActiveCall ──complete(prompt, generated, log-probs)──▶ sink.stage ──▶ CommitCoords
In: exact engine ids and sampled log-probs. Out: a `StagedCall` in the sink, token-free coordinates for the gateway.
Invariants: coordinates of disposition `staged` exist only after the sink returned; a call completes at most once; the
weight version is the one at `begin`; nothing is repaired, so a call that breaks the contract is a typed failure while
its completion is still served.
Not here: the delta itself (`delta`), engines and HTTP (`engine`, `transport`), where deltas are stored (`staging`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from workbench.capture.delta import ActiveCall, CaptureFailed, CaptureFailure, build_delta, checked_prefix
from workbench.deadline import call_with_deadline
from workbench.errors import CaptureError, StagingError
from workbench.wire import CaptureAdmission, Cause, CommitCoords, StagedCall, staging_key
from workbench.wire.encoding import Floats, TokenIds

_LOG = logging.getLogger(__name__)

REMEMBERED_CALLS = 65_536
"""How many calls are remembered as begun, to refuse a second `begin`."""


@runtime_checkable
class StagingSink(Protocol):
    """Where deltas become durable. `stage` returns only when the row would survive this process; it raises else.

    What it returns is ignored, except False and an object whose `ok` is False: those are refusals. A sink may have
    `async stage_async(call)` besides, for callers with an event loop; without it, `stage` is called in a thread.
    """

    def stage(self, call: StagedCall) -> Any: ...


@runtime_checkable
class StagingSource(Protocol):
    """Where deltas are read back."""

    async def fetch(self, keys: Sequence[str]) -> list[StagedCall | StagingError]:
        """One batched read, one result a key in the order asked; a bad or missing row is its StagingError."""
        ...

    async def clear(self, keys: Sequence[str]) -> None: ...


class CaptureCore:
    """Stages calls through `sink`; `weight_version()` is read at every `begin`.

    `sink_timeout_s` bounds each staging (None: no bound, no thread). `on_failure` hears of every failed
    call; without it failures are logged.
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
        self.counts: Counter[str] = Counter()

    def begin(self, admission: CaptureAdmission, prefix_token_ids: TokenIds | None = None) -> ActiveCall:
        """Admit one call. A child brings its parent's cumulative ids, inline in the admission or as `prefix_token_ids`.

        Raises CaptureError, naming the call, for a second `begin` of it, a prefix that is missing, of another length
        than `prev_len` or different from the inline one, and for a weight version that is no non-negative int.
        """
        key = staging_key(admission.rollout_id, admission.model_call_id)
        prefix_T = checked_prefix(admission, prefix_token_ids, key)
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
        """Stage prompt[prev_len:] + generated; coordinates staged, or capture_failed (`call.failure` says why).

        `prompt_token_ids` are the ids the engine ran, `logprobs` one a generated id (nats). Raises CaptureError for a
        second completion, and for nothing else.
        """
        self._claim(call)
        try:
            staged = build_delta(call, prompt_token_ids, generated_token_ids, logprobs, extras)
            self._stage(staged)
        except CaptureFailed as failure:
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
            staged = build_delta(call, prompt_token_ids, generated_token_ids, logprobs, extras)
            await self._stage_async(staged)
        except CaptureFailed as failure:
            return self._failed(call, failure.cause, failure.detail)
        except asyncio.CancelledError:
            self._failed(call, Cause.SINK_ERROR, "cancelled while the delta was being staged")
            raise
        return self._staged(staged)

    def fail(self, call: ActiveCall, cause: Cause, detail: str) -> CommitCoords:
        """Give up a call that was begun: coordinates of disposition `capture_failed`."""
        self._claim(call)
        return self._failed(call, cause, detail)

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

    def _sink_failure(self, staged: StagedCall, error: BaseException) -> CaptureFailed:
        sink = type(self._sink).__name__
        if isinstance(error, StagingError) and error.cause in (Cause.SINK_TIMEOUT, Cause.SINK_ERROR):
            return CaptureFailed(Cause(error.cause), f"{sink}: {error}")
        if isinstance(error, TimeoutError):
            waited = f"within {self._sink_timeout_s:g} s" if self._sink_timeout_s is not None else "in time"
            return CaptureFailed(Cause.SINK_TIMEOUT, f"{sink} did not acknowledge {staged.staging_key} {waited}")
        return CaptureFailed(Cause.SINK_ERROR, f"{sink} raised {type(error).__name__}: {error}")

    def _check_answer(self, staged: StagedCall, answer: Any) -> None:
        # Returning is the acknowledgement; False, or a result object that says it is not ok, is a refusal.
        if answer is False or getattr(answer, "ok", True) is False:
            why = getattr(answer, "error", None) or "no reason given"
            raise CaptureFailed(Cause.SINK_ERROR, f"{type(self._sink).__name__} refused {staged.staging_key}: {why}")

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
        failure = call.failure = CaptureFailure(admission.rollout_id, admission.model_call_id, cause, detail)
        with self._lock:
            self.counts[cause] += 1
        if self._on_failure is None:
            _LOG.warning("call %s was not captured: %s: %s", call.key, cause, detail)
        else:
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
