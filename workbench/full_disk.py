"""Full disk: one sentence for it, wherever a file could not be written for want of room.

In: the error of a write, from the system, Arrow or safetensors. Out: `DiskFull`, with the file, what is free, and what
to do. Not here: other faults of a disk; their own words pass.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import DiskFull

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def told_when_full(path: Path, takes_bytes: int | None = None) -> Iterator[None]:
    """Raise DiskFull where the block writes to `path`, or a draft of it, and there is no room.

    `takes_bytes`: how much it needs; None where nobody knows.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise DiskFull(words(path, takes_bytes)) from error


def is_full(error: Exception) -> bool:
    """Whether it is about a disk or a quota that is used up; safetensors puts the system's number into words."""
    said = str(error)
    return getattr(error, "errno", None) in NO_ROOM or any(f"(os error {number})" in said for number in NO_ROOM)


def words(path: Path, takes_bytes: int | None = None) -> str:
    """What is full, and the next step."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    wanted = "could not be written" if takes_bytes is None else f"takes {takes_bytes / 1e6:,.1f} MB"
    return (
        f"the disk is full: {path} {wanted}, and {shutil.disk_usage(there).free / 1e6:,.1f} MB are free there. "
        "Next: make room there, then go on with the run: workbench resume."
    )
