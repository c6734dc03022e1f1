"""Sockets: one listening socket a gateway process, all on the same port; the kernel deals out the connections.

A port that somebody listens on already is refused, also where that would allow sharing.
"""

from __future__ import annotations

import socket

from workbench.errors import SetupError


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that listen on the same address. Raises `SetupError` where it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if count == 1:
            return [_listening(family, address, shared=False)]
        # Sockets that share a port let any other of this user in, so that nobody has it yet is found out with one that
        # doesn't; it also chooses the port where any will do.
        with _bound(family, address, shared=False) as first:
            address = first.getsockname()
        return [_listening(family, address, shared=True) for _ in range(count)]
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Next: another gateway.port, or 0 for any."
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listening(family: int, address: tuple, shared: bool) -> socket.socket:
    listener = _bound(family, address, shared)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _bound(family: int, address: tuple, shared: bool) -> socket.socket:
    # Named TCP on purpose: asyncio switches Nagle's delay off only for sockets that say so, and with it every exchange
    # takes 40 ms longer.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # So that a gateway can be started again at once on the port it just left; a live listener still refuses.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
