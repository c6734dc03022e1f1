"""Upstream: the one policy worker behind a gateway, over HTTP.

    send      a request as the worker expects it: its bearer token, and for captured calls the admission
    coords    the token-free acknowledgement of one call, waited for with a deadline

No header of an agent is forwarded. Not here: what the answers mean for custody (exchange).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from workbench.wire import CaptureAdmission

ADMISSION_HEADER = "x-workbench-admission"
ROLLOUT_HEADER = "x-workbench-rollout"


@dataclass(frozen=True)
class Acknowledgement:
    """The worker's answer about one call: `coords` as they came (None: it knows nothing of the call, and `missing` says
    how), `failure` the typed cause of a failed capture, `staged_s` how long the staging took."""

    coords: Any
    failure: dict[str, Any] | None = None
    missing: str = ""
    staged_s: float | None = None


class Upstream:
    """HTTP client of the worker. One a process; `close` it."""

    def __init__(self, url: str, token: str | None, *, connect_timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        # The life of a call is bounded by the exchange; a read deadline here would cut long generations instead.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        admission: CaptureAdmission | None = None,
        query: str = "",
    ) -> httpx.Response:
        """Start a request; the answer's body is still to be read, and the answer to be closed."""
        headers = dict(self._headers)
        if admission is not None:
            headers[ADMISSION_HEADER] = admission.to_header()
            headers[ROLLOUT_HEADER] = admission.rollout_id
            # The engine's request and the served object carry our call id, never an id that an agent chose.
            headers["x-request-id"] = admission.model_call_id
        url = self.url + path + (f"?{query}" if query else "")
        request = self._client.build_request(method, url, headers=headers, content=body)
        return await self._client.send(request, stream=True)

    async def acknowledgement(self, model_call_id: str, timeout_s: float) -> Acknowledgement:
        """Ask for the coordinates of a call until the worker answers or the deadline is over. Never raises."""
        why = "no answer"
        pause_s = 0.05
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self._client.get(
                            f"{self.url}/workbench/capture/{model_call_id}", headers=self._headers
                        )
                        if answer.status_code == 200:
                            payload = orjson.loads(answer.content)
                            staged_s = payload.get("staged_s")
                            return Acknowledgement(
                                payload.get("coords"),
                                payload.get("failure"),
                                staged_s=staged_s if isinstance(staged_s, float) else None,
                            )
                        why = f"the worker answered {answer.status_code}"
                        if answer.status_code < 500:
                            return Acknowledgement(None, missing=why)
                    except (httpx.HTTPError, orjson.JSONDecodeError, AttributeError) as error:
                        why = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 1.0)
        except TimeoutError:
            return Acknowledgement(None, missing=f"not within {timeout_s:g} s ({why})")
