"""Processes of a run: all that carry its mark are ended, those too that do not listen, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from workbench.campaign.processes import end_marked, marked
from workbench.places import MARK

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def start():
    started = []

    def start(mark):
        process = subprocess.Popen(
            [sys.executable, "-c", DEAF], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_a_process_that_does_not_listen_is_killed_and_no_other_runs(start):
    mine, others = start("mark-of-this-run"), start("mark-of-another-run")
    assert end_marked("mark-of-this-run", grace_s=0.2) == 1
    assert mine.wait(10) == -signal.SIGKILL
    assert marked("mark-of-this-run") == [] and [p.pid for p in marked("mark-of-another-run")] == [others.pid]
    assert end_marked("mark-of-this-run", grace_s=0.2) == 0
