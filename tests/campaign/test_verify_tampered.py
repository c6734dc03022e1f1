"""Verification of a run in which somebody has changed a value: each field that a second record knows, one at a time.

The run is the recorded one, a real campaign's.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.summary import summarise
from workbench.campaign.run_place import alone_in
from workbench.campaign.verify import verify_run
from workbench.demo import recorded_run
from workbench.runs.writer import RunWriter, recipe_digest, store_recipe


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return Path(shutil.copytree(recorded_run(), tmp_path / "demo"))


def tamper(path: Path, line: int, field: str, value: Any) -> Any:
    """Set a field, nested by dots, of one line of a JSONL file; returns what it was."""
    lines = path.read_bytes().splitlines()
    row = at = orjson.loads(lines[line])
    *outer, last = (int(name) if name.isdigit() else name for name in field.split("."))
    for name in outer:
        at = at[name]
    was, at[last] = at[last], value
    lines[line] = orjson.dumps(row)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return was


def test_the_run_as_it_was_recorded_holds(run_dir):
    report = verify_run(run_dir)
    assert report.ok and not report.remarks, str(report)


@pytest.mark.parametrize(
    ("field", "value", "rollout"),
    [
        ("step", 3, None),
        ("task_id", "guess_number-7", None),
        ("task_seed", 7, None),
        ("weight_version", 1, None),
        ("rollouts.0.reward", 0.9, "demo.1.0.0"),
        ("rollouts.0.sample_mask", 1, "demo.1.0.0"),
        ("rollouts.1.tokens", 72, "demo.1.1.0"),
        ("rollouts.0.detail", "none", "demo.1.0.0"),
        ("rollouts.0.cause", None, "demo.1.0.0"),
        ("rollouts.3.weight_version_min", 1, "demo.1.3.0"),
    ],
)
def test_a_changed_field_of_a_groups_line_is_named(run_dir, field, value, rollout):
    was = tamper(run_dir / "groups.jsonl", 0, field, value)
    (difference,) = verify_run(run_dir).differences
    assert (difference.file, difference.rollout_id) == ("groups.jsonl", rollout)
    name = field.rpartition(".")[2]
    assert difference.what == f"group g00001: {name} is {value!r}, recomputed {was!r}"


@pytest.mark.parametrize("rollouts", ["rollouts", [], [{"rollout_id": "demo.1.9.0"}], [3]])
def test_other_rollouts_in_a_groups_line_are_named(run_dir, rollouts):
    tamper(run_dir / "groups.jsonl", 0, "rollouts", rollouts)
    (difference,) = verify_run(run_dir).differences
    assert difference.what.startswith("group g00001: rollouts are ") and "'demo.1.3.0'" in difference.what


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_version", 2),
        ("optimizer_stepped", 0),
        ("groups_evicted", 3),
        ("staleness_max", 1),
        ("micro_batches", 2),
        ("padding_tokens", 319),
        ("padding_rate", 0.1),
        ("longest_micro_batch", 853),
        ("agreement.temperature.slope", 1.5),
        ("agreement.shift_by_one.found", True),
        ("agreement.truncated_support.mean", 0.0),
    ],
)
def test_a_changed_field_of_a_steps_line_is_named(run_dir, field, value):
    was = tamper(run_dir / "steps.jsonl", 0, field, value)
    (difference,) = verify_run(run_dir).differences
    assert difference.file == "steps.jsonl"
    said, _, found = difference.what.partition(", recomputed ")
    assert said == f"step 1: {field} is {value!r}" and ast.literal_eval(found) == pytest.approx(was, abs=1e-6)


@pytest.mark.parametrize(("log", "said"), [("steps", "step 4"), ("groups", "group g00003")])
def test_a_doubled_line_is_named(run_dir, log, said):
    path = run_dir / f"{log}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))
    (difference,) = verify_run(run_dir).differences
    assert str(difference) == f"{log}.jsonl: has 2 lines of {said}, expected one"


@pytest.mark.parametrize("line", [0, 2, -1])
def test_an_event_that_is_there_twice_is_named_and_counts_once(run_dir, line):
    path = run_dir / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[line], *lines]))
    (difference,) = verify_run(run_dir).differences
    event = orjson.loads(lines[line])
    what = f"has the event {event['kind']} of {event['at']} another time, with the same fields"
    assert str(difference) == f"events.jsonl: {what}"


def test_a_part_of_the_trainer_that_a_finished_run_has_lost_is_all_that_is_named(run_dir):
    (run_dir / "train" / "step-1.parquet").unlink()
    assert [str(each) for each in verify_run(run_dir).differences] == ["train/step-1.parquet: this part is missing"]


def test_calls_of_a_group_whose_rows_are_lost_are_not_said_to_have_no_receipt(run_dir):
    (run_dir / "rows" / "g00000.parquet").unlink()
    report = verify_run(run_dir)
    assert report.not_compared == [] and "rows/g00000.parquet" in {each.file for each in report.differences}


def test_a_vocabulary_that_a_finished_run_has_lost_is_a_remark_where_a_runner_kept_one(run_dir):
    (run_dir / "vocabulary.json").unlink()
    assert verify_run(run_dir).remarks == []  # a run that no runner made need not have one
    (run_dir / "environment.json").write_text("{}")
    write_summary(run_dir)
    report = verify_run(run_dir)
    (remark,) = report.remarks
    assert report.ok and remark.startswith("vocabulary.json: this file is missing and the run is done")


@pytest.mark.parametrize("name", ["recipe.yaml", "status.json", "events.jsonl"])
def test_a_file_that_a_finished_run_has_lost_is_named(run_dir, name):
    (run_dir / name).unlink()
    named = [str(difference) for difference in verify_run(run_dir).differences]
    assert named == [f"{name}: this file is missing and the run is done"]


def test_a_summary_that_a_finished_run_has_lost_is_a_remark_unless_its_runner_is_still_at_it(run_dir):
    (run_dir / "environment.json").write_text("{}")
    (remark,) = verify_run(run_dir).remarks
    assert remark.startswith("summary.json: this file is missing and the run is done")
    with alone_in(run_dir):
        assert verify_run(run_dir).remarks == []
    write_summary(run_dir)
    report = verify_run(run_dir)
    assert report.ok and report.remarks == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 3),
        ("steps", 5),
        ("weight_version", 3),
        ("groups", 5),
        ("rejected", 2),
        ("token_in_rate", 0.6),
        ("token_in_rate_after_roots", 0.6),
        ("reward_mean", 0.2),
        ("resumed", 1),
        ("status", "stopped"),
    ],
)
def test_a_changed_field_of_the_status_is_named(run_dir, field, value):
    was = tamper(run_dir / "status.json", 0, field, value)
    (difference,) = verify_run(run_dir).differences
    assert str(difference).startswith(f"status.json: {field} is {value!r}, recomputed ")
    assert ast.literal_eval(difference.what.partition("recomputed ")[2]) == pytest.approx(was)


@pytest.mark.parametrize(
    ("kind", "field", "value", "name"),
    [
        ("finished", "weight_version", 3, "weight_version"),
        ("finished", "groups_replaced", 1, "groups_replaced"),
        ("finished", "rejections.unresolved_parent", 4, "rejections"),
        ("rollout_rejected", "cause", "corrupt_digest", "cause"),
        ("rollout_rejected", "detail", "other words", "detail"),
        ("rollout_rejected", "call_id", "none", "call_id"),
        ("rollout_rejected", "group_id", "g00000", "group_id"),
        ("rollout_rejected", "kind", "other", "rollout_rejected"),
    ],
)
def test_a_changed_field_of_an_event_is_named(run_dir, kind, field, value, name):
    path = run_dir / "events.jsonl"
    line = next(n for n, row in enumerate(path.read_bytes().splitlines()) if orjson.loads(row)["kind"] == kind)
    tamper(path, line, field, value)
    (difference,) = verify_run(run_dir).differences
    assert difference.file == "events.jsonl" and name in difference.what
    assert difference.rollout_id == (None if kind == "finished" else "demo.1.0.0")


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("seed: 7\n", "seed: 8\n", "seed is 8, which gives group g00000 the task seed 8000024, and its event has "),
        ("  steps: 4\n", "  steps: 9\n", "train.steps is 9, recomputed 4"),
        ("  groups_per_step: 1\n", "  groups_per_step: 2\n", "train.groups_per_step is 2, recomputed 1"),
        ("  rollouts_per_group: 4\n", "  rollouts_per_group: 5\n", "train.rollouts_per_group is 5, recomputed 4"),
    ],
)
def test_a_recipe_that_another_run_would_have_had_is_named(run_dir, was, now, said):
    recipe = run_dir / "recipe.yaml"
    assert was in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(was, now))
    (difference,) = verify_run(run_dir).differences
    assert difference.file == "recipe.yaml" and difference.what.startswith(said)


def test_any_change_of_a_recipe_whose_digest_the_events_have_is_named(run_dir):
    values = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    store_recipe(run_dir, values)
    with RunWriter(run_dir) as writer:
        writer.event("recipe", recipe_digest=recipe_digest(values))
    assert verify_run(run_dir).ok
    values["train"]["learning_rate"] = 1.0
    store_recipe(run_dir, values)
    (difference,) = verify_run(run_dir).differences
    assert str(difference).startswith(f"recipe.yaml: its SHA-256 is {recipe_digest(values)}, the events give ")


def write_summary(run_dir: Path, **change: Any) -> None:
    summary = summarise(run_dir, notebook=run_dir / "campaign.ipynb", outcome=Outcome("done"), seconds=95.0)
    (run_dir / "summary.json").write_bytes(orjson.dumps(summary.as_dict() | change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "other"),
        ("steps", 5),
        ("weight_version", 3),
        ("groups", 3),
        ("rows_per_group", [4, 4, 4, 5]),
        ("rollouts", 17),
        ("valid_rollouts", 14),
        ("calls", 65),
        ("token_in_rate", 0.51),
        ("ended_early", {"limit": 1}),
        ("rejected", []),
        ("proofs", []),
        ("trained_tokens", 1),
        ("mean_abs_logprob_delta", 0.01),
        ("on_policy_tokens", 1),
        ("reward_first_step", 0.9),
        ("reward_last_step", 0.9),
        ("resumed", 1),
        ("unrecorded_steps", 1),
    ],
)
def test_a_changed_field_of_the_summary_is_named(run_dir, field, value):
    write_summary(run_dir)
    assert verify_run(run_dir).ok
    write_summary(run_dir, **{field: value})
    (difference,) = verify_run(run_dir).differences
    assert str(difference).startswith(f"summary.json: {field} is {value!r}, recomputed ")


def test_a_summary_of_a_finished_run_beside_the_status_of_a_stopped_one_is_named(run_dir):
    with RunWriter(run_dir) as writer:
        writer.event("stopped", reason="interrupted")
        writer.status(run="demo", status="stopped", weight_version=4)
    write_summary(run_dir)
    (difference,) = verify_run(run_dir).differences
    assert str(difference) == "summary.json: status is 'done', recomputed 'stopped'"


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_summary_that_is_none_is_named(run_dir, content):
    (run_dir / "summary.json").write_bytes(content)
    (difference,) = verify_run(run_dir).differences
    assert str(difference).startswith("summary.json: is no summary (")


def test_a_token_that_the_tokenizer_beside_the_weights_spells_otherwise_is_named(run_dir):
    pieces = orjson.loads((run_dir / "vocabulary.json").read_bytes())
    (run_dir / "weights" / "v1").mkdir(parents=True)
    (run_dir / "weights" / "v1" / "tokenizer.json").write_bytes(orjson.dumps(pieces))
    assert verify_run(run_dir).ok
    pieces["pieces"]["17"] = "22"
    (run_dir / "vocabulary.json").write_bytes(orjson.dumps(pieces))
    (difference,) = verify_run(run_dir).differences
    assert str(difference) == "vocabulary.json: pieces.17 is b'\"', the tokenizer gives b'!'"
    (run_dir / "vocabulary.json").write_bytes(b"{}")
    (difference,) = verify_run(run_dir).differences
    assert difference.file == "vocabulary.json" and "holds no vocabulary" in difference.what
