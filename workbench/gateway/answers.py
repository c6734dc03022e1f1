"""Answers: the bytes that were served for the calls of one rollout, in `<rollout>.answers` beside its replay log.

    keep ── appended, one after the other ──▶ place (where, how many, digest) ──▶ the replay log's line
    read ◀── only those bytes, only for a request that comes again
Bytes have no index of their own: what the log does not name, or a digest does not fit, does not exist. So the file may
be removed at any time (`forget`), which makes late repetitions impossible and nothing else.
Not here: which call an answer belongs to, and the lock under which all of this happens (replay).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from workbench.full_disk import told_when_full
from workbench.ledger.journal import sync_directory

SUFFIX = ".answers"


@dataclass(frozen=True)
class Place:
    """`size` bytes from byte `at` on, with this SHA-256 (hex)."""

    at: int
    size: int
    sha256: str


class AnswerFile:
    """One rollout's answers. For one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def keep(self, raw: bytes) -> Iterator[Place]:
        """Append an answer. Durable once the block is left; what the block makes durable costs little extra then."""
        created = not self.path.exists()
        with told_when_full(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if created:
                    # The name of a new file is durable only once its directory is.
                    sync_directory(self.path.parent)
                at = os.lseek(fd, 0, os.SEEK_END)
                view = memoryview(raw)
                while view:
                    view = view[os.write(fd, view) :]
                yield Place(at, len(raw), sha256(raw).hexdigest())
                os.fsync(fd)
            finally:
                os.close(fd)

    def read(self, place: Place) -> bytes | None:
        """The bytes at a place, or None: they were never whole, or are no longer kept."""
        try:
            with self.path.open("rb") as file:
                file.seek(place.at)
                raw = file.read(place.size)
        except FileNotFoundError:
            return None
        return raw if sha256(raw).hexdigest() == place.sha256 else None

    def forget(self, idle_s: float = 0.0) -> None:
        """Remove the file, unless something was added to it in the last `idle_s` seconds."""
        try:
            if time.time() - self.path.stat().st_mtime >= idle_s:
                self.path.unlink()
        except FileNotFoundError:
            return


def answer_files(directory: Path, idle_s: float) -> list[str]:
    """Rollouts that have answers to which nothing was added for `idle_s` seconds."""
    now = time.time()
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            # All processes of a gateway end at once, and each removes what it finds.
            with suppress(FileNotFoundError):
                if entry.name.endswith(SUFFIX) and now - entry.stat().st_mtime >= idle_s:
                    found.append(entry.name.removesuffix(SUFFIX))
    return found
