"""Places: where the recipes and notebooks that come with the package lie, and where models are kept.

In a checkout, and so in an editable installation, `recipes/` and `notebooks/` stand beside the package; in a wheel
they ride inside it under `share/`. Everything that opens one of them asks here. Not here: run directories
(`reports.dir` of the recipe) and files inside a package room (`importlib.resources` finds those).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from workbench.errors import SetupError

MARK = "WORKBENCH_RUN_MARK"
"""Environment variable that every process of a run carries, so that all of them can be found."""

# Ray's socket paths lie under its temporary directory and must stay below 107 bytes, so it is here whatever TMPDIR is.
_RAY_PARENT = Path("/tmp")
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


def home() -> Path:
    """Where models are kept: `$WORKBENCH_HOME`, else `~/.cache/workbench`. May not exist yet."""
    return Path(os.environ.get("WORKBENCH_HOME") or Path.home() / ".cache" / "workbench").expanduser()


def make_ray_directory() -> Path:
    """A new temporary directory for Ray, with the run's mark in its name where there is one."""
    return Path(tempfile.mkdtemp(prefix=_ray_prefix(os.environ.get(MARK, "")), dir=_RAY_PARENT))


def ray_directories(mark: str) -> list[Path]:
    """What the run of that mark has left of `make_ray_directory`, when it was killed."""
    return sorted(_RAY_PARENT.glob(f"{_ray_prefix(mark)}*"))


def _ray_prefix(mark: str) -> str:
    return f"wb-ray-{mark[:8]}-"
