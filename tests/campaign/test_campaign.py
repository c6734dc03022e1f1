"""`workbench run`, whole: one campaign from the command line to its notebook, and one whose engine is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from campaign.loop_time import MOST_OWN_P99_S

from workbench import models, runs
from workbench.campaign.verify import verify_run

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(420)]

STARTS_WITHIN_S = 240.0
ENDS_WITHIN_S = 90.0


SECRETS = {
    name: f"canary-of-{name.lower()}-1f7c" for name in ("WORKBENCH_CONTROL_TOKEN", "WORKBENCH_WORKER_TOKEN", "HF_TOKEN")
}
"""Taken by a run where they are set, made by it otherwise."""


class Command:
    """`workbench run` in a process of its own; `survivors()` are processes of the run that are still there."""

    def __init__(
        self, reports: Path, *overrides: str, recipe: str = "cpu_smoke", python_path: Sequence[str] = ()
    ) -> None:
        models.build("tiny")
        self.run_dir = reports / "smoke"
        self._seen: dict[int, psutil.Process] = {}
        arguments = ["run", recipe, "--run", "smoke", f"reports.dir={reports}", *overrides]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workbench.campaign.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **SECRETS, "PYTHONPATH": os.pathsep.join([*python_path, *filter(None, sys.path)])},
        )

    def look(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self._seen.setdefault(process.pid, process)

    def until_phase(self, *phases: str) -> None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while self.status().get("phase") not in phases:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"never came to {phases}: {self.status()}"
            self.look()
            time.sleep(0.2)
        self.look()

    def status(self) -> dict[str, object]:
        try:
            return json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def end(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.2)
        self.out, self.err = self.process.communicate(timeout=5)
        return self.process.returncode

    def survivors(self) -> list[str]:
        """Names of what outlived the command; a little patience, because the kernel reaps in its own time."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=15)
        return [f"{process.pid} {process.name()}" for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def engine_processes(self) -> list[psutil.Process]:
        return [process for process in self._seen.values() if process.is_running() and "EngineCore" in process.name()]


def test_one_command_trains_and_leaves_a_notebook_and_a_run_that_verifies(tmp_path):
    command = Command(tmp_path)
    assert command.end(STARTS_WITHIN_S + 60) == 0, command.err
    assert command.survivors() == []
    run_dir = command.run_dir
    assert "Run smoke: done" in command.out and str(run_dir / "campaign.ipynb") in command.out

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "done"
    assert (summary["steps"], summary["weight_version"]) == (2, 2)
    assert summary["rows_per_group"] == [4, 4, 4, 4]
    assert summary["token_in_rate_after_roots"] == 1.0
    assert summary["rejected"] == []
    assert [proof["weight_version"] for proof in summary["proofs"]] == [1, 2]
    assert all(proof["mean_abs_delta"] < 0.12 for proof in summary["proofs"])

    run = runs.open(run_dir)
    assert run.campaign["state"].to_list() == ["done"]
    # Nothing that the controller does itself keeps its loop from anything else for longer.
    (finished,) = run.events.filter(kind="finished")["fields"]
    assert json.loads(finished)["loop_lag_own_p99_s"] <= MOST_OWN_P99_S
    assert set(run.calls["mode"]) == {"text", "token_in"}
    assert run.rollouts["terminal_selection"].unique().to_list() == ["response_id"]
    # Staleness is bounded by the recipe, and the second step was sampled from trained or initial weights only.
    assert run.steps["staleness_max"].max() <= 1
    assert verify_run(run_dir).ok
    assert (run_dir / "campaign.ipynb").stat().st_size <= 2_000_000
    assert "<img" in (run_dir / "campaign.html").read_text()
    # The tokens that this run used are in none of its files and in nothing that it said.
    written = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert len(written) > 10
    for secret in map(str.encode, SECRETS.values()):
        assert [path for path, content in written.items() if secret in content] == []
        assert secret not in (command.out + command.err).encode()


NOBODY_IMPORTS_CAPTURE = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name == "workbench.capture" or name.startswith("workbench.capture."):
            raise ImportError(f"{name} is forbidden in this run")

sys.meta_path.insert(0, Forbidden())
"""


def test_the_token_echo_arm_trains_where_capture_cannot_be_imported(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NOBODY_IMPORTS_CAPTURE)
    command = Command(
        tmp_path,
        "token_capture.enabled=false",
        "train.steps=1",
        "environment.misbehave.stream=0.5",
        "environment.misbehave.retry=0.3",
        python_path=[str(site)],
    )
    assert command.end(STARTS_WITHIN_S + 60) == 0, command.err
    assert command.survivors() == []
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["weight_version"]) == ("done", 1, 1)
    assert summary["rows_per_group"] == [4, 4] and summary["rejected"] == []
    assert summary["token_in_rate"] == 0.0
    assert 0 <= summary["echo_wrong_rows"] <= 8
    run = runs.open(command.run_dir)
    assert run.campaign["capture_enabled"].to_list() == [False]
    assert set(run.calls["disposition"]) == {"echoed"}
    report = verify_run(command.run_dir)
    assert report.ok, report
    assert not list((command.run_dir / "ledger").glob("*"))


def test_a_killed_engine_ends_the_run_with_one_line_a_typed_error_and_nothing_left_running(tmp_path):
    command = Command(tmp_path, "train.steps=50", "train.sync_timeout_s=20", "rollouts.timeout_s=20")
    command.until_phase("training", "weight sync", "step done")
    engines = command.engine_processes()
    assert engines, "no engine process was found to kill"
    os.kill(engines[0].pid, signal.SIGKILL)
    assert command.end(ENDS_WITHIN_S) == 1, command.err
    assert command.survivors() == []
    last = command.err.strip().splitlines()[-1]
    status = command.status()
    assert status["status"] == "failed" and "worker" in status["error"]
    # The cause, as the campaign knows it, reaches the terminal and the notebook.
    assert " ".join(status["error"].split()).rstrip(".") in last
    run = runs.open(command.run_dir)
    assert run.campaign["state"].to_list() == ["failed"]
    assert verify_run(command.run_dir).ok
