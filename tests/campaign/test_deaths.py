"""Every part of a campaign killed in its middle: a finalizer is replaced, any other death ends the run in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from campaign.scripted_fleet import Running, scripted_recipe

from workbench import dataplane, runs
from workbench.campaign.verify_run import verify_run
from workbench.errors import ComponentDied

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ENDS_WITHIN_S = 45.0
"""Deadlines of the recipe are a few seconds each; the rest is for slow machines. A wait without an end fails here."""

# part killed -> what the error must say of it
FATAL = {
    "gateway": "gateway",
    "policy worker": "policy worker",
    "trainer": "trainer",
    "TransferQueue's storage unit 0": "storage unit 0",
    "TransferQueue's controller": "TransferQueue's controller",
}


@pytest.fixture
def own_plane(ray_cluster: Any, tiny_model: Path) -> Any:
    """The shared Ray without the shared data plane: a campaign starts and stops its own."""
    shared = dataplane._connected
    if shared:
        dataplane.stop()
    yield
    dataplane.stop()
    if shared:
        dataplane.start(storage_units=2, send_recv_timeout_s=5.0, max_attempts=1, start_timeout_s=90.0)


@pytest.mark.parametrize("part", FATAL)
async def test_a_dead_part_ends_the_run_in_time_with_its_name_and_nothing_left(
    own_plane: Any, tmp_path: Path, part: str
) -> None:
    running = Running(scripted_recipe(tmp_path, "train.steps=200"), tmp_path / "run")
    await running.until_under_way()
    os.kill(running.pids[part], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ComponentDied) as caught:
        await running.task
    seconds = time.monotonic() - began
    assert seconds < ENDS_WITHIN_S, f"{part}: {seconds:.1f} s"
    print(f"\n{part}: {seconds:.1f} s: {caught.value}")
    assert FATAL[part] in str(caught.value) and "in flight" in str(caught.value)
    assert ComponentDied.exit_code != 0
    assert await running.survivors() == []
    run = runs.open(tmp_path / "run")
    assert run.campaign["state"].to_list() == ["failed"]
    assert part.split()[-1] in run.campaign["error"][0]
    report = verify_run(tmp_path / "run")
    assert report.ok and report.groups >= 2, report
