"""Condition: what a run says of itself, and whether somebody still writes it.

In: a run directory. Out: its status, its recipe, whether a writer holds it. Invariant: only reads; what is missing or
cannot be parsed is said as such, not raised, because a crashed run must open. A run's state is told in these words
everywhere, stored or shown:

    running      somebody writes it
    done         it came to its end; of a served run: it was stopped while it served
    failed       an error ended it
    stopped      somebody or something ended it: Ctrl-C, a signal, a kill, a machine that went down
    unreadable   nobody writes it, and what it last said of itself cannot be read
"""

from __future__ import annotations

import fcntl
from functools import cache
from pathlib import Path
from typing import Any

import orjson

ENDED = ("done", "failed", "stopped")
_OLD_WORDS = {"killed": "stopped"}
"""Runs that were stored before 0.1.0 say so."""


def read_status(run_dir: Path) -> dict[str, Any]:
    """What the campaign last said of itself; `{}` before it has said anything, or where that cannot be read."""
    return _stored_status(run_dir) or {}


def broken_status(run_dir: Path) -> list[str]:
    """One sentence where what the campaign last said of itself cannot be read."""
    return [f"{run_dir / 'status.json'} is not a readable JSON object"] if _stored_status(run_dir) is None else []


def state_of(run_dir: Path) -> tuple[str, str | None]:
    """What became of a run (`state` of table campaigns), and what ended it, where something did."""
    status = read_status(run_dir)
    if status.get("status") in ENDED:
        return str(status["status"]), status.get("error")
    if is_being_written(run_dir):
        return "running", status.get("error")
    if broken_status(run_dir):
        return "unreadable", "status.json cannot be read, so how the run ended is not known"
    return "stopped", status.get("error") or "the process that wrote this run is gone"


def _stored_status(run_dir: Path) -> dict[str, Any] | None:
    """`{}` where none was stored, None for what is none."""
    try:
        tree = orjson.loads((run_dir / "status.json").read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(tree, dict):
        return None
    word = tree.get("status")
    return tree | {"status": _OLD_WORDS[word]} if isinstance(word, str) and word in _OLD_WORDS else tree


def read_recipe(run_dir: Path) -> dict[str, Any] | None:
    """The recipe as the run stored it; `{}` where it stored none, None for a file that is no recipe."""
    stored = _stored_recipe(run_dir)
    return None if isinstance(stored, str) else stored


def broken_recipe(run_dir: Path) -> list[str]:
    """One sentence where the recipe that the run stored cannot be read."""
    stored = _stored_recipe(run_dir)
    return [f"{run_dir / 'recipe.yaml'} {stored}"] if isinstance(stored, str) else []


def _stored_recipe(run_dir: Path) -> dict[str, Any] | str:
    """`{}` where none was stored, words for what is none."""
    import yaml

    try:
        tree = yaml.load((run_dir / "recipe.yaml").read_text(), _loader())
    except FileNotFoundError:
        return {}
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        return f"is not YAML ({error.problem}{at})"
    except (yaml.YAMLError, ValueError) as error:  # `!!int x` is a ValueError
        return f"is not YAML ({' '.join(str(error).split())})"
    return tree if isinstance(tree, dict) else f"is no recipe (expected keys and values, got {type(tree).__name__})"


@cache
def _loader() -> Any:
    """A loader to which a date is text, as it was to OmegaConf when the run began. What `SafeLoader` makes of one
    depends on what else the process has imported: lm-format-enforcer, which comes with vLLM, changes it for all."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    return Loader


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
