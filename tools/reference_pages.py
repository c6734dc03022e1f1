"""Reference pages: what the code declares, as Markdown: recipe keys, causes, the frames' columns, public names.

    python tools/reference_pages.py            # writes docs/reference/*.md
    python tools/reference_pages.py --check    # exit 1 and the names of those that are not what the code says

In: `recipe_schema.Recipe`, `wire.Cause`, `runs.frames_page`, the rooms' exports. Out: four pages. Invariant: nothing in
them is written by hand; a page that differs from its declaration fails a test.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from workbench.config import allowed_in_words
from workbench.recipe_schema import MISSING, Recipe
from workbench.runs import frames_page
from workbench.wire import Cause
from workbench.wire.causes import REASONS

ROOMS = ("wire", "capture", "ledger", "finalizer", "train", "runs", "inspect")
"""Rooms with names for other people's code; what they export is what stays as it is between releases."""
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"

FAMILIES = {
    "custody": "What the ledger and the receipt say.",
    "verification": "What recomputing every digest, length and link shows.",
    "staging": "What went wrong in the worker, or on the way to TransferQueue.",
    "drift": "Why a request continued no recorded call. The rollout's cause is then `unresolved_parent`.",
    "routes": "Routed experts of a mixture-of-experts model.",
}


def recipe_page() -> str:
    """Every key of a recipe: what it takes, what it is when nothing is said, what it means."""
    parts = [
        "# Recipe reference\n\nEvery key, with what it takes, its default, and its meaning. "
        "`workbench recipe show RECIPE` prints the resolved values and where each comes from."
    ]
    top = [row for row in _fields(Recipe) if _section_of(row[1]) is None]
    parts.append(_table(top, ""))
    for name, field in _fields(Recipe):
        if (section := _section_of(field)) is not None:
            parts += _section(name, section)
    return "\n\n".join(parts) + "\n"


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    own = section.__doc__ or ""
    yield f"## {path}" + (f"\n\n{_line(own)}" if own and own != BaseModel.__doc__ else "")
    rows = list(_fields(section))
    if flat := [row for row in rows if _section_of(row[1]) is None]:
        yield _table(flat, f"{path}.")
    for name, field in rows:
        if (below := _section_of(field)) is not None:
            yield from _section(f"{path}.{name}", below)


def _fields(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    yield from section.model_fields.items()


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(rows: list[tuple[str, FieldInfo]], prefix: str) -> str:
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in rows:
        takes = allowed_in_words(f"{prefix}{name}".split("."))
        lines.append(
            f"| `{prefix}{name}` | {_cell(takes)} | {_default(field)} | {_cell(_line(field.description or ''))} |"
        )
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value == MISSING:
        return "must be given"
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


def causes_page() -> str:
    """Every cause by family."""
    parts = [
        "# Causes\n\nEvery rejected rollout has exactly one primary cause; metrics, receipts, events, tables and plots "
        "use these names. `PoisonTable(run)` counts them and shows an example of each."
    ]
    for family, what in FAMILIES.items():
        lines = ["| cause | meaning |", "|---|---|"]
        lines += [f"| `{cause}` | {_cell(cause.explanation)} |" for cause in Cause if cause.family == family]
        parts.append(f"## {family}\n\n{what}\n\n" + "\n".join(lines))
    lines = ["| code | meaning |", "|---|---|", *(f"| `{code}` | {_cell(what)} |" for code, what in REASONS.items())]
    parts.append(
        "## What the witnesses said\n\nNo causes: the parts of `terminal_attribution_reason`, joined by commas. They "
        "are also the `detail` of a rollout whose last call nobody could name; a cause may follow them.\n\n"
        + "\n".join(lines)
    )
    return "\n\n".join(parts) + "\n"


def names_page() -> str:
    """Every public name with the first sentence of its docstring."""
    parts = ["# Public names\n\nWhat these rooms export stays as it is between releases; everything else may move."]
    for room in ROOMS:
        module = importlib.import_module(f"workbench.{room}")
        lines = ["| name | what it is |", "|---|---|"]
        for name in sorted(module.__all__, key=str.lower):
            thing = getattr(module, name)
            documented = inspect.isroutine(thing) or inspect.isclass(thing)
            about = (inspect.getdoc(thing) or "").split("\n\n")[0] if documented else f"constant: {thing!r}"
            lines.append(f"| `{name}` | {_cell(_line(about))} |")
        parts.append(f"## workbench.{room}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    return {
        FOLDER / "recipe.md": recipe_page(),
        FOLDER / "causes.md": causes_page(),
        FOLDER / "frames.md": frames_page.docs(),
        FOLDER / "public_names.md": names_page(),
    }


def stale() -> list[Path]:
    """The pages that are missing or not what the code says."""
    return [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Write the reference pages of docs/ from the code.")
    options.add_argument("--check", action="store_true", help="write nothing; exit 1 with the pages that are stale")
    if options.parse_args().check:
        sys.exit(", ".join(str(path) for path in stale()) or 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page, text in pages().items():
        page.write_text(text)
