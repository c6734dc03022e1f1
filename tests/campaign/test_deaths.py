"""Every part of a campaign killed in its middle: a finalizer is replaced, any other death ends the run in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from campaign.scripted_fleet import REAL_DEADLINES, Running, own_data_plane, scripted_recipe
from chains import Chain

from workbench import runs
from workbench.campaign.verify_run import verify_run
from workbench.capture.staging import TransferQueueSink
from workbench.errors import ComponentDied

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

ENDS_WITHIN_S = 60.0 if REAL_DEADLINES else 45.0
"""Short deadlines are a few seconds each; the rest is for slow machines. A wait without an end fails here."""

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
    with own_data_plane():
        yield


@pytest.mark.parametrize("part", FATAL)
async def test_a_dead_part_ends_the_run_in_time_with_its_name_and_nothing_left(
    own_plane: Any, tmp_path: Path, part: str
) -> None:
    async with Running(scripted_recipe(tmp_path, "train.steps=200"), tmp_path / "run") as running:
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


@contextlib.contextmanager
def lateness_of_threads() -> Iterator[list[float]]:
    """How late a sleeping thread of this process wakes up: what the machine alone adds to the loop's lateness."""
    late_s: list[float] = []
    stopped = threading.Event()

    def measure() -> None:
        while not stopped.is_set():
            due = time.monotonic() + 0.1
            time.sleep(0.1)
            late_s.append(time.monotonic() - due)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield late_s
    finally:
        stopped.set()
        thread.join()


async def test_a_killed_finalizer_is_replaced_and_the_run_ends_whole(own_plane: Any, tmp_path: Path) -> None:
    # The only one there is, so that the run cannot end before it has been replaced.
    recipe = scripted_recipe(tmp_path, "train.steps=3", "train.groups_per_step=3", "finalizer.actors=1")
    async with Running(recipe, tmp_path / "run") as running:
        with lateness_of_threads() as machine:
            await running.until(lambda: running.events("started"))
            await running.look()
            assert running.fleet is not None
            # A call of a rollout that nobody plays, as an agent leaves behind that gave up.
            for call in ("c0", "c1"):
                await TransferQueueSink(10.0).stage_async(Chain("run.999.0.0").call(call_id=call))
            # Stopped first, so that it is certain to have a group in hand when it is killed.
            os.kill(running.pids["finalizer 0"], signal.SIGSTOP)
            (member,) = running.fleet.finalizers._members
            await running.until(lambda: member.in_hand)
            os.kill(running.pids["finalizer 0"], signal.SIGKILL)
            await running.until(lambda: running.events("finalizer_replaced"))
            await running.look()
            result = await asyncio.wait_for(running.task, 150)
    assert (result.steps, result.weight_version, result.groups_replaced) == (3, 3, 0)
    (lost,) = running.events("finalizer_lost")
    assert lost["in_hand"]
    assert {event["group_id"] for event in running.events("group_reconciled")} == set(lost["in_hand"])

    run = runs.open(tmp_path / "run")
    trained = pl.concat([pl.read_parquet(part) for part in (tmp_path / "run" / "train").glob("*.parquet")])
    assert trained.height == 3 * 3 * 4 and trained["rollout_id"].n_unique() == trained.height
    assert run.rollouts.height == trained.height and set(run.rollouts["sample_mask"]) == {1}
    assert set(run.rollouts["rollout_id"]) == set(trained["rollout_id"])
    (swept,) = running.events("swept")
    assert swept["left"] == {"staging": 0, "train": 0} and swept["cleared"]["staging"] >= 2
    assert verify_run(tmp_path / "run").ok
    (finished,) = running.events("finished")
    # The loop is late by what the machine adds, and by no more than 50 ms of its own.
    assert finished["loop_lag_p99_s"] <= 0.05 + 2 * float(np.quantile(machine, 0.99))
    assert await running.survivors() == []
