"""Client: the control plane of a gateway, for the controller. Every call has a hard deadline.

A gateway that is gone is `ComponentDied`, one that is too slow `DeadlineExceeded`, one that says no `GatewayError`; a
ledger file that cannot be read is `LedgerCorrupt`, so that the rollout can be put aside and the campaign go on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from workbench.errors import ComponentDied, DeadlineExceeded, GatewayError, LedgerCorrupt
from workbench.wire import RolloutManifest, RolloutReceipt, check_rollout_id


class ControlClient:
    """Control calls to the gateway at `url`. `timeout_s` bounds each of them, connecting included."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        # Reading every certificate authority takes 50 ms, in which a loop does nothing else; without TLS nobody asks.
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
            verify=self.url.startswith("https:"),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def manifest(self, rollout_id: str) -> RolloutManifest:
        """What the ledger holds of a rollout now."""
        return RolloutManifest.model_validate(await self._call("GET", rollout_id, "manifest"))

    async def freeze(
        self, rollout_id: str, response: Mapping[str, Any] | None = None, terminal_response_id: str | None = None
    ) -> dict[str, Any]:
        """Close a rollout: `{"manifest": …, "attribution": {"terminal", "method", "reason"}}`, both as JSON; for a
        response that no call gave also `nearest`, a sentence or null."""
        return await self._call(
            "POST", rollout_id, "freeze", {"response": response, "terminal_response_id": terminal_response_id}
        )

    async def seal(
        self,
        rollout_id: str,
        reward: float | None,
        response: Mapping[str, Any] | None = None,
        terminal_response_id: str | None = None,
        failure_reason: str | None = None,
        on_no_witness: str = "mask",
    ) -> RolloutReceipt:
        """Close a rollout and assemble its receipt there, for harnesses without this package's ledger."""
        if reward is not None and not math.isfinite(reward):  # in JSON it would be null, a reward that nobody gave
            raise GatewayError(f"The reward of rollout {rollout_id} must be a finite number, got {reward}.")
        answer = await self._call(
            "POST",
            rollout_id,
            "seal",
            {
                "reward": reward,
                "response": response,
                "terminal_response_id": terminal_response_id,
                "failure_reason": failure_reason,
                "on_no_witness": on_no_witness,
            },
        )
        return RolloutReceipt.model_validate(answer["receipt"])

    async def _call(
        self, method: str, rollout_id: str, action: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        path = f"/training-token-capture/control/rollouts/{check_rollout_id(rollout_id)}/{action}"
        what = f"{action} of rollout {rollout_id} at the gateway {self.url}"
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._client.request(
                    method, self.url + path, content=None if body is None else orjson.dumps(body)
                )
        except (TimeoutError, httpx.TimeoutException):
            raise DeadlineExceeded(f"No answer within {self.timeout_s:g} s: {what}.") from None
        except httpx.TransportError as error:
            raise ComponentDied(f"The gateway is gone ({type(error).__name__}): {what}.") from None
        try:
            told = orjson.loads(answer.content)
        except orjson.JSONDecodeError:
            told = None
        if answer.status_code == 200 and isinstance(told, dict):
            return told
        try:
            message, code = told["error"]["message"], told["error"].get("code")
        except (KeyError, TypeError):  # something else answers there
            message, code = answer.text[:300], None
        if code == "ledger_corrupt":
            raise LedgerCorrupt(message)
        raise GatewayError(f"The gateway answered {answer.status_code} ({message}): {what}.")
