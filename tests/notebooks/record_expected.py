"""Record expected: execute the shipped notebooks and keep what their checked cells say.

    python tests/notebooks/record_expected.py [NAME…]

A cell tagged `nbval-check-output` is compared with what is kept here; all others only have to run. Inspectors show
their static form, as in a report. Pictures are left out: their numbers stand in the text that is kept.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from workbench.campaign.report.kernel import OwnKernel
from workbench.places import shipped

HERE = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(path.name for path in shipped("notebooks").glob("*.ipynb")))
CHECKED = "nbval-check-output"
TIMEOUT_S = 100


def environment() -> dict[str, str]:
    """What a kernel of these tests is told: this very checkout, and static views."""
    return {
        **os.environ,
        "WORKBENCH_DISPLAY": "static",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def execute(name: str) -> nbformat.NotebookNode:
    """One shipped notebook, executed as it is. Raises nbclient's CellExecutionError for a cell that fails."""
    return execute_notebook(nbformat.read(shipped("notebooks") / name, as_version=4))


def execute_notebook(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """`notebook` itself, executed."""
    kernel = OwnKernel()
    client = NotebookClient(
        notebook, km=kernel.manager, timeout=TIMEOUT_S, store_widget_state=False, coalesce_streams=True
    )
    try:
        client.execute(env=environment())
    finally:
        kernel.end()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.pop("language_info", None)
    return notebook


class Executed:
    """The shipped notebooks, executed into a folder, each once and when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            nbformat.write(execute(name), path)
        return path

    def all(self) -> dict[str, Path]:
        """All of them, two at a time."""
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(NOTEBOOKS, pool.map(self.__getitem__, NOTEBOOKS), strict=True))


def is_checked(cell: nbformat.NotebookNode) -> bool:
    return cell.cell_type == "code" and CHECKED in cell.metadata.get("tags", [])


def kept_of(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The expected form of an executed notebook: the text of checked cells, and no other output."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if is_checked(cell) and output.output_type != "error"]
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
            output.get("metadata", {}).pop("image/png", None)
    return notebook


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NOTEBOOKS:
        path = HERE / "expected" / chosen
        path.parent.mkdir(exist_ok=True)
        nbformat.write(kept_of(execute(chosen)), path)
        print(path)
