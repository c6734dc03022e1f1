"""App: the gateway's routes.

    /ng-rollout/{rollout_id}/v1/<dialect>   tagged: admitted, captured, recorded (exchange)
    /ng-rollout/{rollout_id}/v1/models      the worker's list
    /v1/…                                   untagged: passed through, nothing recorded
    /training-token-capture/control/…       control plane (control)
    /health, /metrics
Not here: what happens to a call once it is admitted, sockets and processes (process).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import orjson
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from workbench.errors import FingerprintError, LedgerCorrupt, RolloutFrozen, WireError
from workbench.gateway.control import ControlPlane, read_body
from workbench.gateway.custody import Custodian
from workbench.gateway.dialects import DIALECTS
from workbench.gateway.exchange import Exchange
from workbench.gateway.metrics import Metrics
from workbench.gateway.pins import pin
from workbench.gateway.refusals import Refused
from workbench.gateway.settings import GatewaySettings
from workbench.gateway.upstream import Upstream
from workbench.ledger import LedgerStore
from workbench.wire import check_rollout_id

OWN_HEADERS = "x-workbench-"
COMPACTION_HEADER = "x-workbench-compaction"
SAMPLES_NOTHING = ("/v1/messages/count_tokens",)
STOP_GRACE_S = 3.0


@dataclass
class Gateway:
    """What the routes share. `app()` gives the ASGI application; `close` waits for live calls for a short while."""

    settings: GatewaySettings
    control_token: str
    worker_token: str | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.upstream = Upstream(self.settings.worker_url, self.worker_token)
        self.custodian = Custodian(
            LedgerStore(self.settings.ledger_dir),
            self.upstream,
            self.metrics,
            coords_timeout_s=self.settings.coords_timeout_s,
        )
        self._live: set[asyncio.Task[None]] = set()

    def app(self) -> Starlette:
        tagged = "/ng-rollout/{rollout_id}"
        control = ControlPlane(self.custodian, self.control_token, self.settings.max_body_bytes)
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *control.routes(),
                Route(tagged + "/v1/models", self._refusing(self._tagged_models), methods=["GET"]),
                Route(tagged + "{path:path}", self._refusing(self._tagged), methods=["POST"]),
                Route("/v1/{path:path}", self._refusing(self._untagged), methods=["GET", "POST"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self.close()

    async def close(self) -> None:
        if self._live:
            _, late = await asyncio.wait(self._live, timeout=STOP_GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.upstream.close()
        self.custodian.close()

    def _refusing(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Turn what a handler raises into an answer, and keep our own headers to ourselves."""

        async def endpoint(request: Request) -> Response:
            try:
                for name in request.headers:
                    if name.startswith(OWN_HEADERS) and name != COMPACTION_HEADER:
                        raise Refused(400, f"Header {name} is the gateway's own; leave it out.", "reserved_header")
                return await handle(request)
            except Refused as refused:
                answer = refused
            except RolloutFrozen as error:
                answer = Refused(409, str(error), "rollout_frozen")
            except (FingerprintError, WireError) as error:
                answer = Refused(400, str(error))
            except LedgerCorrupt as error:
                answer = Refused(500, str(error), "ledger_corrupt")
            except httpx.HTTPError as error:
                answer = Refused(
                    502, f"The policy worker did not answer ({type(error).__name__}).", "worker_unreachable"
                )
            self.metrics.refused.labels(answer.code).inc()
            dialect = DIALECTS.get(request.path_params.get("path", ""))
            return answer.response(None if dialect is None else dialect.refusal(answer))

        return endpoint

    async def _tagged(self, request: Request) -> Response:
        rollout_id = check_rollout_id(request.path_params["rollout_id"])
        path = request.path_params["path"]
        if path in SAMPLES_NOTHING:
            return await self._pass("POST", path, await read_body(request, self.settings.max_body_bytes), "")
        dialect = DIALECTS.get(path)
        if dialect is None:
            known = ", ".join(DIALECTS)
            raise Refused(404, f"No captured route {path}; there are: {known}.", "unknown_route")
        raw = await read_body(request, self.settings.max_body_bytes)
        if not self.settings.capture_enabled:
            return await self._pass("POST", dialect.path, raw, "")
        body = _json_object(raw)
        after, stored_input = dialect.named_response(body), dialect.stored_input(body)
        if after is not None:
            history = await self.custodian.off_loop(self.custodian.histories.items, rollout_id, after)
            body = dialect.with_history(body, history)
        items, options = dialect.request_items(body), dialect.prompt_options(body)
        pinned = pin(body, self.settings.sampling, dialect.max_tokens_field)
        for name in pinned.stripped:
            self.metrics.stripped.labels(name).inc()
        for name in (*pinned.overridden, *dialect.adapt(pinned.body)):
            self.metrics.overridden.labels(name).inc()
        replaces = request.headers.get(COMPACTION_HEADER)
        call = await self.custodian.admit(
            rollout_id, uuid4().hex, dialect, items, options, replaces, after=after, stored_input=stored_input
        )
        exchange = Exchange(
            call=call,
            body=orjson.dumps(pinned.body),
            streamed=bool(body.get("stream")),
            upstream=self.upstream,
            custodian=self.custodian,
            metrics=self.metrics,
            timeout_s=self.settings.request_timeout_s,
        )
        task = asyncio.create_task(exchange.run(), name=f"call {call.model_call_id}")
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        head = await exchange.head()
        if head.body is None:
            return StreamingResponse(exchange.stream(), head.status, media_type=head.media_type)
        return Response(head.body, head.status, media_type=head.media_type)

    async def _tagged_models(self, request: Request) -> Response:
        check_rollout_id(request.path_params["rollout_id"])
        return await self._pass("GET", "/v1/models", None, request.url.query)

    async def _untagged(self, request: Request) -> Response:
        raw = await read_body(request, self.settings.max_body_bytes) if request.method == "POST" else None
        return await self._pass(request.method, f"/v1/{request.path_params['path']}", raw, request.url.query)

    async def _pass(self, method: str, path: str, body: bytes | None, query: str) -> Response:
        answer = await self.upstream.send(method, path, body, query=query)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            media_type=answer.headers.get("content-type"),
            background=BackgroundTask(answer.aclose),
        )

    async def _health(self, request: Request) -> Response:
        return Response(orjson.dumps({"status": "ok", "live_calls": len(self._live)}), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The request body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"The request body must be a JSON object, got {type(body).__name__}.")
    return body
