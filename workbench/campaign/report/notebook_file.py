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
from typing import Any, Literal, cast

import nbformat
from nbformat import NotebookNode

from workbench.errors import RecipeError, SetupError
from workbench.nearest import did_you_mean
from workbench.runs.condition import state_of

Status = Literal["done", "failed", "stopped", "running", "unreadable"]
_PAST: dict[Status, str] = {
    "done": "came to its end",
    "failed": "failed",
    "stopped": "was stopped",
    "running": "was still going on when this was made",
    "unreadable": "ended, and how cannot be read",
}
MAX_BYTES = 2 * 2**20
_BANNER_TAG = "workbench-banner"
_PAPERMILL_TAGS = {"papermill-error-cell-tag"}


@dataclass(frozen=True)
class Outcome:
    """How an execution, or a run, ended. `error_name` and `error` are None when it was done. Of a run that is known
    from its records alone `error` has the name, too; one that is done and trained nothing has an `error`."""

    status: Status
    error_name: str | None = None
    error: str | None = None

    @classmethod
    def of_run(cls, run_dir: Path) -> Outcome:
        """What became of a run, by its records."""
        state, error = state_of(run_dir)
        return cls(cast(Status, state), None, error)

    @property
    def told(self) -> str | None:
        """One sentence: the error, and of which kind it is unless somebody stopped the run."""
        plain = self.status == "stopped" or self.error_name is None or not self.error
        return self.error if plain else f"{self.error_name}: {self.error}"


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


def read_executed(path: Path) -> NotebookNode:
    """Raises SetupError when there is no notebook at `path`."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise SetupError(f"No executed notebook at {path}: {error}") from error


def set_outcome(
    path: Path,
    outcome: Outcome,
    *,
    of_run: Outcome | None = None,
    rest: NotebookNode | None = None,
    further: str = "",
    stands_at: Path | None = None,
) -> NotebookNode:
    """Write the true status into an executed notebook, cell by cell, with a banner on top unless all is well.

    `of_run` is what became of the run whose records it shows, where that is not told by the execution itself. `rest` is
    the same notebook executed over the records of a run that did not come to its end: what it shows takes the place of
    the cells that were not run; without it the banner ends with `further`.
    `stands_at` is where a draft will stand.
    Returns the notebook as it now is on disk. Raises SetupError when there is no notebook at `path`.
    """
    notebook = read_executed(path)
    notebook.cells = [
        cell for cell in notebook.cells if not ({_BANNER_TAG} | _PAPERMILL_TAGS) & set(cell.metadata.get("tags", []))
    ]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    started = [cell for cell in code if _started(cell)]
    for cell in code:
        cell.metadata.setdefault("papermill", {})["status"] = "completed" if cell in started else "not run"
    if outcome.status != "done" and started:
        started[-1].metadata["papermill"] |= {"status": outcome.status, "exception": True}
    notebook.metadata.setdefault("papermill", {})
    notebook.metadata["papermill"] |= {
        "status": outcome.status,
        "exception": None if outcome.status == "done" else outcome.error_name,
    }
    if stands_at is not None:
        notebook.metadata["papermill"]["output_path"] = str(stands_at)
    notebook.metadata.pop("widgets", None)
    if rest is not None:
        shown = {cell["id"]: cell for cell in rest.cells if cell.cell_type == "code" and _started(cell)}
        notebook.cells = [
            cell if cell in started else _from_records(shown.get(cell["id"], cell)) for cell in notebook.cells
        ]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_without_widgets(output) for output in cell.outputs]
    if outcome.status != "done":
        what = "report" if of_run is not None else "run"
        after = "were not run" if rest is None else "show what it had recorded"
        head = f"**This {what} {_PAST[outcome.status]}** in code cell {len(started)} of {len(code)}; "
        head += f"the cells after it {after}."
        notebook.cells.insert(0, _banner(head, outcome.told or f"{outcome.error_name}: no reason known", further))
    elif of_run is not None and (of_run.told or of_run.status != "done"):
        notebook.cells.insert(0, _banner(_end_of(of_run)))
    nbformat.write(notebook, path)
    return notebook


def in_a_word(outcome: Outcome, of_run: Outcome | None) -> str:
    """The title's word for what became of a run and of the notebook that shows it."""
    if outcome.status != "done" or of_run is None:
        return outcome.status
    return of_run.status + (", nothing trained" if of_run.status == "done" and of_run.error else "")


def _started(cell: NotebookNode) -> bool:
    return bool(cell.metadata.get("papermill", {}).get("start_time"))


def _from_records(cell: NotebookNode) -> NotebookNode:
    if cell.cell_type == "code" and _started(cell):
        cell.metadata["papermill"]["status"] = "from records"
    return cell


def _end_of(run: Outcome) -> str:
    told = run.told or ""
    if run.status == "stopped" and told.startswith("stopped "):
        return f"**This run was stopped** {told.removeprefix('stopped ')}"
    return f"**This run {_PAST[run.status]}**{f': {told}' if told else ''}"


def _banner(*paragraphs: str) -> NotebookNode:
    told = [" ".join(text.split())[:600].replace("<", "&lt;") for text in paragraphs if text]
    cell = nbformat.v4.new_markdown_cell("\n>\n> ".join(["> " + told[0], *told[1:]]), metadata={"tags": [_BANNER_TAG]})
    cell["id"] = "workbench-banner"
    return cell


def _without_widgets(output: NotebookNode) -> NotebookNode:
    data = output.get("data")
    if data is not None:
        data.pop("application/vnd.jupyter.widget-view+json", None)
        data.pop("application/vnd.jupyter.widget-state+json", None)
    return output
