"""Engine: a client around the inference engine that records what it ran, below every HTTP dialect.

    serving app ── generate(prompt, sampling) ──▶ CapturingEngine ──▶ engine
                ◀── outputs, the last one held back ──┘  │ prompt ids, sampled ids, log-probs
                                                          ▼ core.complete_async ──▶ sink ──▶ coordinates on the board
Invariants: capture never changes the answer; the last output leaves only after the delta is staged or has failed with a
typed cause; a call whose reader goes away is still brought to an end, with what was sampled until then.
Everything else that the serving app asks of the engine is delegated untouched.
Not here: where the prompt came from (splice), HTTP (transport), what is staged (core).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from workbench.capture.collect import CollectedCall
from workbench.capture.core import ActiveCall, CaptureCore
from workbench.capture.prefix import PrefixStore
from workbench.capture.routes import RouteCapture
from workbench.capture.transport import CallBoard, TaggedCall, current_call
from workbench.errors import CallRefused, CaptureError
from workbench.serving.gate import GatedEngine, GenerationGate
from workbench.serving.sampling import SamplingPins
from workbench.wire import Cause

ABORT_TIMEOUT_S = 10.0
"""How long an abandoned call may take to stop before it is recorded as failed."""


class CapturingEngine(GatedEngine):
    """The engine client that the serving app gets: tagged generations are captured.

    `pins` are the recipe's sampling settings; `overrides` counts, by name, how often a request asked for others.
    """

    def __init__(
        self,
        engine: Any,
        core: CaptureCore,
        board: CallBoard,
        prefixes: PrefixStore,
        gate: GenerationGate,
        pins: SamplingPins,
        logprobs_mode: str,
        weight_version: Callable[[], int],
        routes: RouteCapture | None = None,
    ) -> None:
        super().__init__(engine, gate)
        self.routes = routes
        """What adds routed experts to a call's extras; None: nothing does."""
        self._weight_version = weight_version
        self._core = core
        self._board = board
        self._prefixes = prefixes
        self._pins = pins
        self._logprobs_mode = logprobs_mode
        self.overrides: Counter[str] = Counter()
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The engine's `generate`. Raises `CallRefused` for a tagged call that cannot be captured exactly."""
        # Read here and not in the generator: a streamed response is iterated in another task than the handler's.
        call = current_call.get()
        if call is None:
            return super().generate(prompt, sampling_params, request_id, **kwargs)
        where = f"{call.admission.rollout_id}/{call.admission.model_call_id}"
        if call.taken:
            raise CallRefused(f"Call {where} asked for a second generation; one admission is one completion.")
        if getattr(sampling_params, "n", 1) != 1:
            raise CallRefused(f"Call {where} asked for n={sampling_params.n}; only n=1 can be captured.")
        call.taken = True
        params = self._pin(sampling_params)
        if self._pins.seed is not None:
            params.seed = self._pins.seed_of(call.admission.rollout_id, call.said)
        return self._tagged(call, prompt, params, kwargs)

    def _pin(self, requested: Any) -> Any:
        params = requested.clone()
        for name, value in self._pins.pinned().items():
            came = getattr(params, name, value)
            # Unset is spelled None or 0, and of top_k -1 as well: none of these is another value than the rest.
            if (came or None) != (value or None) and not (name == "top_k" and came in (0, -1) and value in (0, -1)):
                self.overrides[name] += 1
            setattr(params, name, value)
        if self._pins.max_tokens is not None:
            params.max_tokens = min(params.max_tokens or self._pins.max_tokens, self._pins.max_tokens)
        # 0 means: the sampled token's own log-prob and no alternatives. The serving layer shows log-probs only where
        # the request asked for them, so this does not reach the response.
        params.logprobs = 0
        return params

    async def _tagged(
        self, call: TaggedCall, prompt: Any, params: Any, kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        # The engine is read in a task of its own, so that a reader who leaves (a cancelled request) does not cancel the
        # recording: the task still gets the engine's last word about what was sampled.
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        call.recorded = True
        recording = self._spawn(self._record(call, prompt, params, kwargs, outputs))
        try:
            while True:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            if not recording.done():
                call.abandoned = True
                self._spawn(self._stop(call, recording))

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self, call: TaggedCall, recording: asyncio.Task[None]) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + ABORT_TIMEOUT_S
        # Repeated because an abort is lost when it comes before the engine has taken the request.
        while not recording.done() and clock() < deadline:
            if self._gate.holds_outputs:  # the engine's last word is here, or will be, and waits for the proof
                deadline = clock() + ABORT_TIMEOUT_S
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ABORT_TIMEOUT_S / 10):
                    await self._engine.abort(call.admission.model_call_id)
            await asyncio.wait([recording], timeout=0.2)
        recording.cancel()

    async def _record(
        self, call: TaggedCall, prompt: Any, params: Any, kwargs: dict[str, Any], outputs: asyncio.Queue[Any]
    ) -> None:
        """Read the engine to the end, pass its outputs on, stage the call, then pass the last output on."""
        try:
            async with self._gate.call():
                if call.abandoned:
                    return
                active = self._begin(call)
                collected = CollectedCall(params, self._logprobs_mode)
                try:
                    last = None
                    # The engine knows the call by our own id: a client's could repeat, and an abort is by id.
                    async for output in self._engine.generate(prompt, params, call.admission.model_call_id, **kwargs):
                        await self._gate.proved()
                        collected.add(output)
                        if output.finished:
                            last = output
                        else:
                            outputs.put_nowait(output)
                    await self._conclude(call, active, collected, last)
                except BaseException as error:
                    self._fail(call, active, Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES, _what(error))
                    raise
            outputs.put_nowait(last if last is not None else CaptureError("The engine ended without a last output."))
        except asyncio.CancelledError as error:
            outputs.put_nowait(error)
            raise
        except Exception as error:
            outputs.put_nowait(error)
        finally:
            self._board.close(call)

    def _begin(self, call: TaggedCall) -> ActiveCall:
        if call.failure is not None and call.prefix_token_ids is None:
            # Without its parent's ids the core would refuse to begin; this call is only going to be failed.
            return ActiveCall(call.admission, self._weight_version(), np.empty(0, dtype=np.uint64))
        return self._core.begin(call.admission, call.prefix_token_ids)

    async def _conclude(self, call: TaggedCall, active: ActiveCall, collected: CollectedCall, last: Any) -> None:
        if last is None or collected.finish_reason == "error":
            self._fail(
                call, active, Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES, "The engine gave no completion."
            )
            return
        problem = call.failure or collected.problem()
        if problem is not None:
            self._fail(call, active, *problem)
            return
        extras = collected.extras(active.weight_version)
        if self.routes is not None:
            extras |= await self.routes.extras(call.admission, collected)
        began = time.monotonic()
        coords = await self._core.complete_async(
            active,
            prompt_token_ids=collected.prompt_ids,
            generated_token_ids=collected.sampled_ids,
            logprobs=collected.logprobs,
            extras=extras,
        )
        staged_s = time.monotonic() - began
        failure = active.failure
        if coords.disposition == "staged":
            self._prefixes.remember(
                coords, np.concatenate([collected.prompt_ids, collected.sampled_ids], dtype=np.uint32)
            )
        self._board.settle(
            call,
            coords,
            None if failure is None else (failure.cause, failure.detail),
            staged_s=staged_s,
            sampled_tokens=int(collected.sampled_ids.size),
            finish_reason=collected.finish_reason,
        )

    def _fail(self, call: TaggedCall, active: ActiveCall, cause: Cause, detail: str) -> None:
        if call.settled.is_set():
            return
        if active.completed:
            # Cancelled in the middle of staging: the core has recorded that, but its coordinates never came out.
            active = ActiveCall(active.admission, active.weight_version, active.prefix_token_ids)
        self._board.settle(call, self._core.fail(active, cause, detail), (cause, detail))

    async def drain(self, timeout_s: float) -> None:
        """Wait until every recording has come to its end, at most `timeout_s` seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
