"""Gathered: the columns without token arrays of a run's many small parts, as one frame; each part is read once.

    rows/ calls/ train/ *.parquet ──read once each──▶ one frame a table, grown by what is new
    now and then, and at the run's end ──gather──▶ gathered/<table>.parquet, so that whoever opens it reads one file
Invariants: the parts are the truth. What was gathered counts only while each of its parts has the time and size that it
had then; without the file, or with a changed part, parts are read again.
Not here: which parts there are (reader), token arrays, which are read on demand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import orjson
import polars as pl

from workbench.errors import RunStoreError
from workbench.runs import frames
from workbench.runs.frames import Signature, signature
from workbench.runs.writer import atomic_file

TABLES = ("rows", "calls", "train")
FROM_PARTS = 32
"""Fewer parts than this are read as quickly as found."""
AGAIN = 1.5
"""While a run goes on its parts are gathered again once there are so many times as many. All of it then takes time in
proportion to the parts, and a run that is killed has at most a third of them to be read one by one."""

_PARTS = b"workbench.parts"


def scalar_columns(table: str) -> list[str]:
    """The columns that are gathered of `table`."""
    return frames.scalar_columns("rollouts" if table == "rows" else table)


class Gathered:
    """One table of one run; `read` is given the parts that there are now."""

    def __init__(self, run_dir: Path, table: str) -> None:
        self._file = run_dir / "gathered" / f"{table}.parquet"
        self._table = table
        self._known: dict[str, Signature] | None = None
        self._frame = pl.DataFrame()
        self.damaged: dict[Path, RunStoreError] = {}
        """Parts that `read` could not read, of those there were."""

    def read(self, paths: Sequence[Path]) -> pl.DataFrame:
        """All rows of `paths`, new parts after old ones; without those that are then `damaged`."""
        there = {path.name: now for path in paths if (now := signature(path)) is not None}
        if self._known is None:
            self._known, self._frame = _load(self._file, self._table)
        if not self._known.items() <= there.items():
            self._known, self._frame, self.damaged = {}, pl.DataFrame(), {}
        new = [path for path in paths if path.name in there and path.name not in self._known]
        if new or not self._known:
            found = frames.scan_parts(self._table, new, scalar_columns(self._table))
            self._frame = pl.concat([self._frame, found.frame]) if self._known else found.frame
            self.damaged |= found.damaged
            self._known = there
        return self._frame

    def store(self) -> None:
        """Write what was read, for whoever comes next."""
        import pyarrow.parquet as pq

        arrow = self._frame.to_arrow().replace_schema_metadata({_PARTS: orjson.dumps(self._known)})
        with atomic_file(self._file) as handle:
            pq.write_table(arrow, handle, compression="zstd", write_page_checksum=True)

    def stored_parts(self) -> int:
        """How many parts lie in the file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return len(orjson.loads((pq.read_schema(self._file).metadata or {})[_PARTS]))
        except (OSError, KeyError, ValueError, pa.ArrowException):
            return 0


def gather(run_dir: Path, *, growth: float = 1.0) -> None:
    """Write what `Gathered` would read, where there are many parts, and `growth` times as many as there were when it
    was written last. A table that has a part which cannot be read is left as it is."""
    for table in TABLES:
        paths, gathered = sorted((run_dir / table).glob("*.parquet")), Gathered(run_dir, table)
        if len(paths) < max(FROM_PARTS, growth * gathered.stored_parts()):
            continue
        with contextlib.suppress(RunStoreError, OSError):
            gathered.read(paths)
            if not gathered.damaged:
                gathered.store()


def _load(path: Path, table: str) -> tuple[dict[str, Signature], pl.DataFrame]:
    """What was gathered; nothing where there is no such file, or it cannot be read, or has other columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrow = pq.read_table(path, page_checksum_verification=True)
        known = orjson.loads((arrow.schema.metadata or {})[_PARTS])
        frame = pl.DataFrame(pl.from_arrow(arrow))
    except (OSError, KeyError, ValueError, pa.ArrowException, pl.exceptions.PolarsError):
        return {}, pl.DataFrame()
    if dict(frame.schema) != dict(frames.read_parts(table, [], scalar_columns(table)).schema):
        return {}, pl.DataFrame()
    return {name: (modified, size) for name, (modified, size) in known.items()}, frame
