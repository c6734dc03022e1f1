"""Sweep view: the runs of a sweep, or of any folder, in one picture and one table.

In: a folder. Out: mean reward over steps, a line a run; under it a row a run with the settings that tell it from the
others, its true status, reward and capture rate. Invariant: a run that failed or never began is in the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from workbench import runs
from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import MARKERS, SERIES, legend_under_title, panels, say_nothing_to_show, step_ticks
from workbench.runs.finding import find
from workbench.runs.shelf import COLUMNS, overview, run_directories
from workbench.runs.sweeps import SWEEP_FILE, open_sweep

_DRAWN = 12
_HALF_LINE = 30
"""Characters of a run's name that leave room for another beside it."""
_LETTERS = 120
_NOT_BEGUN = "not begun"


class SweepView(StaticView):
    """`table`: one row a run, in the sweep's order; the columns of `runs.shelf` and one a swept key."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is looked for as a run is. Raises RunStoreError where it holds neither a sweep nor a run."""
        self.folder = find(folder, _holds_runs)
        self.keys: list[str] = []
        if (self.folder / SWEEP_FILE).is_file():
            sweep = open_sweep(self.folder)
            self.keys = list(sweep.axes)
            directories = [sweep.folder / point.run for point in sweep.points]
            settings = [point.settings for point in sweep.points]
        else:
            directories = run_directories(self.folder)
            settings = [{} for _ in directories]
            if not directories:
                raise RunStoreError(f"No sweep and no run in {self.folder}. Next: name the folder that runs lie in.")
        rows = [
            {**_one(directory), **{key: chosen.get(key) for key in self.keys}}
            for directory, chosen in zip(directories, settings, strict=True)
        ]
        self.table = pl.DataFrame(rows, schema={**COLUMNS, **dict.fromkeys(self.keys, pl.String)})

    def sentence(self) -> str:
        states = self.table.group_by("status", maintain_order=True).len()
        said = ", ".join(f"{row['len']} {row['status']}" for row in states.iter_rows(named=True))
        over = f" over {', '.join(self.keys)}" if self.keys else ""
        nothing = int(self.table["learned_nothing"].sum())
        learned = f" · NOTHING LEARNED in {nothing} of them" if nothing else ""
        return f"{markup.count(self.table.height, 'run')}{over} · {said}{learned}{self._best()}"

    def _best(self) -> str:
        # A served run has a reward and no step.
        rated = self.table.drop_nulls(["reward", "step"]).sort("reward", descending=True, maintain_order=True)
        if rated.is_empty() and self.table["step"].max():
            return " · none has a reward at the last step"
        if rated.height < 2:
            return ""
        best = rated.row(0, named=True)
        alike = int((rated["reward"] == best["reward"]).sum())
        whose = self._label(best) if alike == 1 else f"{alike} of {rated.height} runs alike"
        return f" · highest reward at the last step: {whose} ({best['reward']:.3f})"

    def _label(self, row: dict[str, Any]) -> str:
        return ", ".join(f"{key.rpartition('.')[2]}={row[key]}" for key in self.keys) or str(row["run"])

    def draw(self) -> Figure:
        began = self.table.filter(pl.col("step") > 0).head(_DRAWN)
        lines: list[tuple[str, list[int], list[float]]] = []
        for row in began.iter_rows(named=True):
            steps = runs.open(row["path"]).steps.sort("step")
            if steps["reward_mean"].count():  # else nobody gave a reward: no line, and no name for one
                rewards = [np.nan if value is None else value for value in steps["reward_mean"].to_list()]
                lines.append((self._label(row), steps["step"].to_list(), rewards))
        if not lines:
            figure, (ax,) = panels(0.9)
            none = "no run has taken an optimiser step" if began.is_empty() else "no step of these runs has a reward"
            say_nothing_to_show(ax, none)
            return figure
        columns = 2 if max(len(label) for label, _, _ in lines) <= _HALF_LINE else 1
        named = len(lines) > 1
        figure, (ax,) = panels(3.0 + 0.18 * -(-len(lines) // columns) * named)
        ax.set_title("mean reward of each step")
        for place, (label, at, rewards) in enumerate(lines):
            look: dict[str, Any] = {
                "color": SERIES[place % len(SERIES)],
                "marker": MARKERS[place // len(SERIES) % len(MARKERS)],
            }
            ax.plot(at, rewards, lw=1.8, ms=4, label=label, **look)
        ax.set_xlabel("optimiser step")
        step_ticks(ax, max((at for _, at, _ in lines), key=len))
        if named:
            legend_under_title(ax, columns)
        return figure

    def html(self) -> str:
        header = ("run", *self.keys, "status", "step", "reward", "token_in_rate", "after roots", "rejected", "error")
        parts = [
            markup.line(self.sentence(), strong=True),
            markup.table(header, map(self._cells, self.table.to_dicts())),
        ]
        if (began := self.table.filter(pl.col("step") > 0).height) > _DRAWN:
            parts.append(markup.line(f"The picture shows the first {_DRAWN} of {began}", muted=True))
        return markup.block(*parts)

    def _cells(self, row: dict[str, Any]) -> list[markup.Cell | str]:
        status = row["status"] + (f", resumed {row['resumed']} ×" if row["resumed"] else "")
        return [
            row["run"],
            *(str(row[key]) for key in self.keys),
            markup.Cell(
                status, strong=row["status"] != "done", under="NOTHING LEARNED" if row["learned_nothing"] else ""
            ),
            _number(row["step"] if row["steps"] is None else f"{row['step']}/{row['steps']}"),
            _number(row["reward"], ".3f"),
            _number(row["token_in_rate"], ".4g"),
            _number(row["token_in_rate_after_roots"], ".4g"),
            _number(row["rejected"], "d"),
            markup.Cell(markup.cut(row["error"] or "", _LETTERS), muted=True),
        ]


def _one(directory: Path) -> dict[str, Any]:
    if not (directory / "status.json").is_file():
        return {"run": directory.name, "status": _NOT_BEGUN, "path": str(directory)}
    return overview([directory]).row(0, named=True)


def _number(value: Any, spec: str = "") -> markup.Cell:
    return markup.Cell("–" if value is None else markup.number(value, spec) if spec else str(value), right=True)


def _holds_runs(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file() or bool(run_directories(folder))
