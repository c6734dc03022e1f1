"""Sweeps: which settings each run of a sweep had, as the sweep itself recorded it.

    sweep.json = {"recipe", "axes": {key: [value, …]}, "points": [{"run", "settings": {key: value}}, …]}

`open_sweep(folder)` reads it; a point whose run has not begun has no directory yet. Not here: running one
(campaign.report.sweep), what became of the runs (shelf).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import RunStoreError
from workbench.runs.writer import atomic_file

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its directory's name, and the settings that tell it from the others."""

    run: str
    settings: dict[str, str]


@dataclass(frozen=True)
class Sweep:
    """`folder` holds the runs; `axes` maps each swept key to its values, as they were written."""

    folder: Path
    recipe: str
    axes: dict[str, list[str]]
    points: list[Point]

    def store(self) -> None:
        """Write `sweep.json` into the folder, which is made."""
        points = [{"run": point.run, "settings": point.settings} for point in self.points]
        record = {"recipe": self.recipe, "axes": self.axes, "points": points}
        with atomic_file(self.folder / SWEEP_FILE) as handle:
            handle.write(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


def open_sweep(folder: str | Path) -> Sweep:
    """The sweep in a folder. Raises RunStoreError where there is none."""
    path = Path(folder) / SWEEP_FILE
    try:
        record: dict[str, Any] = orjson.loads(path.read_bytes())
        points = [Point(point["run"], point["settings"]) for point in record["points"]]
        return Sweep(path.parent, record["recipe"], record["axes"], points)
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RunStoreError(f"No sweep in {folder}: {path.name} is missing or damaged ({error})") from error
