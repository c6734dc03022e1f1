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

from workbench.campaign.verify_run import verify_run
from workbench.demo import recorded_run


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
        ("agreement_suspect", "temperature"),
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
