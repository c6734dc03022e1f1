"""Delivery: an answer on its way out, and whether it got there.

An answer is delivered when its last byte was sent to a client that had not left; one that nobody took may still be
asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

JSON = "application/json"
SSE = "text/event-stream"

Delivered = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Head:
    """How the answer begins. `body` is the whole of it; None: it is a stream, read from the exchange."""

    status: int
    media_type: str
    body: bytes | None


async def whole(request: Request, head: Head, delivered: Delivered) -> Response:
    """The response to `request` whose body is there; `delivered` is called where its client takes it."""
    here = head.status == 200 and not await request.is_disconnected()
    return Response(
        head.body, head.status, media_type=head.media_type, background=BackgroundTask(delivered) if here else None
    )


class Streamed(StreamingResponse):
    """A stream of frames; `delivered` is called once the last one was sent."""

    def __init__(self, frames: AsyncIterator[bytes], head: Head, delivered: Delivered) -> None:
        # In the background: the connection is the client's again by then, and it may close it.
        super().__init__(frames, head.status, media_type=head.media_type, background=BackgroundTask(self._tell))
        self._delivered = delivered
        self._whole = False

    async def stream_response(self, send: Send) -> None:
        # A client that leaves ends this in the middle (the server cancels it).
        await super().stream_response(send)
        self._whole = True

    async def _tell(self) -> None:
        if self._whole:
            await self._delivered()


class Passed(StreamingResponse):
    """A worker's answer as it comes, until `deadline` on the loop's clock; what is cut there, or by the worker, breaks
    the connection, so that nobody takes it for the whole."""

    def __init__(self, answer: aiohttp.ClientResponse, deadline: float) -> None:
        super().__init__(answer.content.iter_any(), answer.status, media_type=answer.headers.get("content-type"))
        self._answer = answer
        self._deadline = deadline

    async def stream_response(self, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await super().stream_response(send)
        finally:
            self._answer.close()
