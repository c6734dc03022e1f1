"""Exchange: one tagged call, from its admission to its last byte.

    worker ──▶ frames ──▶ [ the final frame waits ] ──▶ custody row durable ──▶ agent
An exchange runs as its own task: an agent that leaves in the middle ends nothing, the call is finished and recorded all
the same (as a branch that nobody continued). Its life is bounded by the request deadline.
Invariant: the agent sees the end of a response only after the call's row is in the ledger. A stream that breaks after
content left is never called a request without a completion.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import orjson

from workbench.errors import LedgerError
from workbench.gateway.custody import Call, Custodian
from workbench.gateway.metrics import Metrics
from workbench.gateway.refusals import Refused, from_worker
from workbench.gateway.sse import Frame, frames
from workbench.gateway.upstream import Upstream
from workbench.wire import Cause

_END = None

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """How the answer begins. `body` is the whole of it; None: it is a stream, read from the exchange."""

    status: int
    media_type: str
    body: bytes | None


@dataclass
class Exchange:
    """Runs one call; `head()` and then `stream()` give the agent's side of it."""

    call: Call
    body: bytes
    streamed: bool
    upstream: Upstream
    custodian: Custodian
    metrics: Metrics
    timeout_s: float
    _head: asyncio.Future[Head] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _frames: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    _content_left: bool = False

    async def head(self) -> Head:
        # Shielded: the agent's request may be cancelled, the call goes on.
        return await asyncio.shield(self._head)

    async def stream(self) -> AsyncIterator[bytes]:
        while (raw := await self._frames.get()) is not _END:
            yield raw

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
            self._refuse(Refused(503, "The gateway is stopping.", "gateway_stopping"))
            raise
        finally:
            self._refuse(Refused(500, "The call ended without an answer.", "gateway_error"))
            self._frames.put_nowait(_END)
            self.metrics.live.dec()
            self.metrics.duration_s.observe(time.monotonic() - began)

    async def _deadlined(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._forward()
        except TimeoutError:
            raise await self._broken(
                Refused(504, f"The policy worker did not finish within {self.timeout_s:g} s.", "worker_timeout")
            ) from None
        except httpx.HTTPError as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise await self._broken(
                Refused(502, f"The policy worker did not answer ({what}).", "worker_unreachable")
            ) from error
        except (Refused, LedgerError, OSError):
            raise
        except Exception as error:
            # A fault of our own must not leave a call without a row: its rollout would look whole.
            log.exception("call %s/%s failed in the gateway", self.call.rollout_id, self.call.model_call_id)
            raise await self._broken(
                Refused(500, f"The gateway failed ({type(error).__name__}).", "gateway_fault")
            ) from error

    async def _forward(self) -> None:
        answer = await self.upstream.send(
            "POST", self.call.dialect.path, self.body, admission=self.call.admitted.admission
        )
        try:
            if answer.status_code != 200:
                raise await self._broken(from_worker(answer.status_code, await answer.aread()))
            if self.streamed and answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._relay_stream(answer)
            else:
                await self._relay_whole(answer)
        finally:
            await answer.aclose()

    async def _relay_whole(self, answer: httpx.Response) -> None:
        body = await answer.aread()
        try:
            served = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise await self._broken(
                Refused(502, f"The policy worker's answer is no JSON ({error}).", "worker_error")
            ) from None
        await self._settle(served if isinstance(served, dict) else {})
        self._head.set_result(Head(200, "application/json", body))

    async def _relay_stream(self, answer: httpx.Response) -> None:
        dialect, assembler = self.call.dialect, self.call.dialect.assembler()
        held: list[Frame] = []
        async for frame in frames(answer.aiter_raw()):
            if dialect.is_error(frame):
                error = from_worker(500, orjson.dumps(frame.event))
                raise await self._broken(Refused(502, error.message, "worker_error"))
            assembler.feed(frame)
            if held or dialect.is_final(frame):
                held.append(frame)
            else:
                self._release(frame.raw)
        if not held:
            raise await self._broken(
                Refused(502, "The policy worker's stream ended before its response did.", "worker_stream_cut")
            )
        await self._settle(assembler.served())
        for frame in held:
            self._release(frame.raw)

    def _release(self, raw: bytes) -> None:
        if not self._head.done():
            self._head.set_result(Head(200, "text/event-stream", None))
        self._content_left = True
        self._frames.put_nowait(raw)

    async def _settle(self, served: dict) -> None:
        await self.custodian.settle(self.call, served)

    async def _broken(self, refused: Refused) -> Refused:
        """Record that there is no completion, and return what the agent is told."""
        reason = (
            Cause.WORKER_CAPTURE_FAILED if self._content_left else Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        )
        await self.custodian.fail(self.call, reason, f"HTTP {refused.status} {refused.code}")
        return refused

    def _refuse(self, refused: Refused) -> None:
        if not self._head.done():
            self.metrics.refused.labels(refused.code).inc()
            body = orjson.dumps(self.call.dialect.refusal(refused))
            self._head.set_result(Head(refused.status, "application/json", body))
        elif self._head.result().body is None and refused.code != "gateway_error":
            # The status line is gone; a stream says in its last frame that it did not end well.
            self._frames.put_nowait(self.call.dialect.error_frame(refused))
