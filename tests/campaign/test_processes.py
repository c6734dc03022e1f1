"""Processes of a run: all that carry its mark are ended, those too that do not listen, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

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


STARTS_RAY = """
import asyncio, signal, sys
from pathlib import Path
from workbench.campaign.fleet import Fleet
from workbench.config import load_recipe

async def up():
    await Fleet(load_recipe("cpu_smoke"), Path(sys.argv[1]))._start_ray()
    print("up", flush=True)
    await asyncio.sleep(120)

asyncio.run(up())
"""


@pytest.mark.ray
def test_a_process_that_started_ray_ends_by_sigterm_without_a_dump(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_RAY, str(tmp_path)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM and said == b""
    finally:
        process.kill()
        end_marked(mark)
