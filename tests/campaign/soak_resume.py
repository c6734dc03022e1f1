"""A run that is killed and resumed is the run that was never killed: same groups, same steps, same weights.

Four starts of a whole scripted campaign, so it belongs to `make soak`; `make test` has test_resume, where the
run is stopped, not killed, and the Ray shared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest
from safetensors.torch import load_file

from workbench import models, runs
from workbench.campaign.left_off import read_left_off
from workbench.campaign.verify import verify_run

CASE = Path(__file__).with_name("resume_case.py")
ENDS_WITHIN_S = 180.0


class Segment:
    """One process tree that runs a campaign; every process of it carries a mark in its environment."""

    def __init__(self, run_dir: Path, how: str, *overrides: str, **environment: str) -> None:
        models.build("tiny")
        self.run_dir = run_dir
        self.mark = f"RESUME_CASE={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        path = os.pathsep.join([str(CASE.parents[1]), *(entry for entry in sys.path if entry)])
        self.process = subprocess.Popen(
            [sys.executable, str(CASE), str(run_dir), how, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, name: value, **environment},
        )

    def until(self, condition) -> None:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, self.events()[-3:]
            time.sleep(0.05)

    def end(self) -> None:
        out, _ = self.process.communicate(timeout=ENDS_WITHIN_S)
        assert self.process.returncode == 0, out

    def kill_the_whole_tree(self) -> None:
        """SIGKILL to everything at once, until nothing is left."""
        deadline = time.monotonic() + 30
        while alive := self.processes():
            for process in alive:
                process.send_signal(signal.SIGKILL)
            assert time.monotonic() < deadline, alive
            self.process.poll()
            time.sleep(0.05)
        self.process.communicate()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def events(self) -> list[dict]:
        return events(self.run_dir)


def events(run_dir, kind=None):
    try:
        lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith(b"}")]
    return [event for event in found if kind in (None, event["kind"])]


def finished_groups(run_dir):
    return {path.stem for path in (run_dir / "receipts").glob("*.jsonl")}


def tear(run_dir):
    """What a process that was killed in mid-append leaves at the end of its files."""
    for name in ("events", "groups", "steps"):
        with (run_dir / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"kind": "group_sta')


def trained_rows(run_dir):
    """(step, group, index, token ids, advantage) of every row that was trained on, in the order of the batches."""
    run = runs.open(run_dir)
    rows = pl.concat([pl.read_parquet(path) for path in sorted((run_dir / "rows").glob("*.parquet"))])
    ids = dict(zip(rows["rollout_id"], rows["token_ids"].to_list(), strict=True))
    parts = [pl.read_parquet(run_dir / "train" / f"step-{step}.parquet") for step in run.steps["step"]]
    return [
        (row["step"], row["group_id"], row["index"], ids[row["rollout_id"]], row["advantage"])
        for part in parts
        for row in part.iter_rows(named=True)
    ]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_run_killed_twice_equals_the_run_that_was_never_killed(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    Segment(whole, "start").end()

    # Killed while group 1 is being sampled; the groups around it are finished and wait for it.
    first = Segment(stopped, "start")
    first.until(lambda: finished_groups(stopped) == {"g00000", "g00002", "g00003"})
    first.until(lambda: len((stopped / "groups.jsonl").read_bytes().splitlines()) == 3)
    first.kill_the_whole_tree()
    tear(stopped)
    assert runs.open(stopped).campaign["state"].to_list() == ["stopped"]

    # Killed after step 2 was taken, before its weights are proved and anything is recorded of it.
    second = Segment(stopped, "go_on", HOLD_AT_VERSION="2")
    second.until((stopped / "train" / "step-2.parquet").exists)
    second.kill_the_whole_tree()
    tear(stopped)
    assert read_left_off(stopped).unrecorded == {2: ["g00002", "g00003"]}

    Segment(stopped, "go_on").end()
    first_resume, second_resume = events(stopped, "resumed")
    assert (first_resume["after_step"], first_resume["steps_taken_again"]) == (0, [])
    assert first_resume["groups_published_again"] == ["g00000", "g00002", "g00003"]
    assert first_resume["groups_sampled_again"] == ["g00001"]
    assert (second_resume["after_step"], second_resume["checkpoint"]) == (2, 1)
    assert second_resume["steps_taken_again"] == [2]

    run, unstopped = runs.open(stopped), runs.open(whole)
    assert run.campaign["state"].to_list() == ["done"] and run.status["resumed"] == 2
    assert run.steps["step"].to_list() == run.steps["weight_version"].to_list() == [1, 2, 3, 4]
    for column in ("group_ids", "reward_mean"):
        assert run.steps[column].to_list() == unstopped.steps[column].to_list()
    np.testing.assert_allclose(run.steps["grad_norm"], unstopped.steps["grad_norm"], rtol=1e-4)
    # Every row of every group once, with the tokens of the run that was not stopped.
    assert trained_rows(stopped) == trained_rows(whole)
    assert run.groups["group_id"].is_unique().all() and run.rollouts["rollout_id"].is_unique().all()
    assert run.rollouts.height == unstopped.rollouts.height == 16
    assert [r for r in run.rollouts["rollout_id"] if r.startswith("stopped.1.")] == ["stopped.1.0.1", "stopped.1.1.1"]
    assert verify_run(stopped).ok and not list(stopped.rglob("*.tmp"))
    (left, right), start = ([load_file(d / "weights/v4/model.safetensors") for d in (stopped, whole)], None)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-6, err_msg=name)
    start = load_file(models.resolve("tiny") / "model.safetensors")
    assert max(float((left[name] - start[name]).abs().max()) for name in left) > 1e-3
