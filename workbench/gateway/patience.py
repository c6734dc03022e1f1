"""Patience: how long a client may take to send a request's head, and to take what it is sent.

uvicorn bounds the time between two requests and nothing else: a client that sends a byte now and then, or asks for a
stream and does not read it, would keep its connection as long as it likes. (Bodies: `control.read_body`.)
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
    """uvicorn's HTTP protocol, closing a connection whose client stalls for `timeout_s` seconds."""

    class Patient(_Protocol):
        _head_due: asyncio.TimerHandle | None = None
        _room_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            else:
                _cancel(self._head_due)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._room_due = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._room_due)
            super().resume_writing()

        def connection_lost(self, error: Exception | None) -> None:
            _cancel(self._head_due)
            _cancel(self._room_due)
            super().connection_lost(error)

        def _await_head(self) -> None:
            if self._head_due is None or self._head_due.cancelled():
                self._head_due = self.loop.call_later(timeout_s, self.transport.abort)

    return Patient


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
