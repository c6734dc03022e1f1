"""Process: the gateway as a process of its own, started and stopped by whoever runs the campaign.

    parent ── one JSON line on stdin, then the pipe stays open ──▶ child
    parent ◀── {"url": …} on stdout once it listens, or one line on stderr and exit code 2 ── child
The child ends when the pipe closes or its parent is gone, so it outlives nobody, however that one died.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

import orjson
import uvicorn
from pydantic import ValidationError

from workbench.errors import ComponentDied, DeadlineExceeded, SetupError
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN, GatewaySettings

STOP_TIMEOUT_S = 10.0


class GatewayProcess:
    """A running gateway: `url` (base address), `pid`, `stop()`. Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.url = url
        self.pid = process.pid

    @classmethod
    def start(cls, config: Mapping[str, Any] | GatewaySettings, *, start_timeout_s: float = 30.0) -> GatewayProcess:
        """Start a gateway and wait until it listens. Blocks.

        Raises `SetupError` with the child's one line where it could not start, `DeadlineExceeded` where it took longer.
        """
        settings = config if isinstance(config, GatewaySettings) else parse_settings(config)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.gateway"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C in the terminal is for the campaign: it still has rollouts to close through this gateway.
            start_new_session=True,
        )
        try:
            _send(process, settings)
            url = _read_url(process, log, start_timeout_s)
        except BaseException:
            _end(process)
            log.close()
            raise
        return cls(process, url, log)

    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise `ComponentDied` where the process is gone."""
        if not self.alive():
            raise ComponentDied(
                f"The gateway (pid {self.pid}) ended with code {self._process.returncode}: {_last_line(self._log)}"
            )

    def stop(self) -> None:
        """End the process: close its pipe, then terminate, then kill. Does nothing the second time."""
        _end(self._process)
        self._log.close()


class _AnnouncedServer(uvicorn.Server):
    """Says on stdout where it listens, once it does."""

    def __init__(self, url: str, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(orjson.dumps({"url": self._url}).decode(), flush=True)


def serve(settings: GatewaySettings, *, control_token: str, worker_token: str | None) -> None:
    """Listen until stdin closes. The child's side of `GatewayProcess`. Raises `SetupError` where it cannot listen."""
    from workbench.gateway.app import Gateway

    listener = _listen(settings.host, settings.port)
    gateway = Gateway(settings, control_token, worker_token)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    server = _AnnouncedServer(
        f"http://{address}:{port}",
        uvicorn.Config(
            gateway.app(),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
            # Not from a proxy's headers: addresses play no part here.
            proxy_headers=False,
        ),
    )
    threading.Thread(target=_until_parent_leaves, args=(server,), daemon=True, name="parent").start()
    server.run(sockets=[listener])


def main() -> int:
    """`python -m workbench.gateway`: settings on the first line of stdin. Returns the exit code."""
    try:
        control_token = os.environ.get(CONTROL_TOKEN)
        if not control_token:
            raise SetupError(f"{CONTROL_TOKEN} is not set; the control plane needs a token. Next: export one.")
        line = sys.stdin.buffer.readline()
        try:
            config = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise SetupError(f"expected the settings as one JSON line on stdin: {error}") from None
        serve(parse_settings(config), control_token=control_token, worker_token=os.environ.get(WORKER_TOKEN))
    except SetupError as error:
        print(f"workbench gateway: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse_settings(config: Any) -> GatewaySettings:
    """Check settings. Raises `SetupError` naming the first wrong key."""
    try:
        return GatewaySettings.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        raise SetupError(f"gateway settings: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Named TCP on purpose: asyncio switches Nagle's delay off only for sockets that say so, and with it every
        # exchange takes 40 ms longer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # So that a gateway can be started again at once on the port it just left; a live listener still refuses.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Next: another gateway.port, or 0 for any."
        ) from None
    listener.setblocking(False)
    return listener


def _until_parent_leaves(server: uvicorn.Server) -> None:
    parent, pipe = os.getppid(), sys.stdin.fileno()
    # The pipe alone would do, but for a parent that forked: its other children then hold the pipe open too.
    while os.getppid() == parent:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready and not os.read(pipe, 4096):
            break
    server.should_exit = True


def _send(process: subprocess.Popen[bytes], settings: GatewaySettings) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        # It ended before it read them; what it said is on stderr.
        return


def _read_url(process: subprocess.Popen[bytes], log: IO[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else b""
    if line:
        return str(orjson.loads(line)["url"])
    if ready:
        process.wait(max(0.1, deadline - time.monotonic()))
        raise SetupError(_last_line(log))
    raise DeadlineExceeded(f"The gateway did not listen within {timeout_s:g} s: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing on stderr"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        # A broken pipe: it is gone already, which is what closing the pipe asks for.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    for ask in (None, process.terminate, process.kill):
        if ask is not None:
            ask()
        try:
            process.wait(STOP_TIMEOUT_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()
