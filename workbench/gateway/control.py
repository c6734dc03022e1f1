"""Control plane: close a rollout and read what it consists of. Bearer token, compared in constant time.

    GET  …/rollouts/{id}/manifest
    POST …/rollouts/{id}/freeze   {terminal_response_id?, response?}                → manifest and attribution
    POST …/rollouts/{id}/seal     {reward, terminal_response_id?, response?, …}     → freeze, and the receipt
The attribution of a response that no call gave comes with `nearest`: in words, what it nearly is.
Invariant: a wrong or missing token learns nothing, not even whether a rollout exists. Only this machine is answered,
unless the settings open the control plane.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workbench.gateway.custody import Custodian
from workbench.gateway.refusals import Refused, refusal_of
from workbench.gateway.refused_log import RefusedLog
from workbench.gateway.settings import GatewaySettings
from workbench.ledger import assemble_receipt, attribute_terminal
from workbench.wire import RolloutManifest, check_rollout_id

PREFIX = "/training-token-capture/control/rollouts/{rollout_id}"
_FREEZE_FIELDS = {"terminal_response_id", "response"}
_SEAL_FIELDS = _FREEZE_FIELDS | {"reward", "failure_reason", "on_no_witness"}

ForRollout = Callable[[str], Awaitable[None]]
Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlPlane:
    """The control routes of one gateway process. `before_freeze` is awaited with the rollout id, so that calls that
    died with a gateway have their rows; `after_seal` when its harness is done with it."""

    def __init__(
        self,
        custodian: Custodian,
        token: str,
        settings: GatewaySettings,
        refused: RefusedLog,
        *,
        before_freeze: ForRollout,
        after_seal: ForRollout,
    ) -> None:
        self._custodian = custodian
        self._expected = b"Bearer " + token.encode()
        self._settings = settings
        self._refused = refused
        self._before_freeze = before_freeze
        self._after_seal = after_seal

    def routes(self) -> list[Route]:
        return [
            Route(f"{PREFIX}/manifest", self._endpoint(self._manifest, set()), methods=["GET"]),
            Route(f"{PREFIX}/freeze", self._endpoint(self._freeze, _FREEZE_FIELDS), methods=["POST"]),
            Route(f"{PREFIX}/seal", self._endpoint(self._seal, _SEAL_FIELDS), methods=["POST"]),
        ]

    def _endpoint(self, handle: Handler, fields: set[str]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._check_who(request)
                try:
                    given = orjson.loads(await read_body(request, self._settings) or b"{}")
                except orjson.JSONDecodeError as error:
                    raise Refused(400, f"The body is no JSON: {error}") from None
                if not isinstance(given, dict) or not given.keys() <= fields:
                    raise Refused(400, f"Expected a JSON object with no other fields than {sorted(fields)}.")
                answer = await handle(check_rollout_id(request.path_params["rollout_id"]), given)
                return Response(orjson.dumps(answer), media_type="application/json")
            except Exception as error:
                refused = refusal_of(error)
                self._refused.note(refused, request)
                return refused.response()

        return endpoint

    def _check_who(self, request: Request) -> None:
        if not (self._settings.control_open or _from_this_machine(request)):
            raise Refused(
                403,
                "The control plane answers the gateway's own machine only. Next: gateway.control_open: true, if others "
                "have to reach it.",
                "not_local",
            )
        given = request.headers.getlist("authorization")
        # One comparison whatever came, and never one that ends at the first wrong byte.
        if not hmac.compare_digest("\n".join(given).encode(), self._expected):
            raise Refused(401, "The control plane expects its bearer token.", "unauthorized")

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
        answer: dict[str, Any] = {"manifest": _as_json(manifest), "attribution": asdict(attribution)}
        if attribution.terminal is None and "no_content_match" in attribution.reason:
            nearest = self._custodian.store.nearest_answer
            answer["nearest"] = await self._custodian.off_loop(nearest, rollout_id, given["response"])
        return answer

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
        await self._after_seal(rollout_id)
        return {"receipt": sealed, "manifest": _as_json(manifest)}


async def read_body(request: Request, settings: GatewaySettings) -> bytes:
    """The whole body. Raises `Refused` (413) as soon as it is known to be too long, (408) where it takes too long."""
    most, timeout_s = settings.max_body_bytes, settings.client_timeout_s
    too_large = Refused(413, f"The request body is over {most} bytes (gateway.max_body_bytes).", "body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise too_large
                parts.append(chunk)
    except TimeoutError:
        raise Refused(
            408, f"The request body did not come within {timeout_s:g} s (gateway.client_timeout_s).", "body_timeout"
        ) from None
    return b"".join(parts)


def _from_this_machine(request: Request) -> bool:
    """By the address that the connection comes from: loopback, or the one that it came to."""
    client, server = request.client, request.scope.get("server")
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or (server is not None and client.host == server[0])


def _check_witnesses(given: dict[str, Any]) -> None:
    if not isinstance(given.get("response"), dict | None):
        raise Refused(400, "`response` must be the scored object, or null.", param="response")
    if not isinstance(given.get("terminal_response_id"), str | None):
        raise Refused(400, "`terminal_response_id` must be a string, or null.", param="terminal_response_id")
    if not isinstance(given.get("failure_reason"), str | None):
        raise Refused(400, "`failure_reason` must be a string, or null.", param="failure_reason")


def _as_json(manifest: RolloutManifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")
