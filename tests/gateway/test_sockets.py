"""One port for several processes, and never a port that somebody has."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from workbench.errors import SetupError
from workbench.gateway.sockets import listen, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("count", [1, 3])
def test_all_sockets_are_one_address_and_each_takes_connections(host: str, count: int) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no address ::1 on this machine: IPv6 is switched off (sysctl net.ipv6.conf.lo.disable_ipv6)")
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen(host, 0, count)]
        (url,) = {url_of(listener) for listener in listeners}
        port = listeners[0].getsockname()[1]
        assert url.endswith(f":{port}")
        assert ("[::1]" in url) == (host == "::1")
        taken = 0
        for _ in range(16 * count):
            with socket.create_connection((host, port), timeout=10.0):
                taken += sum(took(listener) for listener in listeners)
        assert taken == 16 * count


def has_ipv6() -> bool:
    """Whether ::1 can be listened on; where IPv6 is switched off, sockets of its kind can be made all the same."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def took(listener: socket.socket) -> int:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return 0
    return 1


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_a_port_that_is_taken_is_refused_however_it_is_shared(first: int, second: int) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen("127.0.0.1", 0, first)]
        port = listeners[0].getsockname()[1]
        with pytest.raises(SetupError, match=rf"cannot listen on 127.0.0.1:{port}: .*gateway.port"):
            listen("127.0.0.1", port, second)
    # And once it is free, it is had again at once.
    for listener in listen("127.0.0.1", port, second):
        listener.close()


def test_a_host_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SetupError, match=r"cannot listen on no\.such\.host\.invalid:0"):
        listen("no.such.host.invalid", 0, 1)
