"""Upstream: the policy workers behind a gateway, over HTTP.

    send             a request as a worker expects it: its bearer token, and for captured calls the admission
    acknowledgement  the token-free coordinates of one call, told with its answer or waited for with a deadline

Invariant: all calls of a rollout go to one worker, at every gateway process, because only that one still has the
rollout's cumulative ids in memory. The worker follows from the rollout's id and the list of workers alone, so nothing
has to be remembered or agreed on; a rollout whose worker is gone gets no answer from another, its calls fail.
No header of an agent is forwarded. The client is aiohttp's: at 32 calls at once httpx takes a millisecond of processor
time a call more, which is the engine's on a small machine. Not here: what the answers mean for custody (exchange).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from workbench.wire import CaptureAdmission
from workbench.wire.headers import ADMISSION_HEADER, ROLLOUT_HEADER


@dataclass(frozen=True)
class Acknowledgement:
    """The worker's answer about one call: `coords` as they came (None: it knows nothing of the call, and `missing` says
    how), `failure` the typed cause of a failed capture, `staged_s` how long the staging took."""

    coords: Any
    failure: dict[str, Any] | None = None
    missing: str = ""
    staged_s: float | None = None

    @classmethod
    def read(cls, message: bytes | str) -> Acknowledgement:
        """From a worker's JSON. Raises ValueError where it is none, or no object."""
        payload = orjson.loads(message)
        if not isinstance(payload, dict):
            raise ValueError(f"expected a JSON object, got {type(payload).__name__}")
        staged_s = payload.get("staged_s")
        return cls(
            payload.get("coords"), payload.get("failure"), staged_s=staged_s if isinstance(staged_s, float) else None
        )


_CONNECT_TIMEOUT_S = 5.0
_HEADER_BYTES = 2**16
"""A call's coordinates come in one header; the client's own limit is 8 KiB."""


class Upstream:
    """HTTP client of the workers, one a process; `close` it. aiohttp.ClientError says that a worker did not answer."""

    def __init__(self, urls: str | Sequence[str], token: str | None) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self._in_turn = itertools.cycle(self.urls)
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    @functools.cached_property
    def _client(self) -> aiohttp.ClientSession:
        # Made at the first call, because it belongs to the event loop that it is made in.
        return aiohttp.ClientSession(
            # The life of a call is bounded by the exchange; a read deadline here would cut long generations instead.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_field_size=_HEADER_BYTES,
            max_line_size=_HEADER_BYTES,
        )

    async def close(self) -> None:
        if "_client" in self.__dict__:
            await self._client.close()

    def worker_of(self, rollout_id: str) -> str:
        """Address of the worker that has all calls of this rollout."""
        digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
        return self.urls[int.from_bytes(digest, "big") % len(self.urls)]

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        rollout_id: str | None = None,
        admission: CaptureAdmission | None = None,
        query: str = "",
    ) -> aiohttp.ClientResponse:
        """Start a request; the answer's body is still to be read, and the answer to be closed. Without a rollout it
        goes to the workers in turn."""
        headers = dict(self._headers)
        if admission is not None:
            headers[ADMISSION_HEADER] = admission.to_header()
            headers[ROLLOUT_HEADER] = admission.rollout_id
            # The engine's request and the served object carry our call id, never an id that an agent chose.
            headers["x-request-id"] = admission.model_call_id
        worker = next(self._in_turn) if rollout_id is None else self.worker_of(rollout_id)
        url = URL(worker + path + (f"?{query}" if query else ""), encoded=True)
        return await self._client.request(method, url, headers=headers, data=body, allow_redirects=False)

    async def acknowledgement(
        self, rollout_id: str, model_call_id: str, timeout_s: float, told: str | None = None
    ) -> Acknowledgement:
        """The coordinates of a call: what its worker `told` with its answer, else asked for until it answers or the
        deadline is over. Never raises."""
        if told is not None:
            with contextlib.suppress(ValueError):
                return Acknowledgement.read(told)
        worker = self.worker_of(rollout_id)
        why = "no answer"
        pause_s = 0.05
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self._client.get(
                            f"{worker}/workbench/capture/{model_call_id}", headers=self._headers
                        )
                        content = await answer.read()
                        if answer.status == 200:
                            return Acknowledgement.read(content)
                        why = f"the worker answered {answer.status}"
                        if answer.status < 500:
                            return Acknowledgement(None, missing=why)
                    except (aiohttp.ClientError, ValueError) as error:
                        why = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 1.0)
        except TimeoutError:
            return Acknowledgement(None, missing=f"not within {timeout_s:g} s ({why})")
