"""Child: one gateway process from within. `process` starts it with a listening socket and keeps its stdin open.

settings ◀── first line of stdin │ {"serving": true} ──▶ stdout │ stdin closes, or the parent is gone: it ends
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson
import uvicorn

from workbench.errors import SetupError
from workbench.gateway.process import parse_settings
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN, GatewaySettings

if TYPE_CHECKING:
    from workbench.gateway.app import Gateway


def main(arguments: Sequence[str]) -> int:
    """`python -m workbench.gateway SOCKET`: the number of an inherited listening socket. Returns the exit code."""
    try:
        control_token = os.environ.get(CONTROL_TOKEN)
        if not control_token:
            raise SetupError(f"{CONTROL_TOKEN} is not set; the control plane needs a token. Next: export one.")
        listener = _inherited(arguments)
        line = sys.stdin.buffer.readline()
        try:
            config = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise SetupError(f"expected the settings as one JSON line on stdin: {error}") from None
        serve(parse_settings(config), listener, control_token, os.environ.get(WORKER_TOKEN))
    except SetupError as error:
        print(f"workbench gateway: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def serve(settings: GatewaySettings, listener: socket.socket, control_token: str, worker_token: str | None) -> None:
    """Answer what comes to `listener` until stdin closes."""
    from workbench.gateway.app import Gateway
    from workbench.gateway.patience import patient

    gateway = Gateway(settings, control_token, worker_token)
    server = _Server(
        gateway,
        uvicorn.Config(
            gateway.app(),
            http=patient(settings.client_timeout_s),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            # Longer than clients keep a connection (5 s is usual): one that is closed just as a request goes out on it
            # looks to them like a call that failed.
            timeout_keep_alive=120,
            timeout_graceful_shutdown=3,
            # Not from a proxy's headers: the control plane trusts the address that a connection really comes from.
            proxy_headers=False,
        ),
    )
    threading.Thread(target=_until_parent_leaves, args=(server,), daemon=True, name="parent").start()
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says on stdout that it serves, once it does; ends the calls before the connections that wait for them."""

    def __init__(self, gateway: Gateway, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print('{"serving": true}', flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._gateway.end_calls()
        await super().shutdown(sockets=sockets)


def _inherited(arguments: Sequence[str]) -> socket.socket:
    try:
        (number,) = arguments
        return socket.socket(fileno=int(number))
    except (ValueError, OSError):
        raise SetupError(
            f"expected the number of an inherited listening socket, got {' '.join(arguments) or 'nothing'}. Next: "
            "start a gateway with workbench.gateway.process.GatewayProcess."
        ) from None


def _until_parent_leaves(server: uvicorn.Server) -> None:
    parent, pipe = os.getppid(), sys.stdin.fileno()
    # The pipe alone would do, but for a parent that forked: its other children then hold the pipe open too.
    while os.getppid() == parent:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready and not os.read(pipe, 4096):
            break
    server.should_exit = True
