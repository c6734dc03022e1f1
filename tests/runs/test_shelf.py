"""The shelf: all runs of a folder side by side, whatever one of them looks like."""

from __future__ import annotations

import shutil

from workbench import demo
from workbench.runs.shelf import overview, run_directories


def test_a_run_that_cannot_be_read_is_a_line_and_keeps_no_other_from_being_listed(tmp_path):
    shutil.copytree(demo.recorded_run(), tmp_path / "good")
    shutil.copytree(demo.recorded_run(), tmp_path / "torn")
    (tmp_path / "torn" / "steps.jsonl").write_bytes(b"{\n{}\n")
    for part in (tmp_path / "torn" / "rows").iterdir():
        part.write_bytes(b"PAR1")
    table = overview(run_directories(tmp_path))
    good, torn = table.sort("path").iter_rows(named=True)
    assert good["step"] and good["error"] is None
    assert (torn["run"], torn["status"], torn["step"]) == ("torn", "unreadable", None)
    assert "steps.jsonl" in torn["error"] or "rows" in torn["error"]


def test_a_run_itself_is_a_shelf_of_one(tmp_path):
    run = shutil.copytree(demo.recorded_run(), tmp_path / "run")
    assert run_directories(run) == [run]
