"""Record expected: execute the shipped notebooks and keep what their checked cells say.

    python tests/notebooks/record_expected.py

A cell tagged `nbval-check-output` is compared with what is kept here; all others only have to run. Pictures are left
out: their numbers stand in the text that is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from workbench.campaign.kernel import OwnKernel
from workbench.places import shipped

HERE = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(path.name for path in shipped("notebooks").glob("*.ipynb")))
CHECKED = "nbval-check-output"


def record(name: str) -> Path:
    """Execute one notebook and write its expected form."""
    notebook = nbformat.read(shipped("notebooks") / name, as_version=4)
    kernel = OwnKernel()
    try:
        NotebookClient(notebook, km=kernel.manager, store_widget_state=False, coalesce_streams=True).execute()
    finally:
        kernel.end()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        kept = cell.outputs if CHECKED in cell.metadata.get("tags", []) else []
        cell.outputs = [output for output in kept if output.output_type != "error"]
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
            output.get("metadata", {}).pop("image/png", None)
    notebook.metadata.pop("language_info", None)
    path = HERE / "expected" / name
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    for name in NOTEBOOKS:
        print(record(name))
