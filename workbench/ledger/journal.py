"""Journal: one append-only JSONL file that several processes share.

    append: flock (exclusive) → read what others added → truncate a torn last line → write one line → fsync → unlock
    read:   only bytes that were not read before; an unfinished last line is left alone

Invariant: a line counts once its newline is on disk, and never changes afterwards. A last line without one is what
a crash in mid-append leaves behind: nobody was told that it exists, so it goes. A line that has its newline was whole
once, and somebody may have been told; when it can't be read, that is corruption, reported with file and line.
Not here: what a line means (rows), who may append (store).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import LedgerCorrupt
from workbench.full_disk import told_when_full


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
        self._anchor = b""
        self._named = False

    def refresh(self) -> None:
        """Read the lines that were added since the last time. A missing file has no lines.

        Raises `LedgerCorrupt` for a line that has its newline and cannot be read.
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
    def exclusive(self) -> Iterator[Callable[..., None]]:
        """Hold the file alone, up to date, and get the function that appends one row durably.

        `append(row, durable=False)` leaves out the fsync: the line outlives this process, not the machine.
        """
        with told_when_full(self.path), self._opened(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as fd:
            if not self._named:
                # The name of a file is durable only once its directory is, and whoever made it may have died before.
                sync_directory(self.path.parent)
                self._named = True
            self._read(fd)

            def append(row: dict[str, Any], *, durable: bool = True) -> None:
                line = encode_line(row)
                value = orjson.loads(line)  # half a surrogate pair can be written but not read back; it must not get in
                if os.fstat(fd).st_size != self._read_to:
                    os.ftruncate(fd, self._read_to)
                written = 0
                while written < len(line):
                    written += os.pwrite(fd, line[written:], self._read_to + written)
                if durable:
                    os.fsync(fd)
                self._take(value, line)
                self._seen = self._signature(os.fstat(fd))

            yield append

    def _read(self, fd: int) -> None:
        stat = os.fstat(fd)
        signature = self._signature(stat)
        if signature == self._seen:
            return
        if self._seen is not None and not self._grew_only(fd, stat):
            self._reset()
        lines = _read_from(fd, self._read_to, stat.st_size).split(b"\n")
        lines.pop()  # what follows the last newline: empty, or a line that was never finished
        for number, line in enumerate(lines, start=self._lines + 1):
            self._take(self._parsed(number, line), line + b"\n")
        self._seen = signature

    def _grew_only(self, fd: int, stat: os.stat_result) -> bool:
        """False for another file under the name, or one whose known part was written again."""
        assert self._seen is not None
        return (
            stat.st_ino == self._seen[0]
            and stat.st_size > self._read_to
            and os.pread(fd, len(self._anchor), self._read_to - len(self._anchor)) == self._anchor
        )

    def _parsed(self, number: int, line: bytes) -> Any:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise LedgerCorrupt(
                f"{self.path}, line {number}: expected one JSON object, got {line[:60]!r} ({error}); the line is "
                "complete, so this is no interrupted write. Next: keep the file, drop this rollout."
            ) from None

    def _take(self, value: Any, line: bytes) -> None:
        self._on_line(self._lines + 1, value)
        self._lines += 1
        self._read_to += len(line)
        self._anchor = line[-64:]

    def _reset(self) -> None:
        self._read_to = 0
        self._lines = 0
        self._seen = None
        self._anchor = b""
        self._named = False
        self._on_reset()

    @contextmanager
    def _opened(self, flags: int, lock: int) -> Iterator[int]:
        fd = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, lock)
            yield fd
        finally:
            os.close(fd)  # closing the only descriptor of this open also gives the lock back

    @staticmethod
    def _signature(stat: os.stat_result) -> tuple[int, int, int]:
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _read_from(fd: int, start: int, end: int) -> bytes:
    data = b""
    while more := os.pread(fd, end - start - len(data), start + len(data)):
        data += more
    return data


_spelled = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def encode_line(row: dict[str, Any]) -> bytes:
    """One row as the ledger writes it: sorted keys, no spaces, one newline.

    Files of two writers are compared byte for byte, so text and floats are spelled as the standard library spells them
    (`\\u00e9`, `1e-05`), which orjson does not.
    """
    return _spelled(row).encode("ascii") + b"\n"


def append_beside(path: Path, line: bytes) -> None:
    """Append one line, given without its end, to a file that can do without some of its lines: not fsynced.

    A line that somebody died in is ended first, or it would take this one along.
    """
    with told_when_full(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            view = memoryview(b"%b%b\n" % (b"\n" if torn else b"", line))
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
