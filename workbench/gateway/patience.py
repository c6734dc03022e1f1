"""Patience: how long a connection may stay between requests and in the middle of one's head.

uvicorn waits for the first byte of a second request for a few seconds, but for the rest of a head without end: a client
that sends a byte now and then would keep a connection as long as it likes. (Bodies: `control.read_body`.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    _Protocol = Any
else:
    _Protocol = AutoHTTPProtocol


def patient(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, closing a connection whose request has no whole head after `timeout_s` seconds."""

    class Patient(_Protocol):
        _give_up: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._stop_waiting()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(error)

        def _wait(self) -> None:
            if self._give_up is None:
                self._give_up = self.loop.call_later(timeout_s, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._give_up is not None:
                self._give_up.cancel()
                self._give_up = None

    return Patient
