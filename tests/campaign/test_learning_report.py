"""Learning report: four stored runs become one verdict; what did not learn, or cannot be compared, is said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from workbench.config import load_recipe
from workbench.runs.writer import RunWriter, store_recipe

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "learning_report.py"
RISING = [0.2, 0.3] * 10 + [0.5, 0.6] * 10
LEVEL = [0.2, 0.3] * 20


@pytest.fixture
def run(tmp_path):
    """A factory of stored runs: a recipe, and one line a step with this reward."""

    def make(name, rewards, recipe="cpu_learns", *overrides):
        folder = tmp_path / name
        folder.mkdir()
        store_recipe(folder, load_recipe(recipe, overrides).model_dump(mode="json"))
        with RunWriter(folder) as writer:
            writer.status(status="running", phase="set-up", run=name)
            writer.event("started")
            for step, reward in enumerate(rewards, start=1):
                kept = {"valid_row_rate": 1.0, "token_in_rate_after_roots": 1.0, "gen_kl_error": 0.001}
                writer.step({"step": step, "reward_mean": reward, "proof_mean_abs_delta": 0.04, **kept})
            writer.event("finished")
            writer.status(status="done", phase="done")
        return str(folder)

    return make


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Runs the tool; its exit code and the folder it wrote."""
    spec = importlib.util.spec_from_file_location("learning_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(*arguments):
        monkeypatch.setattr("sys.argv", ["learning_report.py", *arguments, "--out", str(tmp_path / "out")])
        return module.main(), tmp_path / "out"

    return make


def test_three_seeds_that_rise_and_a_level_control_have_learned(run, report):
    seeds = [run(f"s{n}", [r + 0.01 * n * (i > 20) for i, r in enumerate(RISING)], "cpu_learns", f"seed={n}")
             for n in (1, 2, 3)]  # fmt: skip
    code, out = report(*seeds, "--control", run("flat", LEVEL, "cpu_learns_control"))
    summary = json.loads((out / "summary.json").read_text())
    assert code == 0 and summary["learned"] and summary["control_flat"]
    assert summary["over_seeds"]["mean"] == pytest.approx(0.32, abs=1e-6)
    assert [len(one["rewards"]) for one in (*summary["runs"], *summary["controls"])] == [40] * 4
    page = (out / "README.md").read_text()
    assert "+0.320" in page and "it learned" in page and "flat" in page
    assert (out / "learning.svg").stat().st_size < 200_000


def test_a_control_that_rises_too_is_no_proof(run, report):
    seeds = [run(f"s{n}", RISING, "cpu_learns", f"seed={n}") for n in (1, 2)]
    code, out = report(*seeds, "--control", run("rising", RISING, "cpu_learns_control"))
    assert code == 1 and "not flat" in (out / "README.md").read_text()


def test_several_controls_are_judged_by_what_differs_between_them(run, report):
    """Each drifts at random, one significantly so by its own steps; together they have no direction."""
    seeds = [run(f"s{n}", RISING, "cpu_learns", f"seed={n}") for n in (1, 2)]
    drifts = [[0.25 + slope * step / 40 for step in range(40)] for slope in (-0.1, 0.02, 0.05)]
    controls = [run(f"c{n}", rewards, "cpu_learns_control", f"seed={n}") for n, rewards in enumerate(drifts)]
    code, out = report(*seeds, "--control", *controls)
    summary = json.loads((out / "summary.json").read_text())
    assert code == 0 and summary["controls"][0]["rise"]["upper"] < 0 < summary["over_controls"]["upper"]
    assert summary["over_controls"]["mean"] == pytest.approx(-0.0075, abs=1e-3)
    assert "over runs" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("rewards", "override", "said"),
    [
        (RISING[:20], "seed=2", "has taken 20 of 40 steps"),
        (RISING, "train.learning_rate=1e-6", "differ in more than seed, name and deadlines"),
        (RISING, "seed=1", r"seed 1 is there more than once \(s1, s2\)"),
        (RISING, "train.advantage.shuffle=true", "the control must have train.advantage.shuffle, and the others must"),
    ],
)
def test_runs_that_cannot_be_put_together_are_refused(run, report, rewards, override, said):
    seeds = [run("s1", RISING), run("s2", rewards, "cpu_learns", override)]
    with pytest.raises(SystemExit, match=said):
        report(*seeds, "--control", run("flat", LEVEL, "cpu_learns_control"))


def test_a_step_without_a_valid_row_has_no_reward_and_no_point(run, report):
    gap = [*RISING[:12], *[None] * 7, *RISING[19:]]
    seeds = [run("gap", gap), run("whole", RISING, "cpu_learns", "seed=2")]
    _, out = report(*seeds, "--control", run("flat", LEVEL, "cpu_learns_control"))
    assert json.loads((out / "summary.json").read_text())["runs"][0]["rewards"] == gap
    assert (out / "learning.svg").read_text().startswith("<?xml")
