"""Presence: which of the gateways that share a ledger directory are still running.

    each process holds a lock on <its id>.gateway as long as it lives ── the kernel lets go of it, however it died
So a call that was begun by a gateway and has no outcome is either still running or lost, and anybody can tell which.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from uuid import uuid4


class Presence:
    """This gateway's sign of life in `directory`, from now until `close`. `id` is new with each start."""

    def __init__(self, directory: Path) -> None:
        self.id = uuid4().hex
        self._directory = directory
        # Locked before it has its name, or somebody might find it unlocked and take this process for dead.
        unnamed = directory / f"{self.id}.starting"
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, b"%d\n" % os.getpid())  # for people who look for it
        unnamed.rename(self._path(self.id))
        for path in directory.glob("*.gateway"):
            self.alive(path.stem)

    def alive(self, gateway: str) -> bool:
        """Whether that gateway is running. What a dead one left behind is removed."""
        if gateway == self.id:
            return True
        path = self._path(gateway)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path(self.id).unlink()
            os.close(self._fd)
            self._fd = -1

    def _path(self, gateway: str) -> Path:
        return self._directory / f"{gateway}.gateway"
