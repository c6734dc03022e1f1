"""A gate between gateway and worker: it lets everything through, and holds what a test tells it to hold."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from workbench.gateway.sse import split

REQUEST, COMPLETION, FRAMES, ACKNOWLEDGEMENT = "request", "completion", "frames", "acknowledgement"


class Gate:
    """Places to hold at: a request on its way in, its whole completion on its way out (the call is staged by then), its
    frames after the second one, the acknowledgement. `reached` counts who came to each."""

    def __init__(self, worker_url: str) -> None:
        self._worker = worker_url
        self._open: defaultdict[str, asyncio.Event] = defaultdict(self._opened)
        self.reached: Counter[str] = Counter()
        self.http = httpx.AsyncClient(timeout=60.0)
        self.app = Starlette(routes=[Route("/{path:path}", self._pass, methods=["GET", "POST"])])

    def hold(self, place: str) -> None:
        self._open[place].clear()

    def release(self) -> None:
        for event in self._open.values():
            event.set()

    async def _pass(self, request: Request) -> Response:
        capture = request.url.path.startswith("/workbench/capture")
        await self._at(ACKNOWLEDGEMENT if capture else REQUEST)
        answer = await self.http.request(
            request.method, self._worker + request.url.path, content=await request.body(), headers=request.headers.raw
        )
        if not capture:
            await self._at(COMPLETION)
        media_type = answer.headers.get("content-type", "")
        if media_type.startswith("text/event-stream"):
            return StreamingResponse(self._frames(answer.content), media_type=media_type)
        return Response(answer.content, answer.status_code, media_type=media_type)

    async def _frames(self, stream: bytes) -> AsyncIterator[bytes]:
        for number, frame in enumerate(split(stream)):
            if number == 2:
                await self._at(FRAMES)
            yield frame.raw

    async def _at(self, place: str) -> None:
        self.reached[place] += 1
        await self._open[place].wait()

    @staticmethod
    def _opened() -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event
