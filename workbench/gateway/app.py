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
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workbench.errors import WorkbenchError
from workbench.gateway.asked import Asked
from workbench.gateway.control import ControlPlane, read_body
from workbench.gateway.custody import Custodian
from workbench.gateway.delivery import Passed, Streamed, whole
from workbench.gateway.dialects import DIALECTS
from workbench.gateway.exchange import Exchange
from workbench.gateway.metrics import Metrics
from workbench.gateway.pins import Pinned, pin
from workbench.gateway.recording import Recording
from workbench.gateway.refusals import CONTEXT_LENGTH_EXCEEDED, Refused, from_worker, refusal_of, stopping
from workbench.gateway.refused_log import RefusedLog
from workbench.gateway.retries import Retries
from workbench.gateway.settings import GatewaySettings
from workbench.gateway.upstream import Upstream
from workbench.ledger import LedgerStore
from workbench.wire import check_rollout_id

log = logging.getLogger(__name__)

OWN_HEADERS = "x-workbench-"
COMPACTION_HEADER = "x-workbench-compaction"
SAMPLES_NOTHING = ("/v1/messages/count_tokens",)
STOP_GRACE_S = 3.0
# No segment begins with a dot, and nothing in it means anything to a URL: what passes through stays below the worker's
# /v1, and never reaches the routes that are for its gateway alone.
_UNTAGGED_PATH = re.compile(r"[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*(/[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*)*/?")


@dataclass
class Gateway:
    """What the routes share. `app()` gives the ASGI application; `end_calls` and `close` wait for live calls for a
    short while."""

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
        self.retries = Retries(self.custodian, self.metrics, self._spawn, timeout_s=self.settings.request_timeout_s)
        self.refused = RefusedLog(self.settings.refused_path, self.metrics)
        self._live: set[asyncio.Task[None]] = set()
        self._stopping = False

    def app(self) -> Starlette:
        tagged = "/ng-rollout/{rollout_id}"
        control = ControlPlane(
            self.custodian,
            self.control_token,
            self.settings,
            self.refused,
            before_freeze=self.retries.bury,
            after_seal=self.retries.forget,
        )
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *control.routes(),
                Route(tagged + "/v1/models", self._refusing(self._tagged_models), methods=["GET"]),
                Route(tagged + "{path:path}", self._refusing(self._tagged), methods=["POST"]),
                Route("/v1/{path:path}", self._refusing(self._untagged), methods=["GET", "POST"]),
            ],
            exception_handlers={HTTPException: self._no_such_route},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep(), name="sweep answers")
        yield
        sweeping.cancel()
        await self.close()

    async def _sweep(self) -> None:
        keep_s = self.settings.answers_keep_s
        while True:
            await asyncio.sleep(keep_s / 10)
            try:
                await self.custodian.off_loop(self.retries.sweep, keep_s)
            except (WorkbenchError, OSError):
                # What could not be removed now is found again the next time.
                log.exception("old answers could not be removed")

    async def end_calls(self) -> None:
        """Begin no more calls, let those under way end for a short while, and give up the rest: each leaves a row, and
        its agent is told that the gateway is stopping."""
        self._stopping = True
        if self._live:
            _, late = await asyncio.wait(self._live, timeout=STOP_GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        await self.end_calls()
        self.refused.tell_counted()
        self.retries.close()
        await self.upstream.close()
        self.custodian.close()

    def _refusing(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Turn what a handler raises into an answer, and keep our own headers to ourselves."""

        async def endpoint(request: Request) -> Response:
            try:
                if self._stopping:
                    raise stopping()
                for name in request.headers:
                    if name.startswith(OWN_HEADERS) and name != COMPACTION_HEADER:
                        raise Refused(400, f"Header {name} is the gateway's own; leave it out.", "reserved_header")
                return await handle(request)
            except Exception as error:
                answer = refusal_of(error)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                # The server gives up what still runs; without an answer of ours it would send a bare 500.
                answer = stopping()
            self.refused.note(answer, request)
            path = request.path_params.get("path", "")
            dialect = DIALECTS.get(path) or DIALECTS.get(f"/v1/{path}")
            return answer.response(None if dialect is None else dialect.refusal(answer))

        return endpoint

    async def _tagged(self, request: Request) -> Response:
        rollout_id = check_rollout_id(request.path_params["rollout_id"])
        path = request.path_params["path"]
        if path in SAMPLES_NOTHING:
            return await self._pass("POST", path, await read_body(request, self.settings), rollout_id=rollout_id)
        dialect = DIALECTS.get(path)
        if dialect is None:
            known = ", ".join(DIALECTS)
            raise Refused(404, f"No captured route {path}; there are: {known}.", "unknown_route")
        raw = await read_body(request, self.settings)
        if not self.settings.capture_enabled:
            return await self._pass("POST", dialect.path, raw, rollout_id=rollout_id)
        body = _json_object(raw)
        dialect.check(body)
        if len(request.headers.getlist(COMPACTION_HEADER)) > 1:
            raise Refused(400, f"Header {COMPACTION_HEADER} came more than once; expected one.", "key_ambiguous")
        after, stored_input = dialect.named_response(body), dialect.stored_input(body)
        if after is not None:
            history = await self.custodian.off_loop(self.custodian.histories.items, rollout_id, after)
            if history is None:
                await self.custodian.off_loop(self.custodian.store.check_open, rollout_id)
            body = dialect.with_history(body, history)
        pinned = pin(body, self.settings.sampling, dialect.max_tokens_field)
        asked = Asked.of(
            rollout_id,
            dialect,
            body,
            request.headers,
            request.headers.get(COMPACTION_HEADER),
            after=after,
            stored_input=stored_input,
        )
        served = await self.retries.serve(asked, partial(self._begin, asked, pinned))
        head, delivered = await served.head(), partial(self.retries.delivered, rollout_id, served.call_id)
        if head.body is None and isinstance(served, Exchange):
            return Streamed(served.stream(), head, delivered)
        return await whole(request, head, delivered)

    async def _begin(self, asked: Asked, pinned: Pinned, call_id: str, recording: Recording) -> Exchange:
        """Admit a new call."""
        for name in pinned.stripped:
            self.metrics.stripped.labels(name).inc()
        for name in (*pinned.overridden, *asked.dialect.adapt(pinned.body)):
            self.metrics.overridden.labels(name).inc()
        for name, came in pinned.came.items():
            self.refused.changed(asked.rollout_id, name, came, pinned.body.get(name))
        call = await self.custodian.admit(
            asked.rollout_id,
            call_id,
            asked.dialect,
            asked.items,
            asked.options,
            asked.replaces,
            after=asked.after,
            stored_input=asked.stored_input,
        )
        return Exchange(
            call=call,
            body=orjson.dumps(pinned.body),
            streamed=bool(pinned.body.get("stream")),
            upstream=self.upstream,
            custodian=self.custodian,
            recording=recording,
            metrics=self.metrics,
            timeout_s=self.settings.request_timeout_s,
        )

    def _spawn(self, run: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(run, name=name)
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        return task

    async def _tagged_models(self, request: Request) -> Response:
        rollout_id = check_rollout_id(request.path_params["rollout_id"])
        return await self._pass("GET", "/v1/models", None, request.url.query, rollout_id=rollout_id)

    async def _untagged(self, request: Request) -> Response:
        if not _UNTAGGED_PATH.fullmatch(request.path_params["path"]):
            raise Refused(
                404, "No such route below /v1; names there are letters, digits and . _ ~ : @ -", "unknown_route"
            )
        raw = await read_body(request, self.settings) if request.method == "POST" else None
        return await self._pass(request.method, f"/v1/{request.path_params['path']}", raw, request.url.query)

    async def _pass(
        self, method: str, path: str, body: bytes | None, query: str = "", *, rollout_id: str | None = None
    ) -> Response:
        timeout_s = self.settings.request_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self.upstream.send(method, path, body, rollout_id=rollout_id, query=query)
        except aiohttp.ClientError:  # first: some of them are a TimeoutError as well
            raise
        except TimeoutError:
            raise Refused(504, f"The policy worker did not answer within {timeout_s:g} s.", "worker_timeout") from None
        if answer.status != 400:
            return Passed(answer, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                said = await answer.read()
        finally:
            answer.close()
        if (refused := from_worker(400, said)).code == CONTEXT_LENGTH_EXCEEDED:
            raise refused  # the one refusal that agents go on from has its code on every route
        return Response(said, 400, media_type=answer.headers.get("content-type"))

    async def _no_such_route(self, request: Request, error: Exception) -> Response:
        answer = refusal_of(error)
        self.refused.note(answer, request)
        return answer.response()

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
