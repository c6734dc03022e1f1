"""Places: where the recipes and notebooks that come with the package lie, and where models are kept.

In a checkout, and so in an editable installation, `recipes/` and `notebooks/` stand beside the package; in a wheel
they ride inside it under `share/`. Everything that opens one of them asks here. Not here: run directories
(`reports.dir` of the recipe) and files inside a package room (`importlib.resources` finds those).
"""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import SetupError

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
