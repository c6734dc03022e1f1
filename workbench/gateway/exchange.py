"""Exchange: one tagged call, from its admission to its last byte.

    worker ──▶ frames ──▶ [ the final frame waits ] ──▶ custody row durable ──▶ agent
An exchange runs as its own task: an agent that leaves in the middle ends nothing, the call is finished and recorded all
the same (as a branch that nobody continued). Its life is bounded by the request deadline.
Invariant: the agent sees the end of a response only after the call's row is in the ledger. A stream that breaks after
content left is never called a request without a completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import orjson

from workbench.errors import LedgerError
from workbench.gateway.custody import Call, Custodian
from workbench.gateway.delivery import JSON, SSE, Head
from workbench.gateway.metrics import Metrics
from workbench.gateway.recording import Recording
from workbench.gateway.refusals import CONTEXT_LENGTH_EXCEEDED, Refused, from_worker, stopping
from workbench.gateway.sse import Frame, frames
from workbench.gateway.upstream import Upstream
from workbench.wire import Cause
from workbench.wire.headers import CAPTURED_HEADER

log = logging.getLogger(__name__)


@dataclass
class Exchange:
    """Runs one call; `head()` and then `stream()` give the agent's side of it, to any number of its requests."""

    call: Call
    body: bytes
    streamed: bool
    upstream: Upstream
    custodian: Custodian
    recording: Recording
    metrics: Metrics
    timeout_s: float
    _head: asyncio.Future[Head] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failed: bool = False
    """There is no answer to keep: the agent was, or is about to be, told of an error."""
    _frames: list[bytes] = field(default_factory=list)
    _whole: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _content_left: bool = False

    @property
    def call_id(self) -> str:
        return self.call.model_call_id

    async def head(self) -> Head:
        # Shielded: the agent's request may be cancelled, the call goes on.
        return await asyncio.shield(self._head)

    async def stream(self) -> AsyncIterator[bytes]:
        """The frames from the first one on, as they come."""
        given = 0
        while True:
            for raw in self._frames[given:]:
                given += 1
                yield raw
            if given == len(self._frames):
                if self._whole:
                    return
                await self._news.wait()

    async def run(self) -> None:
        """Never raises; whatever goes wrong is a row, a count and an answer to the agent."""
        began = time.monotonic()
        self.metrics.live.inc()
        try:
            await self._deadlined()
        except Refused as refused:
            self._refuse(refused)
        except (LedgerError, OSError) as error:
            self._refuse(Refused(500, f"The ledger could not be written: {error}", "ledger_error"))
        except asyncio.CancelledError:
            # Another gateway may go on with this rollout: without a row it would look whole there.
            with contextlib.suppress(LedgerError, OSError):
                await self._broken(stopping())
            self._refuse(stopping())
            raise
        finally:
            self._refuse(Refused(500, "The call ended without an answer.", "gateway_error"))
            self._end()
            self.metrics.live.dec()
            self.metrics.duration_s.observe(time.monotonic() - began)

    async def _deadlined(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._forward()
        except aiohttp.ClientError as error:  # first: some of them are a TimeoutError or an OSError as well
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise await self._broken(
                Refused(502, f"The policy worker did not answer ({what}).", "worker_unreachable")
            ) from error
        except TimeoutError:
            raise await self._broken(
                Refused(504, f"The policy worker did not finish within {self.timeout_s:g} s.", "worker_timeout")
            ) from None
        except Refused:
            raise
        except (LedgerError, OSError):
            # Perhaps it was the replay log and not the ledger; then the ledger can still say that this call is missing.
            with contextlib.suppress(LedgerError, OSError):
                await self._broken(Refused(500, "The ledger could not be written.", "ledger_error"))
            raise
        except Exception as error:
            # A fault of our own must not leave a call without a row: its rollout would look whole.
            log.exception("call %s/%s failed in the gateway", self.call.rollout_id, self.call.model_call_id)
            raise await self._broken(
                Refused(500, f"The gateway failed ({type(error).__name__}).", "gateway_fault")
            ) from error

    async def _forward(self) -> None:
        answer = await self.upstream.send(
            "POST",
            self.call.dialect.path,
            self.body,
            rollout_id=self.call.rollout_id,
            admission=self.call.admitted.admission,
        )
        try:
            if answer.status != 200:
                raise await self._broken(from_worker(answer.status, await answer.read()))
            if self.streamed and answer.headers.get("content-type", "").startswith(SSE):
                await self._relay_stream(answer)
            else:
                await self._relay_whole(answer)
        finally:
            answer.close()

    async def _relay_whole(self, answer: aiohttp.ClientResponse) -> None:
        body = await answer.read()
        try:
            served = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise await self._broken(
                Refused(502, f"The policy worker's answer is no JSON ({error}).", "worker_error")
            ) from None
        await self.recording.answered(self.call, JSON, body)
        await self.custodian.settle(
            self.call, served if isinstance(served, dict) else {}, answer.headers.get(CAPTURED_HEADER)
        )
        self._head.set_result(Head(200, JSON, body))

    async def _relay_stream(self, answer: aiohttp.ClientResponse) -> None:
        dialect, assembler = self.call.dialect, self.call.dialect.assembler()
        held: list[Frame] = []
        came: list[bytes] = []
        async for frame in frames(answer.content.iter_any()):
            if dialect.is_error(frame):
                # The engine may find only now that a prompt fills its window to the last token.
                error = from_worker(400, orjson.dumps(frame.event))
                full = error.code == CONTEXT_LENGTH_EXCEEDED and not self._content_left
                raise await self._broken(error if full else Refused(502, error.message, "worker_error"))
            assembler.feed(frame)
            came.append(frame.raw)
            if held or dialect.is_final(frame):
                held.append(frame)
            else:
                if not self._content_left:
                    await self.recording.content_left()
                self._release(frame.raw)
        if not held:
            raise await self._broken(
                Refused(502, "The policy worker's stream ended before its response did.", "worker_stream_cut")
            )
        await self.recording.answered(self.call, SSE, b"".join(came))
        await self.custodian.settle(self.call, assembler.served())
        for frame in held:
            self._release(frame.raw)
        self._end()

    def _release(self, raw: bytes) -> None:
        if not self._head.done():
            self._head.set_result(Head(200, SSE, None))
        self._content_left = True
        self._add(raw)

    def _add(self, raw: bytes) -> None:
        self._frames.append(raw)
        self._tell()

    def _end(self) -> None:
        self._whole = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _broken(self, refused: Refused) -> Refused:
        """Record that there is no completion, and return what the agent is told."""
        reason = (
            Cause.WORKER_CAPTURE_FAILED if self._content_left else Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        )
        await self.custodian.fail(self.call, reason, f"HTTP {refused.status} {refused.code}")
        return refused

    def _refuse(self, refused: Refused) -> None:
        if not self._head.done():
            self.failed = True
            self.metrics.refused.labels(refused.code).inc()
            body = orjson.dumps(self.call.dialect.refusal(refused))
            self._head.set_result(Head(refused.status, JSON, body))
        elif self._head.result().body is None and not self._whole:
            self.failed = True
            # The status line is gone; a stream says in its last frame that it did not end well.
            self._add(self.call.dialect.error_frame(refused))
            self._end()
