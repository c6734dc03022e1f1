"""Journal: one append-only JSONL file that several processes share.

    append: flock (exclusive) → read what others added → truncate a torn last line → write one line → fsync → unlock
    read:   only bytes that were not read before; an unfinished last line is left alone

Invariant: a line counts once its newline is on disk, and never changes afterwards. A last line without a newline, or
one that is no JSON at all, is what a crash in mid-append leaves behind: nobody was told that it exists, so it goes.
The same fault before other lines is corruption and is reported with file and line.
Not here: what a line means (rows), who may append (store).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import LedgerCorrupt


class Journal:
    """Reader and writer of one JSONL file, remembering how far it has read.

    `on_line(number, value)` is called once for each complete line, in order, with its 1-based number; `on_reset()`
    is called when the file is no longer the one that was read (replaced or rewritten) and reading starts anew.
    Not thread-safe by itself: one thread at a time.
    """

    def __init__(
        self, path: Path, on_line: Callable[[int, Any], None], on_reset: Callable[[], None] = lambda: None
    ) -> None:
        self.path = path
        self._on_line = on_line
        self._on_reset = on_reset
        self._read_to = 0
        self._lines = 0
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> None:
        """Read the lines that were added since the last time. A missing file has no lines.

        Raises `LedgerCorrupt` for a line that cannot be read and stands before others.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            if self._seen is not None:
                self._reset()
            return
        if self._signature(stat) == self._seen:
            return
        with self._opened(os.O_RDONLY, fcntl.LOCK_SH) as fd:
            self._read(fd)

    @contextmanager
    def exclusive(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Hold the file alone, up to date, and get the function that appends one row durably."""
        created = not self.path.exists()
        with self._opened(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as fd:
            if created:
                # The name of a new file is durable only once its directory is.
                self._sync_directory()
            self._read(fd)

            def append(row: dict[str, Any]) -> None:
                line = encode_line(row)
                size = os.fstat(fd).st_size
                if size != self._read_to:
                    os.ftruncate(fd, self._read_to)
                os.lseek(fd, self._read_to, os.SEEK_SET)
                view = memoryview(line)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
                self._take(self._lines + 1, orjson.loads(line))
                self._read_to += len(line)
                self._seen = self._signature(os.fstat(fd))

            yield append

    def _read(self, fd: int) -> None:
        stat = os.fstat(fd)
        signature = self._signature(stat)
        if signature == self._seen:
            return
        if self._seen is not None and (signature[0] != self._seen[0] or stat.st_size <= self._read_to):
            # Another file under the name, or the same length written again: what is in memory may be stale.
            self._reset()
        data = os.pread(fd, stat.st_size - self._read_to, self._read_to)
        while len(data) < stat.st_size - self._read_to:
            more = os.pread(fd, stat.st_size - self._read_to - len(data), self._read_to + len(data))
            if not more:
                break
            data += more
        lines = data.split(b"\n")
        lines.pop()  # what follows the last newline: empty, or a line that was never finished
        for position, line in enumerate(lines):
            number = self._lines + 1
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if position == len(lines) - 1:
                    break
                raise LedgerCorrupt(
                    f"{self.path}, line {number}: expected one JSON object a line, got {bytes(line[:60])!r} ({error}); "
                    "lines follow it, so this is no interrupted write. Next: keep the file, drop this rollout."
                ) from None
            self._take(number, value)
            self._read_to += len(line) + 1
        self._seen = signature

    def _take(self, number: int, value: Any) -> None:
        self._on_line(number, value)
        self._lines = number

    def _reset(self) -> None:
        self._read_to = 0
        self._lines = 0
        self._seen = None
        self._on_reset()

    @contextmanager
    def _opened(self, flags: int, lock: int) -> Iterator[int]:
        fd = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, lock)
            yield fd
        finally:
            os.close(fd)  # closing the only descriptor of this open also gives the lock back

    def _sync_directory(self) -> None:
        sync_directory(self.path.parent)

    @staticmethod
    def _signature(stat: os.stat_result) -> tuple[int, int, int]:
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def encode_line(row: dict[str, Any]) -> bytes:
    """One row as the ledger writes it: sorted keys, no spaces, one newline."""
    return orjson.dumps(row, option=orjson.OPT_SORT_KEYS) + b"\n"


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
