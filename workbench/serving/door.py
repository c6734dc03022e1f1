"""Door: the worker's own HTTP surface in front of the serving app: a bearer token, its status, and health.

    gateway ── authorization: Bearer … ──▶ Door ──▶ [CaptureGate, where capture is on] ──▶ the serving app
Without capture a tagged request is refused here, never served untracked.
Not here: tagged requests and their coordinates (capture.transport).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from workbench.wire.headers import ADMISSION_HEADER, ROLLOUT_HEADER

WORKER_TOKEN_ENV = "WORKBENCH_WORKER_TOKEN"
OF_ITS_NODE = "node"
"""As a worker's host: the address under which the other nodes of the Ray cluster know the one it stands on."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """ASGI middleware around everything that a worker serves."""

    def __init__(self, app: App, *, token: str, status: Callable[[], dict[str, Any]], takes_tagged: bool) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()
        self._status = status
        self._takes_tagged = takes_tagged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
        elif not hmac.compare_digest(header_map(scope).get(b"authorization", b""), self._expected):
            await refuse(send, 401, "The worker answers its gateway only: expected a bearer token, the worker's own.")
        elif scope["path"] == "/workbench/status":
            await send_json(send, 200, self._status())
        elif is_tagged(scope) and not self._takes_tagged:
            await refuse(send, 400, "Token capture is off on this worker, so it takes no tagged requests.")
        else:
            await self._app(scope, receive, send)


def header_map(scope: Scope) -> dict[bytes, bytes]:
    """The request's headers by lower-case name; of several with one name the last."""
    return {name.lower(): value for name, value in scope["headers"]}


def is_tagged(scope: Scope) -> bool:
    """Whether the request says that it belongs to a rollout."""
    names = header_map(scope)
    return ROLLOUT_HEADER.encode() in names or ADMISSION_HEADER.encode() in names


async def refuse(send: Send, status: int, message: str) -> None:
    """Answer with an error in the API's form."""
    await send_json(send, status, {"error": {"message": message, "type": "workbench_error", "code": status}})


async def send_json(send: Send, status: int, payload: dict[str, Any]) -> None:
    """Answer with one JSON body."""
    body = orjson.dumps(payload)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
