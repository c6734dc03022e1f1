"""What of a run cannot be read is named, and is not taken for what it is not: a call, a stopped run, an empty run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import polars as pl
import pytest
from stored_run import Rollout, StoredRun, make_run

from workbench import runs
from workbench.errors import RunStoreError
from workbench.inspect import CaptureRate, LogprobDelta, PrefixChain, RewardCurve
from workbench.runs.shelf import overview


def test_a_damaged_ledger_is_named_and_adds_no_call(tmp_path):
    path = make_run(tmp_path / "stored")
    whole = runs.open(path).calls
    ledger = path / "ledger" / "stored.0.1.0.lineage.jsonl"
    ledger.write_bytes(b"{broken\n" + b"".join(ledger.read_bytes().splitlines(keepends=True)[1:]))
    run = runs.open(path)
    others = pl.col("rollout_id") != "stored.0.1.0"
    assert run.calls.filter(others).equals(whole.filter(others))
    known = ("model_call_id", "mode", "sampled_tokens", "order")
    assert run.calls.filter(~others).select(known).equals(whole.filter(~others).select(known))
    assert [told.partition(" is not JSON")[0] for told in run.damage] == [f"{ledger}, line 1"]
    assert "1 broken line left out (ledger/stored.0.1.0.lineage.jsonl, line 1 is not JSON" in repr(run)


def test_a_ledger_line_that_is_no_row_is_named_until_the_file_is_another(tmp_path):
    path = make_run(tmp_path / "stored")
    run, ledger = runs.open(path), path / "ledger" / "stored.0.1.0.lineage.jsonl"
    whole, calls = ledger.read_bytes(), run.calls
    assert run.damage == []
    ledger.write_bytes(whole.replace(b'"model_call_id"', b'"model_cal"', 1))
    assert [f"{ledger}, line 1: expected a custody or failure row" in told for told in run.damage] == [True]
    ledger.write_bytes(whole.replace(b'"prev_len":', b'"prev_lem":', 1))
    assert run.calls.height == calls.height and "line 1: call" in run.damage[0]
    ledger.write_bytes(whole)
    assert run.damage == [] and run.calls.equals(calls)


def test_of_a_rollout_in_flight_a_damaged_ledger_is_what_is_said(tmp_path):
    stored = StoredRun(tmp_path / "fly")
    stored.step(1, [["plain"]])
    assert Rollout(stored, "fly.9.0.0").call("yes<|im_end|>", tail="<|im_start|>user\nwell?")
    ledger = tmp_path / "fly" / "ledger" / "fly.9.0.0.lineage.jsonl"
    ledger.write_bytes(b"{broken\n")
    run = runs.open(tmp_path / "fly")
    assert run.calls.filter(rollout_id="fly.9.0.0").is_empty()
    for read in (run.tokens, partial(PrefixChain, run)):
        with pytest.raises(RunStoreError, match=r"of rollout fly.9.0.0 can be read: .*jsonl, line 1 is not JSON"):
            read("fly.9.0.0")
    stored.writer.close()


@pytest.mark.parametrize(
    ("log", "what"),
    [("steps", "2 steps were trained and the run is done"), ("groups", "4 groups were trained and the run is done")],
)
def test_a_log_that_is_lost_is_named_of_a_run_that_is_done(tmp_path, log, what):
    path = make_run(tmp_path / "lost")
    for lose, said in ((lambda file: file.write_bytes(b""), "holds no"), (Path.unlink, "this file is missing, ")):
        lose(path / f"{log}.jsonl")
        run = runs.open(path)
        (told,) = run.damage
        assert told.startswith(f"{path / log}.jsonl: {said}") and what in told
        assert f"1 lost log left out ({log}.jsonl: {said}" in repr(run)
    rollouts = run.rollouts
    valid = rollouts.filter(sample_mask=1).height
    for view in (RewardCurve(run), CaptureRate(run)):
        view.figure()
        lost = f"no line of steps.jsonl names any of {valid} trained rollouts"
        assert (lost in view.sentence()) == (log == "steps")
    assert set(rollouts["taken_step"]) == ({None} if log == "steps" else {1, 2})
    (path / "status.json").write_text('{"status": "stopped", "run": "lost"}')
    assert runs.open(path).damage == []  # it may have been stopped before


def test_a_status_that_cannot_be_read_is_said_and_not_taken_for_a_stopped_run(tmp_path):
    path = make_run(tmp_path / "ended", steps=1)
    status = path / "status.json"
    status.write_bytes(status.read_bytes()[:-9])
    run = runs.open(path)
    assert repr(run).startswith("Run ended · unreadable · 1 step")
    assert run.damage == [f"{status} is not a readable JSON object"]
    assert run.campaign["error"][0] == "status.json cannot be read, so how the run ended is not known"
    assert overview([path]).select("status", "error").row(0) == ("unreadable", run.campaign["error"][0])


def test_log_probs_without_a_damaged_part_say_so(tmp_path):
    path = make_run(tmp_path / "cut")
    assert "LEFT OUT" not in LogprobDelta(runs.open(path)).sentence()
    for step in (1, 2):
        part = path / "train" / f"step-{step}.parquet"
        part.write_bytes(part.read_bytes()[:-3])
        view = LogprobDelta(runs.open(path))
        assert f"damaged part{'s' if step > 1 else ''} LEFT OUT (train/step-1.parquet" in view.sentence()
        assert view.sentence() in re.sub("<[^>]*>", "", view.html())
    assert "its end is missing, or it is no Parquet file" in runs.open(path).damage[0]
