"""Writer: the one way anything of a campaign reaches the run directory.

    events.jsonl  steps.jsonl  groups.jsonl      one JSON object a line, appended and flushed
    status.json                                  replaced whole, by a thread where an event loop must not wait
    calls/ rows/ train/ *.parquet, receipts/     one part a group or step, replaced whole

Invariants: a file that is replaced whole is either the old one or the new one (temporary name, fsync, rename, fsync of
the directory); a line is appended with a single write, so a killed process leaves at most one torn last line; closing
twice is harmless and nothing is written after it.
Not here: which columns there are (schema), reading (reader).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import orjson

from workbench.errors import RunStoreError, SetupError
from workbench.full_disk import told_when_full
from workbench.runs import schema
from workbench.runs.finding import is_run

_LOOKERS_S = 5.0
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def dumps(value: Any) -> bytes:
    """JSON as every file of a run has it: numpy scalars and arrays allowed, NaN and infinities become null."""
    return orjson.dumps(value, default=str, option=_OPTIONS)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes `path`'s place, fsynced, when the block ends; on an error `path` is left as it was.

    Raises DiskFull where there is no room."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with told_when_full(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
            sync_to_disk(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def sync_to_disk(path: Path) -> None:
    """Return once a file's contents, or a folder's entries, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_part(path: Path, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write one Parquet part of `table`: exactly its declared columns, atomically, fsynced.

    `columns` maps every declared column to a sequence of equal length (numpy arrays are welcome in list columns); an
    optional one that is left out is null.
    Raises RunStoreError when a column is missing, unknown or does not fit its dtype.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = max((len(values) for values in columns.values()), default=0)
    columns = {c.name: [None] * rows for c in schema.columns(table) if c.optional} | dict(columns)
    declared = [c.name for c in schema.columns(table)]
    missing, unknown = set(declared) - set(columns), set(columns) - set(declared)
    if missing or unknown:
        raise RunStoreError(
            f"part {path.name} of table {table}: expected its {len(declared)} declared columns, "
            f"missing {sorted(missing)}, unknown {sorted(unknown)}; declare columns in workbench.runs.schema"
        )
    arrow = schema.arrow_schema(table)
    try:
        arrays = [pa.array(columns[field.name], type=field.type) for field in arrow]
        part = pa.Table.from_arrays(arrays, schema=arrow)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RunStoreError(f"part {path.name} of table {table} does not fit its columns: {error}") from error
    with atomic_file(path) as handle:
        # With checksums a flipped bit is found where nothing else is recomputed from the values, and before decoding.
        # Without dictionaries, which are a page more for every column: a part has too few rows for them to pay.
        codecs = schema.compression(table)
        pq.write_table(part, handle, compression=codecs, use_dictionary=False, write_page_checksum=True)


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """Write a JSONL part whole, atomically, fsynced."""
    with atomic_file(path) as handle:
        handle.writelines(dumps(row) + b"\n" for row in rows)


def refuse_taken(run_dir: Path) -> None:
    """Raise SetupError where `run_dir` holds a run that a new one would write into."""
    if is_run(run_dir):
        raise SetupError(f"{run_dir} already holds a run. Next: choose another name (--run NAME), or move it away.")


def store_recipe(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write `recipe.yaml`: the resolved recipe of the run, every value of it."""
    with atomic_file(run_dir / "recipe.yaml") as handle:
        handle.write(_recipe_text(values))


def recipe_digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the file that `store_recipe` writes, which the run's events keep."""
    return sha256(_recipe_text(values)).hexdigest()


def _recipe_text(values: Mapping[str, Any]) -> bytes:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode()


class _StatusFile:
    """One JSON object, merged in memory and replaced whole on disk: by the caller, or by a thread of its own.

    What was merged first is written first or together with what came later, whoever writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._merged = self._written = 0  # counts of merges
        self._changed = threading.Condition()  # guards all of these; never held while the disk is waited for
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        self._closed = False

    def merge(self, fields: Mapping[str, Any]) -> None:
        with self._changed:
            if self._closed:
                raise RunStoreError(f"run {self._path.parent} is closed; its status stays as it is")
            if self._failure is not None:
                raise self._failure
            self._values |= fields
            self._merged += 1

    def write(self) -> None:
        """Return when everything that was merged before is on disk."""
        with self._writing:
            with self._changed:
                number, values = self._merged, dict(self._values)
            if number > self._written:
                with atomic_file(self._path) as handle:
                    handle.write(dumps(values | {"updated_at": time.time()}))
                self._written = number

    def write_soon(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_behind, name="workbench-status", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._merged > self._written)
                if self._merged == self._written:
                    return
            try:
                self.write()
            except OSError as error:
                with self._changed:
                    self._failure = error
                return

    def close(self) -> None:
        """Write what is left; nothing can be merged afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            if self._failure is None:
                self.write()


def _lock(handle: IO[bytes]) -> None:
    """Hold a file alone. Raises OSError where another writer does."""
    deadline = time.monotonic() + _LOOKERS_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            # Whoever looks whether a run is being written holds it shared, for a moment; a writer lets nobody share.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(handle, fcntl.LOCK_UN)
            time.sleep(0.001)


class RunWriter:
    """Appends a campaign's events, steps and groups, and replaces its status; safe to call from several threads.

    Opening a run that exists continues it; a run that somebody else has open raises RunStoreError. A torn
    last line (a process killed in mid-append) is cut off first, so that the next line is not glued to it.
    """

    FILES = ("events", "steps", "groups")

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._closed = False
        self._status = _StatusFile(self.run_dir / "status.json")
        self._files = {name: self._open(self.run_dir / f"{name}.jsonl") for name in self.FILES}

    @staticmethod
    def _open(path: Path) -> IO[bytes]:
        handle = path.open("a+b", buffering=0)
        try:
            _lock(handle)
        except OSError as error:
            handle.close()
            raise RunStoreError(
                f"{path} is being written by another process; wait for that run to end or choose another run name"
            ) from error
        size = handle.seek(0, os.SEEK_END)
        if size:
            handle.seek(0)
            whole = handle.read().rfind(b"\n") + 1
            if whole < size:
                handle.truncate(whole)
        return handle

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        line = dumps(dict(row)) + b"\n"
        with self._lock:
            if self._closed:
                raise RunStoreError(f"run {self.run_dir} is closed; the {name} line {line[:120]!r} was not written")
            file = self._files[name]
            with told_when_full(self.run_dir / f"{name}.jsonl"):
                written = file.write(line)
                if written != len(line):  # a full disk takes a part, and says so only at the next write
                    file.truncate(file.seek(0, os.SEEK_END) - written)
                    raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")

    def event(self, kind: str, **fields: Any) -> None:
        """Append `{"at": Unix time, "kind": kind, **fields}` to events.jsonl."""
        self._append("events", {"at": time.time(), "kind": kind, **fields})

    def step(self, row: Mapping[str, Any]) -> None:
        """Append one optimiser step to steps.jsonl (columns of table `steps`; more are kept)."""
        self._append("steps", row)

    def group(self, row: Mapping[str, Any]) -> None:
        """Append one finalised group to groups.jsonl (columns of table `groups`; more are kept)."""
        self._append("groups", row)

    def status(self, row: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Merge into status.json and replace it; readers never see half a file. Waits for the disk."""
        self._status.merge({**(row or {}), **fields})
        self._status.write()

    def status_soon(self, **fields: Any) -> None:
        """`status` for an event loop: a thread waits for the disk, and several changes may become one write.

        It is on disk after the next `status`, or `close`, at the latest. Raises the OSError of an earlier write.
        """
        self._status.merge(fields)
        self._status.write_soon()

    def close(self) -> None:
        """Fsync and close everything; a second call does nothing."""
        self._status.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for handle in self._files.values():
                with contextlib.suppress(OSError):
                    os.fsync(handle.fileno())
                handle.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
