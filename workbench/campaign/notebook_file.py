"""Notebook file: what is checked before a notebook runs, and what is made true in it afterwards.

In: a source notebook and parameters; later the executed file. Out: `check_parameters` refuses an unknown name before
anything heavy starts (papermill only warns, and does not see annotated ones); `set_outcome` writes what really happened
(papermill calls a notebook with a dead kernel "completed", its never-run cells too) and a banner that says so.
Invariant: an executed notebook holds no widget state at all, so it opens everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
from nbformat import NotebookNode

from workbench.errors import RecipeError, SetupError
from workbench.nearest import did_you_mean

Status = Literal["done", "failed", "stopped"]
MAX_BYTES = 2 * 2**20
_BANNER_TAG = "workbench-banner"
_PAPERMILL_TAGS = {"papermill-error-cell-tag"}


@dataclass(frozen=True)
class Outcome:
    """How an execution ended. `error_name` and `error` are None when it was done."""

    status: Status
    error_name: str | None = None
    error: str | None = None

    @property
    def told(self) -> str | None:
        """One sentence: the error, and of which kind it is unless somebody stopped the run."""
        return self.error if self.status == "stopped" or not self.error else f"{self.error_name}: {self.error}"


def parameter_names(notebook: Path) -> list[str]:
    """Names assigned in the cell tagged `parameters`, in order. Raises SetupError when there is no such cell."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            names: list[str] = []
            for node in ast.parse(cell.source).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names.extend(target.id for target in targets if isinstance(target, ast.Name))
            return names
    raise SetupError(f"{notebook} has no cell tagged 'parameters'; papermill could not put the recipe into it")


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Raises RecipeError for a parameter that the notebook does not have, with the nearest one that it has."""
    known = parameter_names(notebook)
    for name in parameters:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecipeError(f"{notebook.name} has no parameter {name!r}{hint} It has: {', '.join(known)}")


def set_outcome(path: Path, outcome: Outcome) -> NotebookNode:
    """Write the true status into an executed notebook, cell by cell, with a banner on top unless it was done.

    Returns the notebook as it now is on disk. Raises SetupError when there is no notebook at `path`.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise SetupError(f"No executed notebook at {path}: {error}") from error
    notebook.cells = [
        cell for cell in notebook.cells if not ({_BANNER_TAG} | _PAPERMILL_TAGS) & set(cell.metadata.get("tags", []))
    ]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    started = [cell for cell in code if cell.metadata.get("papermill", {}).get("start_time")]
    for cell in code:
        cell.metadata.setdefault("papermill", {})["status"] = "completed" if cell in started else "not run"
    if outcome.status != "done" and started:
        started[-1].metadata["papermill"] |= {"status": outcome.status, "exception": True}
    notebook.metadata.setdefault("papermill", {})
    notebook.metadata["papermill"] |= {
        "status": outcome.status,
        "exception": None if outcome.status == "done" else outcome.error_name,
    }
    notebook.metadata.pop("widgets", None)
    for cell in code:
        cell.outputs = [_without_widgets(output) for output in cell.outputs]
    if outcome.status != "done":
        notebook.cells.insert(0, _banner(outcome, ran=len(started), of=len(code)))
    nbformat.write(notebook, path)
    return notebook


def _banner(outcome: Outcome, *, ran: int, of: int) -> NotebookNode:
    what = " ".join((outcome.told or f"{outcome.error_name}: no reason known").split())[:600].replace("<", "&lt;")
    text = (
        f"> **This run {'was stopped' if outcome.status == 'stopped' else 'failed'}** in code cell {ran} of {of}; "
        f"the cells after it were not run.\n>\n> {what}"
    )
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": [_BANNER_TAG]})
    cell["id"] = "workbench-banner"
    return cell


def _without_widgets(output: NotebookNode) -> NotebookNode:
    data = output.get("data")
    if data is not None:
        data.pop("application/vnd.jupyter.widget-view+json", None)
        data.pop("application/vnd.jupyter.widget-state+json", None)
    return output
