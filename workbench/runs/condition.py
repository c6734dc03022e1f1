"""Condition: what a run says of itself, and whether somebody still writes it.

In: a run directory. Out: its status, its recipe, whether a writer holds it. Invariant: only reads; what is missing or
cannot be parsed is said as such, not raised, because a crashed run must open.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import orjson


def read_status(run_dir: Path) -> dict[str, Any]:
    """What the campaign last said of itself; `{}` before it has said anything, or where that cannot be read."""
    try:
        tree = orjson.loads((run_dir / "status.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return tree if isinstance(tree, dict) else {}


def read_recipe(run_dir: Path) -> dict[str, Any] | None:
    """The recipe as the run stored it; `{}` where it stored none, None for a file that is no recipe."""
    import yaml

    try:
        tree = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return tree if isinstance(tree, dict) else None


def is_being_written(run_dir: Path) -> bool:
    """Whether a writer holds its lock on the events file."""
    try:
        with (run_dir / "events.jsonl").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
