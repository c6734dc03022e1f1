"""Recompute: what a stored run says of its training is what code that shares nothing with ours makes of its rows."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from workbench import demo, models, runs

SCRIPT = Path(__file__).parents[2] / "tools" / "recompute_run.py"


def recompute(*arguments):
    """Runs the script in this process: its exit code and all that it said."""
    heard = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(SCRIPT), *map(str, arguments)]),
        contextlib.redirect_stdout(heard),
        contextlib.redirect_stderr(heard),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    code, said = ended.value.code, heard.getvalue()
    return (1, f"{said}{code}\n") if isinstance(code, str) else (code, said)


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(demo.recorded_run(), tmp_path / "run"))


def test_the_script_shares_no_code_with_what_it_checks():
    assert "import workbench" not in SCRIPT.read_text() and "from workbench" not in SCRIPT.read_text()


@pytest.mark.slow
def test_a_recorded_run_equals_its_recomputation():
    folder = models.build("smollm2-135m")
    command = [sys.executable, str(SCRIPT), str(demo.recorded_run()), "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    at_start = runs.open(demo.recorded_run()).steps["sampled_tokens"][0]
    assert f"logprob {at_start:>24} values" in said and "advantage                     16 values" in said


def test_a_model_that_is_not_there_is_refused(copied, tmp_path):
    code, said = recompute(copied, "--model", tmp_path / "nowhere")
    assert code == 2 and f"no model in {tmp_path / 'nowhere'}: expected the folder" in said


@pytest.mark.parametrize("what", ["advantage", "reward", "loss", "no number"])
def test_a_changed_number_is_seen(copied, what):
    if what == "loss":
        lines = (copied / "steps.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        lines[-1] = json.dumps(last | {"loss": last["loss"] + 1e-4})
        (copied / "steps.jsonl").write_text("\n".join(lines) + "\n")
    else:
        column, added = ("advantage", float("nan")) if what == "no number" else (what, 0.01)
        path = next(iter(sorted((copied / ("rows" if what == "reward" else "train")).glob("*.parquet"))))
        table = pq.read_table(path)
        values = table[column].to_pylist()
        voting = table["sample_mask"].to_pylist().index(1)
        values[voting] += added
        at = table.schema.get_field_index(column)
        pq.write_table(table.set_column(at, column, pa.array(values, table.schema.field(column).type)), path)
    code, said = recompute(copied)
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("loss " if what == "loss" else "advantage ")]
    step = runs.open(copied).steps["step"].max() if what == "loss" else 1
    assert line.endswith(f"BEYOND its bound in step {step}")


@pytest.mark.parametrize("folder", ["rows", "train"])
def test_a_part_that_cannot_be_read_is_one_sentence(copied, folder):
    part = sorted((copied / folder).glob("*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:-40])
    code, said = recompute(copied)
    assert code == 1 and said.startswith(f"{part} cannot be read: ") and said.count("\n") == 1, said


def test_arrays_of_different_lengths_are_one_sentence(copied):
    path = sorted((copied / "train").glob("*.parquet"))[0]
    table = pq.read_table(path)
    at = table.schema.get_field_index("trainer_logprobs")
    cut = pa.array([values[:-1] for values in table["trainer_logprobs"].to_pylist()], table.schema.field(at).type)
    pq.write_table(table.set_column(at, table.schema.field(at), cut), path)
    code, said = recompute(copied)
    assert code == 1 and said.startswith("step 1, rollout ") and "arrays of different lengths" in said, said


def test_a_trained_rollout_without_a_row_is_one_sentence(copied):
    sorted((copied / "rows").glob("*.parquet"))[0].unlink()
    code, said = recompute(copied)
    assert code == 1 and "and no part of rows/ has it" in said and said.count("\n") == 1, said


@pytest.mark.parametrize("policy", ["mask_old", "reject"])
def test_what_old_weights_sampled_is_left_out_as_the_recipe_says(copied, policy):
    """The recorded run overlaps and allows it: under a recipe that does not its record is wrong, and where is said."""
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    for max_lag in (0, 9):
        recipe["train"]["off_policy"] = {"policy": policy, "max_lag": max_lag}
        (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        code, said = recompute(copied)
        lines = [line.split() for line in said.splitlines() if "largest difference" in line]
        differences = {words[0]: float(words[5]) for words in lines}
        assert code == (max_lag == 0), said
        assert (differences["loss_mask"] > 0) == (max_lag == 0)
        assert (differences["advantage"] > 1e-9) == (max_lag == 0 and policy == "reject")


def test_losses_are_compared_where_the_estimator_is_not_known(copied):
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    recipe["train"]["advantage"] = {"name": "gdpo"}
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, said = recompute(copied)
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert code == 0 and "not compared: the recipe's estimator is none of grpo" in lines["advantage"]
    assert "4 values" in lines["loss"]
    steps = [json.loads(line) for line in (copied / "steps.jsonl").read_text().splitlines()]
    steps[1]["loss"] += 0.01
    (copied / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    code, said = recompute(copied)
    assert code == 1 and "BEYOND its bound in step 2" in said


def test_what_nothing_was_compared_of_is_not_said_to_agree(copied):
    code, said = recompute(copied)
    (line,) = [line for line in said.splitlines() if line.startswith("logprob ")]
    assert (
        code == 0 and "not compared: no step has its weights at hand (--model FOLDER" in line and "0.00e+00" not in line
    )
    (copied / "steps.jsonl").write_text("")
    code, said = recompute(copied)
    assert [line.partition(" not compared: ")[2] for line in said.splitlines()] == ["no step has a sampled token"] * 6
