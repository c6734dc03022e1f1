"""Listing: the runs of a folder, newest last, or the rollouts of a run, rejected ones first, as lines of text."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

from workbench.errors import RunStoreError
from workbench.inspect.custody import standing
from workbench.inspect.html import cut, dash
from workbench.runs.gradient import NO_GRADIENT
from workbench.runs.shelf import overview, run_directories

_HEADER = ("run", "status", "step", "reward", "after roots", "rejected", "started")
_NUMBERS = range(2, 6)
_ROLLOUT_HEADER = ("rollout", "calls", "tokens", "reward", "state")
_ROLLOUT_NUMBERS = range(1, 4)
_LETTERS = 160


def listing(folder: Path) -> pl.DataFrame:
    """The runs in `folder`, with the columns of `runs.shelf`. Raises RunStoreError where there is none."""
    directories = run_directories(folder) if folder.is_dir() else []
    if not directories:
        raise RunStoreError(f"No runs in {folder}. Next: workbench run cpu_smoke, or name a folder.")
    return overview(directories)


def list_lines(table: pl.DataFrame) -> list[str]:
    """A header, a line a run, and under it, where there is any: how often it was gone on with, guessed last calls,
    rollouts that ended early, its error. `after roots` is token_in_rate_after_roots.

    The lines of runs whose names have at most 17 letters fit a terminal of 80 columns.
    """
    names = _names(table)
    rows = [_cells(row, name) for row, name in zip(table.iter_rows(named=True), names, strict=True)]
    widths = [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(len(_HEADER))]
    lines = [_line(_HEADER, widths, _NUMBERS)]
    for row, cells in zip(table.iter_rows(named=True), rows, strict=True):
        lines.append(_line(cells, widths, _NUMBERS))
        resumed = f"resumed {row['resumed']} ×" if row["resumed"] else ""
        error = cut(row["error"] or "", _LETTERS)
        if said := [*filter(None, (resumed, *_remarks(row), error))]:
            lines.append("  " + "; ".join(said))
    return lines


def _remarks(row: dict[str, Any]) -> list[str]:
    """What has a vote and may not be what one thinks; nothing where there is none of it."""
    told = []
    if row["learned_nothing"]:
        told.append(f"NOTHING LEARNED: {NO_GRADIENT}")
    if row["guessed"]:
        told.append(f"last calls guessed in {row['guessed']:,} of {row['rollouts'] - row['rejected']:,} valid rollouts")
    if row["ended_early"]:
        told.append(f"{row['ended_early']:,} of {row['rollouts']:,} rollouts ended early")
    return told


def _names(table: pl.DataFrame) -> list[str]:
    """What each run is called where it lies, which is what other commands take: its folder, with the folder around it
    where two would read alike, and the name that it was begun under where that is another."""
    places = [Path(path) for path in table["path"]]
    alike = Counter(place.name for place in places)
    names = [f"{place.parent.name}/{place.name}" if alike[place.name] > 1 else place.name for place in places]
    begun = [run if run != place.name else "" for run, place in zip(table["run"], places, strict=True)]
    return [f"{name} ({run})" if run else name for name, run in zip(names, begun, strict=True)]


def _cells(row: dict[str, Any], name: str) -> tuple[str, ...]:
    return (
        name,
        row["status"],
        "–" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}",
        dash(row["reward"], ".3f"),
        dash(row["token_in_rate_after_roots"], ".4g"),
        dash(row["rejected"], "d"),
        "–" if row["started_at"] is None else _when(row["started_at"]),
    )


def _when(at: float) -> str:
    """As ls(1) has it: the time of day this year, the year before."""
    when = time.localtime(at)
    return time.strftime("%b %d %H:%M" if when.tm_year == time.localtime().tm_year else "%b %d  %Y", when)


def rollout_lines(source: Any, most: int) -> list[str]:
    """A header and a line a rollout of a run or a ledger, at most `most`; none where there is no rollout.

    Rejected ones come first, then those that are not finalised, because they are what one looks for; the rest as they
    were sampled.
    """
    rollouts: pl.DataFrame = source.rollouts
    calls = source.calls.group_by("rollout_id", maintain_order=True).len()
    waiting = calls.join(rollouts, on="rollout_id", how="anti").rename({"len": "calls"})
    order = pl.col("cause").is_null()
    finalised = rollouts.sort(order, maintain_order=True).head(most).to_dicts()
    rejected = [row for row in finalised if row["cause"]]
    shown = [*rejected, *waiting.head(most).to_dicts(), *finalised[len(rejected) :]][:most]
    rows = [_rollout_cells(source, row) for row in shown]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in (_ROLLOUT_HEADER, *rows)) for column in range(len(_ROLLOUT_HEADER))]
    lines = ["  " + _line(cells, widths, _ROLLOUT_NUMBERS) for cells in (_ROLLOUT_HEADER, *rows)]
    total = rollouts.height + waiting.height
    if total > len(shown):
        lines.append(f"Showing {len(shown)} of {total:,} rollouts, rejected ones first.")
    return lines


def _rollout_cells(source: Any, row: dict[str, Any]) -> tuple[str, ...]:
    # The tokens of a rejected one are those of its placeholder.
    tokens = None if row.get("cause") else row.get("tokens")
    calls = None if row["calls"] is None else row["calls"] + (row.get("failed_calls") or 0)
    unread = source.unread(row["rollout_id"]) if hasattr(source, "unread") else {}
    state = standing(row | {"unread": "see above" if "train" in unread else None})
    if unread and "cause" not in row:
        state = "cannot be read: see above"
    return (row["rollout_id"], dash(calls, ",d"), dash(tokens, ",d"), dash(row.get("reward"), ".3f"), state)


def _line(cells: tuple[str, ...], widths: list[int], right: range) -> str:
    return "  ".join(
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
