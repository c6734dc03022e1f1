"""Notebook 02 answers for every rollout of the recorded run, rejected ones and those with failed calls too."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from workbench import runs
from workbench.demo import recorded_run

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_prefix_chain.ipynb"
ROLLOUTS = runs.open(recorded_run()).rollouts["rollout_id"].to_list()


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_the_chain_notebook_runs_for_any_rollout(rollout, capsys, monkeypatch):
    monkeypatch.setenv("WORKBENCH_DISPLAY", "static")
    names: dict[str, object] = {}
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    for source in cells:
        exec(source, names)
        if "rollout = None" in source:
            names["rollout"] = rollout
    assert names["rollout_id"] == rollout
    assert "sampled tokens" in capsys.readouterr().out
