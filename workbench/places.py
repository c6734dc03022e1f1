"""Places: where the recipes and notebooks that come with the package lie, and where models are kept.

In a checkout, and so in an editable installation, `recipes/` and `notebooks/` stand beside the package; in a wheel
they ride inside it under `share/`. Everything that opens one of them asks here. Temporary directories of a run are
made here too: a process that is killed leaves its own behind, and the next one that makes one removes it.
Not here: run directories (`reports.dir` of the recipe) and files inside a package room (`importlib.resources` finds
those).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from workbench.errors import SetupError

MARK = "WORKBENCH_RUN_MARK"
"""Environment variable that every process of a run carries, so that all of them can be found."""

# Paths of sockets must stay below 107 bytes, so what holds them is here whatever TMPDIR is.
_SHORT = Path("/tmp")
_RAY, _SERVE = "wb-ray-", "wb-serve-"
_OWNER = "owner"
# Younger ones may belong to a process that has not come as far as locking its own.
_ORPHAN_AFTER_S = 60.0
_owned: list[int] = []  # descriptors of locked files, open as long as this process lives
_PACKAGE = Path(__file__).resolve().parent


def shipped(kind: str) -> Path:
    """The directory of shipped files of one kind: `recipes` or `notebooks`.

    Raises SetupError where the installation lacks it.
    """
    for root in (_PACKAGE.parent, _PACKAGE / "share"):
        # A folder called `recipes` beside site-packages is not ours; beside pyproject.toml it is.
        if root == _PACKAGE.parent and not (root / "pyproject.toml").is_file():
            continue
        if (root / kind).is_dir():
            return root / kind
    raise SetupError(f"No {kind}/ came with this installation of workbench; install it again: pip install -e .[cpu]")


def refuse_shipped(run_dir: Path, next_step: str) -> None:
    """Raise SetupError for a run inside the package: a recording that came with it is read, never written into."""
    if run_dir.resolve().is_relative_to(_PACKAGE):
        raise SetupError(f"{run_dir} came with the package, and nothing is written into that. Next: {next_step}")


def home() -> Path:
    """Where models are kept: `$WORKBENCH_HOME`, else `~/.cache/workbench`. May not exist yet."""
    return Path(os.environ.get("WORKBENCH_HOME") or Path.home() / ".cache" / "workbench").expanduser()


def make_ray_directory() -> Path:
    """A new temporary directory for Ray, with the run's mark in its name where there is one."""
    return _make(_ray_prefix(os.environ.get(MARK, "")))


def make_serve_directory() -> Path:
    """A new directory for the socket of `workbench serve`, open to this user alone."""
    return _make(_SERVE)


def ray_directories(mark: str) -> list[Path]:
    """What the run of that mark has left of `make_ray_directory`, when it was killed."""
    return sorted(_SHORT.glob(f"{_ray_prefix(mark)}*"))


def is_ray_directory(path: Path) -> bool:
    """Whether `make_ray_directory` of this or another process made it."""
    return path.parent == _SHORT and path.name.startswith(_RAY)


def remove_orphans() -> list[Path]:
    """Remove the temporary directories whose process is gone; returns them. What cannot be removed stays."""
    removed = []
    for directory in sorted([*_SHORT.glob(f"{_RAY}*"), *_SHORT.glob(f"{_SERVE}*")]):
        with contextlib.suppress(OSError), (directory / _OWNER).open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < _ORPHAN_AFTER_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails as long as the owner lives
            shutil.rmtree(directory)
            removed.append(directory)
    return removed


def _make(prefix: str) -> Path:
    remove_orphans()
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_SHORT))
    # A lock and not a process id: ids are given again, and a lock ends with its process however that ends.
    descriptor = os.open(directory / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    _owned.append(descriptor)
    return directory


def _ray_prefix(mark: str) -> str:
    return f"{_RAY}{mark[:8]}-"


def as_word(path: Path) -> str:
    """A path as one word of a command line, in quotes where a shell would take it apart."""
    return shlex.quote(str(path))
