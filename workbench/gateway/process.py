"""Process: the gateway as processes of its own, started and stopped by whoever runs the campaign.

    parent ── a listening socket each, one JSON line on stdin, then the pipe stays open ──▶ children
    parent ◀── one line on stdout once it serves, or one line on stderr and exit code 2 ── child
All of them share one port and one ledger directory. A child ends when its pipe closes or its parent is gone, so it
outlives nobody, however that one died; one that dies by itself is found by `check`.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from typing import IO, Any

from pydantic import ValidationError

from workbench.errors import ComponentDied, DeadlineExceeded, SetupError, first_fault
from workbench.gateway.settings import METRICS_DIR, GatewaySettings
from workbench.gateway.sockets import listen, url_of

STOP_TIMEOUT_S = 10.0


class GatewayProcess:
    """A running gateway: `url` (base address), `pids` (one a process), `check()`, `stop()`. Made by `start`."""

    def __init__(self, url: str, members: Sequence[_Member], stack: contextlib.ExitStack) -> None:
        self._members = members
        self._stack = stack
        self.url = url
        self.pids = [member.process.pid for member in members]

    @classmethod
    def start(cls, config: Mapping[str, Any] | GatewaySettings, *, start_timeout_s: float = 60.0) -> GatewayProcess:
        """Start `workers` processes and wait until all of them serve. Blocks.

        Raises `SetupError` with a child's one line where it could not start, `DeadlineExceeded` where it took longer.
        """
        settings = config if isinstance(config, GatewaySettings) else parse_settings(config)
        deadline = time.monotonic() + start_timeout_s
        members: list[_Member] = []
        with contextlib.ExitStack() as stack:
            listeners = listen(settings.host, settings.port, settings.workers)
            url = url_of(listeners[0])
            for listener in listeners:
                stack.callback(listener.close)
            environment = {**os.environ}
            environment.pop(METRICS_DIR, None)
            if settings.workers > 1:
                metrics_dir = tempfile.TemporaryDirectory(prefix="workbench-metrics-")
                environment[METRICS_DIR] = stack.enter_context(metrics_dir)
            stack.callback(_end, members)
            for listener in listeners:
                members.append(_Member.start(listener, settings, environment))
                # A socket that is open here too would still take connections once its process is dead.
                listener.close()
            for member in members:
                member.wait_until_it_serves(deadline, start_timeout_s)
            return cls(url, members, stack.pop_all())

    def alive(self) -> bool:
        """Whether all processes are there."""
        return all(member.process.poll() is None for member in self._members)

    def check(self) -> None:
        """Raise `ComponentDied` where a process is gone."""
        for number, member in enumerate(self._members, 1):
            if member.process.poll() is not None:
                which = f" process {number} of {len(self._members)}" if len(self._members) > 1 else ""
                raise ComponentDied(
                    f"The gateway{which} (pid {member.process.pid}) ended with code {member.process.returncode}: "
                    f"{member.last_line()}"
                )

    def stop(self) -> None:
        """End the processes: close their pipes, then terminate, then kill. Does nothing the second time."""
        self._stack.close()


@dataclass
class _Member:
    """One process and what it wrote to stderr."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    @classmethod
    def start(cls, listener: socket, settings: GatewaySettings, environment: Mapping[str, str]) -> _Member:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.gateway", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            pass_fds=(listener.fileno(),),
            # Ctrl-C in the terminal is for the campaign: it still has rollouts to close through this gateway.
            start_new_session=True,
        )
        assert process.stdin is not None
        # A broken pipe: it ended before it read them; what it said is on stderr.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return cls(process, log)

    def wait_until_it_serves(self, deadline: float, timeout_s: float) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise DeadlineExceeded(f"The gateway did not serve within {timeout_s:g} s: {self.last_line()}")
        if not self.process.stdout.readline():
            self.process.wait(max(0.1, deadline - time.monotonic()))
            raise SetupError(self.last_line())

    def last_line(self) -> str:
        if self.log.closed:
            return "it was stopped"
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing on stderr"


def parse_settings(config: Any) -> GatewaySettings:
    """Check settings. Raises `SetupError` naming the first wrong key."""
    try:
        return GatewaySettings.model_validate(config)
    except ValidationError as error:
        raise SetupError(f"gateway settings: {first_fault(error)}") from None


def _end(members: Sequence[_Member]) -> None:
    """End all of them at once: their waits add up to those of one."""
    for member in members:
        if member.process.stdin is not None and not member.process.stdin.closed:
            # A broken pipe: it is gone already, which is what closing the pipe asks for.
            with contextlib.suppress(BrokenPipeError):
                member.process.stdin.close()
    for ask in ("close", "terminate", "kill"):
        left = [member.process for member in members if member.process.poll() is None]
        for process in left:
            if ask != "close":
                getattr(process, ask)()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.process.stdout is not None:
            member.process.stdout.close()
        member.log.close()
