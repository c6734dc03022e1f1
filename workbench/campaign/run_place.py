"""Run place: a run's directory before it has a store: a free name for a new one, one runner at a time in it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import SetupError
from workbench.recipe_schema import RUN_NAME
from workbench.runs.writer import refuse_taken


@contextlib.contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Hold the directory itself: the store's own lock comes seconds later, when another runner's recipe and notebook
    would have been written over. Raises SetupError where another process holds it."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SetupError(
                f"{run_dir}: another workbench is at this run. Next: wait for it, stop it, or choose another name."
            ) from error
        except OSError:
            pass  # a file system without locks on directories; the store's own lock is left
        yield
    finally:
        os.close(descriptor)


def is_held(run_dir: Path) -> bool:
    """Whether somebody is `alone_in` it."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def new_run_dir(reports: Path | str, name: str, *, named: bool = False, claim: bool = False) -> Path:
    """A directory name that is free: `name` itself where the user chose it, else `name-1`, `name-2`, …

    `claim` makes the directory of a numbered one, so that nobody who asks at the same time gets the same. Raises
    SetupError when a chosen name is taken, or is a path rather than a name.
    """
    reports = Path(reports)
    if named:
        if not re.fullmatch(RUN_NAME, name):
            allowed = "a name of 1 to 80 letters, digits, _, - and ., no path"
            raise SetupError(f"--run {name}: expected {allowed}; where runs lie is reports.dir")
        refuse_taken(reports / name)
        if (reports / name).exists() and not (reports / name).is_dir():
            raise SetupError(f"{reports / name} is a file, and a run is a directory. Next: choose another name.")
        return reports / name
    if claim:
        reports.mkdir(parents=True, exist_ok=True)  # an error here is none of a name that is taken
    for number in itertools.count(1):
        run_dir = reports / f"{name}-{number}"
        if run_dir.exists():
            continue
        with contextlib.suppress(FileExistsError):
            if claim:
                run_dir.mkdir()
            return run_dir
    raise AssertionError("there is always another number")
