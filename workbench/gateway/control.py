"""Control plane: close a rollout and read what it consists of. Bearer token, compared in constant time.

    GET  …/rollouts/{id}/manifest
    POST …/rollouts/{id}/freeze   {terminal_response_id?, response?}                → manifest and attribution
    POST …/rollouts/{id}/seal     {reward, terminal_response_id?, response?, …}     → freeze, and the receipt
Invariant: a wrong or missing token learns nothing, not even whether a rollout exists.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workbench.errors import LedgerCorrupt, WireError
from workbench.gateway.custody import Custodian
from workbench.gateway.refusals import Refused
from workbench.ledger import assemble_receipt, attribute_terminal
from workbench.wire import RolloutManifest

PREFIX = "/training-token-capture/control/rollouts/{rollout_id}"
_FREEZE_FIELDS = {"terminal_response_id", "response"}
_SEAL_FIELDS = _FREEZE_FIELDS | {"reward", "failure_reason", "on_no_witness"}

BeforeFreeze = Callable[[str], Awaitable[None]]
Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlPlane:
    """The control routes of one gateway. `max_body_bytes` bounds a request's body; `before_freeze` is awaited with the
    rollout id, so that calls that died with a gateway have their rows."""

    def __init__(self, custodian: Custodian, token: str, max_body_bytes: int, before_freeze: BeforeFreeze) -> None:
        self._custodian = custodian
        self._expected = b"Bearer " + token.encode()
        self._max_body_bytes = max_body_bytes
        self._before_freeze = before_freeze

    def routes(self) -> list[Route]:
        return [
            Route(f"{PREFIX}/manifest", self._endpoint(self._manifest, set()), methods=["GET"]),
            Route(f"{PREFIX}/freeze", self._endpoint(self._freeze, _FREEZE_FIELDS), methods=["POST"]),
            Route(f"{PREFIX}/seal", self._endpoint(self._seal, _SEAL_FIELDS), methods=["POST"]),
        ]

    def _endpoint(self, handle: Handler, fields: set[str]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._expected):
                    raise Refused(401, "The control plane expects its bearer token.", "unauthorized")
                given = orjson.loads(await read_body(request, self._max_body_bytes) or b"{}")
                if not isinstance(given, dict) or not given.keys() <= fields:
                    raise Refused(400, f"Expected a JSON object with no other fields than {sorted(fields)}.")
                answer = await handle(request.path_params["rollout_id"], given)
                return Response(orjson.dumps(answer), media_type="application/json")
            except Refused as refused:
                return refused.response()
            except orjson.JSONDecodeError as error:
                return Refused(400, f"The body is no JSON: {error}").response()
            except WireError as error:
                return Refused(400, str(error)).response()
            except LedgerCorrupt as error:
                return Refused(500, str(error), "ledger_corrupt").response()

        return endpoint

    async def _manifest(self, rollout_id: str, given: dict[str, Any]) -> dict[str, Any]:
        return _as_json(await self._custodian.off_loop(self._custodian.store.manifest, rollout_id))

    async def _close(self, rollout_id: str) -> RolloutManifest:
        await self._before_freeze(rollout_id)
        return await self._custodian.off_loop(self._custodian.store.freeze, rollout_id)

    async def _freeze(self, rollout_id: str, given: dict[str, Any]) -> dict[str, Any]:
        _check_witnesses(given)
        manifest = await self._close(rollout_id)
        attribution = await self._custodian.off_loop(
            attribute_terminal, manifest.records, given.get("response"), given.get("terminal_response_id")
        )
        return {"manifest": _as_json(manifest), "attribution": asdict(attribution)}

    async def _seal(self, rollout_id: str, given: dict[str, Any]) -> dict[str, Any]:
        _check_witnesses(given)
        reward, on_no_witness = given.get("reward"), given.get("on_no_witness", "mask")
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise Refused(400, f"`reward` must be a number, got {reward!r}.", param="reward")
        if on_no_witness not in ("mask", "heuristic"):
            raise Refused(400, "`on_no_witness` must be 'mask' or 'heuristic'.", param="on_no_witness")
        manifest = await self._close(rollout_id)
        receipt = await self._custodian.off_loop(
            assemble_receipt,
            manifest,
            rollout_id=rollout_id,
            reward=None if reward is None else float(reward),
            response=given.get("response"),
            declared_response_id=given.get("terminal_response_id"),
            failure_reason=given.get("failure_reason"),
            on_no_witness=on_no_witness,
        )
        sealed = receipt.model_dump(mode="json")
        await self._custodian.off_loop(self._custodian.store.event, rollout_id, "seal", receipt=sealed)
        return {"receipt": sealed, "manifest": _as_json(manifest)}


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. Raises `Refused` (413) as soon as it is longer than `most` bytes."""
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise Refused(413, f"The request body is over {most} bytes (gateway.max_body_bytes).", "body_too_large")
        parts.append(chunk)
    return b"".join(parts)


def _check_witnesses(given: dict[str, Any]) -> None:
    if not isinstance(given.get("response"), dict | None):
        raise Refused(400, "`response` must be the scored object, or null.", param="response")
    if not isinstance(given.get("terminal_response_id"), str | None):
        raise Refused(400, "`terminal_response_id` must be a string, or null.", param="terminal_response_id")
    if not isinstance(given.get("failure_reason"), str | None):
        raise Refused(400, "`failure_reason` must be a string, or null.", param="failure_reason")


def _as_json(manifest: RolloutManifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")
