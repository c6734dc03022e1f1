"""Finding: which directory a path or a run's name means, and what to say where it means none.

    find("reports/first")   find("first")       from the working directory, else from a folder above it

A notebook's kernel works in the notebook's own folder and a terminal anywhere in a checkout; the same path means the
same run in both. Invariant: what is there under the path as given is never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from os.path import relpath
from pathlib import Path

from workbench.nearest import did_you_mean
from workbench.recipe_schema import Reports

MARKS = ("status.json", "events.jsonl", "steps.jsonl", "groups.jsonl")
"""Files of which a run has at least one."""
_SHOWN = 5


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run, finished or not."""
    return directory.is_dir() and any((directory / mark).exists() for mark in MARKS)


def find(path: str | PathLike[str], fits: Callable[[Path], bool]) -> Path:
    """`path` where something is there; else the first place under which it fits, from here upwards.

    A bare name is also looked for in the reports directory of each of these folders. Where nothing fits, the path as
    it was given, or inside the reports directory where that is here and the path is a bare name.
    """
    given, here = Path(path), Path.cwd()
    if given.exists() or given.is_absolute():
        return given
    for folder in (here, *here.parents):
        for place in _places(given):
            if fits(folder / place):
                return Path(relpath(folder / place))
    inside = Path(Reports().dir) / given
    return inside if given.name == str(path) and inside.parent.is_dir() else given


def _places(given: Path) -> Iterator[Path]:
    yield given
    if len(given.parts) == 1:
        yield Path(Reports().dir) / given


def no_run(directory: Path) -> str:
    """One sentence about a directory that is no run: what is there, which runs are near, what to do."""
    if directory.is_dir():
        inside = _runs_in(directory)
        if inside:
            return f"No run in {directory} itself, but below it: {_listed(inside)}; name one of them."
        found = f"expected one of {', '.join(MARKS)} there"
    else:
        found = "that is a file, and a run is a directory" if directory.exists() else "there is no such directory"
    beside = _runs_in(find(directory.parent, lambda folder: bool(_runs_in(folder))))
    near = did_you_mean(directory.name, beside)
    if near != ".":
        return f"No run in {directory}: {found}{near}"
    where = f"runs beside it: {_listed(beside)}" if beside else "name a run's directory, such as reports/first"
    return f"No run in {directory}: {found}; {where}"


def _runs_in(folder: Path) -> list[str]:
    return sorted(mark.parent.name for mark in folder.glob("*/status.json"))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
