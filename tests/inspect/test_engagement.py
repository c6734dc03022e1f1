"""Engagement: the verdict comes from records; each piece of evidence that is taken away changes it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import orjson
import polars as pl
import pytest
import yaml

from workbench import runs
from workbench.demo import recorded_run
from workbench.inspect import CaptureRate, Engagement
from workbench.inspect.engagement import NONE_VERIFIED, Evidence
from workbench.runs.writer import RunWriter


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded_run(), tmp_path / "run"))


def verdict(run_dir: Path) -> str:
    return Engagement(runs.open(run_dir)).sentence()


def rewrite(path: Path, **changed) -> None:
    frame = pl.read_parquet(path)
    frame.with_columns(**{name: pl.lit(value, frame.schema[name]) for name, value in changed.items()}).write_parquet(
        path
    )


def rewrite_each(folder: Path, **changed) -> None:
    for part in folder.glob("*.parquet"):
        rewrite(part, **changed)


def test_a_captured_run_is_engaged_and_its_first_chain_is_echoed():
    view = Engagement(runs.open(recorded_run()))
    assert view.engaged and view.sentence().startswith("Capture is on, but not for everything: calls staged ")
    assert [each.holds for each in view.evidence] == [True] * 6
    assert len(view.echo) >= 1 and "token_in_rate" in view.html()


def test_what_holds_for_some_calls_is_partly_and_yes_is_said_of_all_alone(run_dir):
    view = Engagement(runs.open(run_dir))
    marks = {each.what: (each.mark, each.found) for each in view.evidence}
    assert marks["calls staged"] == ("partly", "51 of 64")
    assert marks["token_in_rate"] == ("partly", "0.5, after roots 0.7111 (32 of 45)")
    assert marks["writes seen in TransferQueue"][0] == marks["rollouts with captured calls"][0] == "yes"
    assert "13 calls not staged: unresolved_parent 9, request_finished_without" in view.html()

    run = runs.open(run_dir)
    parts = {
        name: getattr(run, name)
        for name in ("campaign", "events", "path", "recipe", "rollouts", "status", "steps", "tokens", "vocabulary")
    }
    whole = Engagement(SimpleNamespace(**parts, calls=run.calls.filter(disposition="staged")))
    assert {each.mark for each in whole.evidence} == {"yes"} and "not staged" not in whole.html()
    assert whole.sentence().startswith("Capture is on: calls staged 51 of 51")


def test_a_setting_is_no_evidence(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump({"token_capture": {"enabled": True}}))
    (run_dir / "status.json").write_text('{"status": "running"}')
    rows = "start-up probe, calls staged, writes seen in TransferQueue, token_in_rate, rollouts with captured calls, "
    with RunWriter(run_dir):
        assert verdict(run_dir).startswith(f"Capture is not shown to be on yet: {rows}")
    assert verdict(run_dir).startswith(f"Capture cannot be shown to be on: {rows}"), "nothing comes any more"


def test_of_calls_that_all_begin_a_conversation_a_rate_has_nothing_to_measure(run_dir):
    rewrite_each(run_dir / "calls", mode="text", disposition="staged", staging="fetched")
    view = Engagement(runs.open(run_dir))
    rate = {each.what: each for each in view.evidence}["token_in_rate"]
    said = (
        f"each of the {runs.open(run_dir).calls.height} calls begins a conversation, none could continue an earlier one"
    )
    assert (rate.mark, rate.found) == ("nothing to measure", said) and view.engaged
    assert view.sentence().startswith("Capture is on: calls staged ") and f"; token_in_rate: {said}" in view.sentence()
    assert "token_in_rate_after_roots has nothing to measure" in repr(CaptureRate(runs.open(run_dir)))


MARKS = {
    "yes": (True, True, True),
    "partly": (True, False, True),
    "NO": (False, True, True),
    "not shown": (None, True, True),
    "nothing to measure": (None, True, False),
}


def test_the_headline_names_what_does_not_hold_under_the_mark_of_its_row_and_nothing_else():
    view = Engagement(runs.open(recorded_run()))
    names = [each.what for each in view.evidence]
    clauses = {"NO": "NOT on: ", "not shown": "not shown: ", "partly": "not for everything: "}
    for marks in itertools.product(MARKS, repeat=len(names)):
        view.evidence = [
            Evidence(name, "so", *MARKS[mark][:2], measurable=MARKS[mark][2])
            for name, mark in zip(names, marks, strict=True)
        ]
        assert tuple(each.mark for each in view.evidence) == marks
        said = view.sentence()
        under = {mark: {name for name, its in zip(names, marks, strict=True) if its == mark} for mark in MARKS}
        assert view.engaged == said.startswith("Capture is on") == (not under["NO"] and not under["not shown"])
        if under["not shown"] and not under["NO"]:
            assert said.startswith(unknown := "Capture cannot be shown to be on: ")
            assert {name for name in names if name in said.removeprefix(unknown)} == under["not shown"]
            continue
        for mark, begins in clauses.items():
            _, found, rest = said.partition(begins)
            named = {name for name in names if name in rest.partition(";")[0]}
            if found:
                assert named == under[mark], said
            elif mark != "partly" or view.engaged:
                assert not under[mark], said


def test_a_probe_that_captured_nothing_is_named(run_dir):
    lines = [orjson.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    next(line for line in lines if line["kind"] == "started")["probe"] = {"capture_enabled": False}
    (run_dir / "events.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert verdict(run_dir) == "Capture is NOT on: start-up probe"


def test_a_served_run_has_its_probe_too(run_dir):
    events = run_dir / "events.jsonl"
    assert b'"kind":"started"' in events.read_bytes()
    events.write_bytes(events.read_bytes().replace(b'"kind":"started"', b'"kind":"serving"'))
    assert verdict(run_dir).startswith("Capture is on, ")


def test_deltas_that_never_came_out_of_transferqueue_are_named(run_dir):
    for part in (run_dir / "calls").glob("*.parquet"):
        rewrite(part, staging="missing_staging_row")
    assert verdict(run_dir) == "Capture is NOT on: writes seen in TransferQueue"


def test_an_empty_manifest_is_named(run_dir):
    part = sorted((run_dir / "rows").glob("*.parquet"))[-1]
    rewrite(part, cause="empty_manifest", sample_mask=0)
    assert verdict(run_dir) == "Capture is NOT on: rollouts with captured calls"


def test_a_first_row_of_other_tokens_is_named(run_dir):
    for part in (run_dir / "rows").glob("*.parquet"):
        rows = pl.read_parquet(part)
        changed = rows.with_columns(pl.col("token_ids").list.eval((pl.element() + 1).cast(pl.UInt64)))
        changed.cast(dict(rows.schema)).write_parquet(part)
    assert verdict(run_dir) == "Capture is NOT on: first verified chain"


def test_where_no_rollout_was_verified_it_cannot_be_shown_and_is_not_denied(run_dir):
    for part in (run_dir / "rows").glob("*.parquet"):
        rewrite(part, cause="rollout_failed", sample_mask=0)
    assert verdict(run_dir) == f"Capture cannot be shown to be on: {NONE_VERIFIED}"
    for part in (run_dir / "calls").glob("*.parquet"):
        rewrite(part, disposition="failed", staging=None)
    assert verdict(run_dir).startswith("Capture is NOT on: calls staged")


def test_the_echo_arm_says_that_nothing_is_staged(run_dir):
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    recipe["token_capture"]["enabled"] = False
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    view = Engagement(runs.open(run_dir))
    assert not view.engaged and "token-echo arm" in view.sentence()


def test_rollouts_that_never_made_a_call_show_nothing_about_manifests(run_dir):
    for part in (run_dir / "rows").glob("*.parquet"):
        rewrite(part, calls=0, cause="rollout_failed", sample_mask=0)
    shown = {each.what: each for each in Engagement(runs.open(run_dir)).evidence}["rollouts with captured calls"]
    assert (shown.holds, shown.found) == (None, "0 of 16")
