"""Sweeps and lists: what is swept, that nothing starts before all of it is checked, and statuses that are true."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from workbench.campaign.commands.given import checked_recipe
from workbench.campaign.report import sweep as sweeps
from workbench.campaign.report.listing import list_lines, listing
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.progress import describe
from workbench.campaign.report.runner import NotebookResult
from workbench.campaign.report.sweep import plan_sweep, run_sweep, split_axes
from workbench.demo import recorded_run
from workbench.errors import RecipeError, RunStoreError
from workbench.inspect import SweepView
from workbench.runs.sweeps import open_sweep
from workbench.runs.writer import RunWriter


def test_commas_sweep_and_those_in_brackets_or_quotes_belong_to_the_value():
    fixed, axes = split_axes(
        ["seed=1", "train.steps=2, 3", "environment.options={turns: 2, low: 1},{turns: 3}", "a='x,y'"]
    )
    assert fixed == ["seed=1", "a='x,y'"]
    assert axes == {"train.steps": ["2", "3"], "environment.options": ["{turns: 2, low: 1}", "{turns: 3}"]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.steps"], "expected key=value or key=a,b,c"),
        (["train.steps=2"], "nothing to sweep"),
        (["train.steps=2,"], "train.steps: expected different values between the commas"),
        (["train.steps=2,2"], "train.steps: expected different values between the commas"),
        (["train.steps=2,3", "train.steps=4,5"], "train.steps: given twice"),
        (["train.steps=2,x"], "train.steps: expected a whole number ≥ 1, got 'x'"),
        (["train.stps=2,3"], "did you mean train.steps?"),
        (["environment.name=guess_number,guess"], "no environment 'guess'"),
        (["name=a,b"], "name and reports.dir cannot be swept"),
        (["seed=" + ",".join(map(str, range(20))), "train.steps=" + ",".join(map(str, range(1, 12)))], "220 runs"),
    ],
)
def test_a_wrong_sweep_is_one_line_and_nothing_is_made(tmp_path, arguments, expected):
    with pytest.raises(RecipeError) as caught:
        plan_sweep("cpu_smoke", [*arguments, f"reports.dir={tmp_path}"], checked_recipe)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def planned(tmp_path: Path):
    return plan_sweep("cpu_smoke", [f"reports.dir={tmp_path}", "train.steps=2,3", "seed=1,2"], checked_recipe)


class Executes:
    """Stands for the runner: a recorded run for `done`, an unfinished one for `failed` and `stopped`."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, recipe, run_dir: Path) -> NotebookResult:
        self.asked.append((recipe.train.steps, recipe.seed))
        status = self.statuses.pop(0)
        if status == "done":
            shutil.copytree(recorded_run(), run_dir)
        else:
            with RunWriter(run_dir) as writer:
                writer.event("failed")
                writer.status(status=status, run=run_dir.name, error=f"it {status}")
        error = None if status == "done" else f"it {status}"
        outcome = Outcome(status, None if status == "done" else "TrainerError", error)
        codes = {"done": 0, "failed": 1, "stopped": 130}
        return NotebookResult(run_dir / "n.ipynb", run_dir / "n.html", outcome, codes[status], None)


@pytest.fixture
def no_index(monkeypatch):
    written: list[Path] = []
    monkeypatch.setattr(sweeps, "write_index", lambda folder: written.append(folder) or folder / "index.ipynb")
    monkeypatch.setattr(sweeps, "resolve", lambda path: Path(path))
    return written


def test_runs_go_in_order_past_a_failed_one_and_the_index_follows_each(tmp_path, no_index, capsys):
    sweep, recipes = planned(tmp_path)
    execute = Executes("done", "failed", "done", "done")
    assert run_sweep(sweep, recipes, execute) == 1
    assert execute.asked == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert no_index == [sweep.folder] * 4
    assert open_sweep(sweep.folder) == sweep
    view = SweepView(sweep.folder)
    assert view.table["status"].to_list() == ["done", "failed", "done", "done"]
    assert view.table["train.steps"].to_list() == ["2", "2", "3", "3"]
    assert "4 runs over train.steps, seed · 3 done, 1 failed" in view.sentence()
    assert view.snapshot().png is not None and "it failed" in view.html() and "None" not in view.html()


def test_a_sweep_of_runs_without_a_step_says_so_and_of_very_many_the_first_are_drawn(tmp_path, monkeypatch):
    for number in range(3):
        with RunWriter(tmp_path / f"run-{number}") as writer:
            writer.status(status="running", run=f"run-{number}")
    view = SweepView(tmp_path)
    assert "highest reward" not in view.sentence() and view.snapshot().png is not None
    for number in range(3):
        shutil.rmtree(tmp_path / f"run-{number}")
        shutil.copytree(recorded_run(), tmp_path / f"run-{number}")
    monkeypatch.setattr("workbench.inspect.sweep_view._DRAWN", 2)
    assert "The picture shows the first 2 of 3" in SweepView(tmp_path).html()


def test_runs_without_a_reward_have_no_line_and_no_name_for_one(tmp_path):
    for name in ("none", "neither", "one", "other"):
        shutil.copytree(recorded_run(), tmp_path / name)
        if name.startswith("n"):
            path = tmp_path / name / "steps.jsonl"
            lines = [orjson.loads(line) | {"reward_mean": None} for line in path.read_bytes().splitlines()]
            path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (ax,) = SweepView(tmp_path).figure().axes
    assert len(ax.lines) == len(ax.get_legend().get_texts()) == 2
    for name in ("one", "other"):
        shutil.rmtree(tmp_path / name)
    (ax,) = SweepView(tmp_path).figure().axes
    assert [text.get_text() for text in ax.texts] == ["no step of these runs has a reward"]
    assert repr(SweepView(tmp_path)) == "2 runs · 2 done · none has a reward at the last step"
    assert not ax.lines and ax.get_legend() is None and not ax.get_yticks().size


def test_a_stopped_run_ends_its_sweep_and_the_rest_is_not_begun(tmp_path, no_index):
    sweep, recipes = planned(tmp_path)
    assert run_sweep(sweep, recipes, Executes("done", "stopped")) == 130
    assert SweepView(sweep.folder).table["status"].to_list() == ["done", "stopped", "not begun", "not begun"]


def test_the_list_tells_what_truly_became_of_each_run(tmp_path):
    shutil.copytree(recorded_run(), tmp_path / "good")
    for name, status in (("gone", "running"), ("broke", "failed"), ("stopped", "stopped"), ("old", "killed")):
        with RunWriter(tmp_path / name) as writer:
            writer.event("started")
            writer.status(status=status, run=name, resumed=1 if name == "stopped" else 0)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "status.json").write_text("{")
    (tmp_path / "no_run").mkdir()
    with RunWriter(tmp_path / "live") as writer:
        writer.event("started")
        writer.status(status="running", run="live")
        states = {row["run"]: row for row in listing(tmp_path).iter_rows(named=True)}
    assert {name: row["status"] for name, row in states.items() if name != "torn"} == {
        orjson.loads((tmp_path / "good" / "status.json").read_bytes())["run"]: "done",
        "gone": "stopped",
        "broke": "failed",
        "stopped": "stopped",
        "old": "stopped",  # what it was called before 0.1.0
        "live": "running",
    }
    assert states["torn"]["status"] != "done"
    lines = list_lines(listing(tmp_path))
    assert "  resumed 1 ×" in lines and any("the process that wrote this run is gone" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("  ")) < 80
    with pytest.raises(RunStoreError, match="No runs in"):
        listing(tmp_path / "no_run")


def test_a_folder_that_holds_no_sweep_is_named(tmp_path):
    for text in (None, "{", "{}", "[]"):
        if text is not None:
            (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(RunStoreError, match=r"No sweep in .*: sweep\.json is missing or damaged"):
            open_sweep(tmp_path)


def test_the_progress_line_names_groups_rejections_and_what_is_to_go():
    status = {"step": 2, "steps": 6, "phase": "training", "groups": 8, "token_in_rate_after_roots": 1.0}
    said = describe(status | {"reward_mean": 0.5, "rejected": 3, "poisoned": 1, "eta_s": 190.0})
    assert said == (
        "step 2/6 · training · about 3:10 to go · reward 0.500 · 3 rejected · token_in after roots 1 · groups 8"
    )
    assert "to go" not in describe(status | {"eta_s": 0.0})
    why = "the agent raised KeyError: 'score' at my_env.py:31"
    assert f" · 3 rejected, most often: {why} · token_in" in describe(status | {"rejected": 3, "rejected_for": why})
    longest = describe(status | {"rejected": 3, "rejected_for": "{} " * 400})
    assert "()" in longest and len(longest) < 300
