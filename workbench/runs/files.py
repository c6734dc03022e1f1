"""Files: what lies in a run directory, read when it is asked for and again only when it has changed.

    lines(name)        the lines of a journal, steps.jsonl and its like       scanned: and those that are broken
    parts(table)       the Parquet parts of a table                           scalars, read, of_rollout: their rows
Invariant: a part that cannot be read is left out and noted in `damaged`; it costs nothing of the others.
Not here: which frames are made of these (reader), how one file is read (frames, gathered).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from workbench.runs import frames
from workbench.runs.damage import DamagedParts
from workbench.runs.gathered import TABLES, Gathered


class RunFiles:
    """The files of the run in `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = DamagedParts()
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._gathered = {table: Gathered(path, table) for table in TABLES}

    def lines(self, name: str) -> list[dict[str, Any]]:
        return self.scanned(name).rows

    def scanned(self, name: str) -> frames.Lines:
        path = self.path / f"{name}.jsonl"
        return self.kept(f"lines {name}", [path], lambda: frames.scan_lines(path))

    def parts(self, table: str) -> list[Path]:
        return sorted((self.path / table).glob("*.parquet"))

    def scalars(self, table: str) -> pl.DataFrame:
        """All rows, without token arrays."""
        gathered = self._gathered[table]
        frame = gathered.read(self.parts(table))
        self.damaged.note(gathered.damaged)
        return frame

    def read(self, table: str, columns: list[str] | None = None) -> pl.DataFrame:
        """All rows with these columns, token arrays too; None: all columns."""
        return self.damaged.noted(frames.scan_parts(table, self.parts(table), columns))

    def of_rollout(self, table: str, rollout_id: str) -> pl.DataFrame:
        """The rows of one rollout with all columns; only the parts that can hold it are read."""
        own = [path for path in self.parts(table) if table != "train" and f".{path.stem}." in f".{rollout_id}."]
        for paths in ([own] if own else []) + [self.parts(table)]:
            found = self.damaged.noted(frames.scan_parts(table, paths)).filter(pl.col("rollout_id") == rollout_id)
            if found.height:
                return found
        return found

    def kept(self, name: str, paths: list[Path], build: Callable[[], Any]) -> Any:
        """What `build` gives, kept under `name` until a file it was built from changes."""
        found = [(path, frames.signature(path)) for path in paths]
        held = self._kept.get(name)
        if held is None or held[0] != found:
            held = self._kept[name] = (found, build())
        return held[1]
