"""The shelf: all runs of a folder side by side, whatever one of them looks like."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from workbench import demo
from workbench.campaign.report.listing import list_lines
from workbench.runs import reader
from workbench.runs.shelf import overview, run_directories


def test_a_run_that_cannot_be_read_is_a_line_and_keeps_no_other_from_being_listed(tmp_path):
    shutil.copytree(demo.recorded_run(), tmp_path / "good")
    shutil.copytree(demo.recorded_run(), tmp_path / "torn")
    (tmp_path / "torn" / "steps.jsonl").write_bytes(b'{"step": 1, "group_ids": 5}\n')
    table = overview(run_directories(tmp_path))
    good, torn = table.sort("path").iter_rows(named=True)
    assert good["step"] and good["error"] is None
    assert (torn["run"], torn["status"], torn["step"]) == ("torn", "unreadable", None)
    assert "group_ids of table steps" in torn["error"]


@pytest.mark.parametrize(("name", "content"), [("recipe.yaml", "model: tiny\n"), ("status.json", '{"resumed": "x"}')])
def test_a_file_of_another_form_keeps_no_other_run_from_being_listed(tmp_path, name, content):
    for run in ("good", "odd"):
        shutil.copytree(demo.recorded_run(), tmp_path / run)
    (tmp_path / "odd" / name).write_text(content)
    assert overview(run_directories(tmp_path)).sort("path")["status"].to_list() == ["done", "unreadable"]


def test_a_run_with_a_damaged_part_is_listed_with_what_is_left_out(tmp_path):
    run = shutil.copytree(demo.recorded_run(), tmp_path / "cut")
    part = sorted((run / "calls").iterdir())[0]
    part.write_bytes(b"PAR1")
    (row,) = overview([run]).iter_rows(named=True)
    assert (row["status"], row["error"]) == (
        "done",
        f"1 damaged part left out (calls/{part.name} is not a readable part of table calls)",
    )


def test_a_served_run_has_no_step_of_a_plan_to_train(tmp_path):
    run = Path(shutil.copytree(demo.recorded_run(), tmp_path / "served"))
    status = orjson.loads((run / "status.json").read_bytes())
    (run / "status.json").write_bytes(orjson.dumps({**status, "command": "serve"}))
    (run / "steps.jsonl").write_bytes(b"")
    table = overview([run])
    assert table.select("step", "steps").row(0) == (None, None)
    rewards = reader.open(run).rollouts.filter(sample_mask=1)["reward"]
    assert table["reward"][0] == pytest.approx(rewards.mean())
    assert list_lines(table)[1].split()[3] == "–"


def test_a_run_itself_is_a_shelf_of_one(tmp_path):
    run = shutil.copytree(demo.recorded_run(), tmp_path / "run")
    assert run_directories(run) == [run]


def test_a_reason_that_is_too_long_for_the_list_ends_between_two_words(tmp_path):
    run = Path(shutil.copytree(demo.recorded_run(), tmp_path / "failed"))
    status = orjson.loads((run / "status.json").read_bytes())
    why = "the trainer ended " + "because of something that nobody expected " * 6
    (run / "status.json").write_bytes(orjson.dumps({**status, "status": "failed", "error": why}))
    told = list_lines(overview([run]))[2].strip().partition("the trainer")
    said = told[1] + told[2]
    assert said.endswith(" …") and len(said) <= 160 and f"{why} ".startswith(f"{said.removesuffix(' …')} ")
