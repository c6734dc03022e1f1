"""The sweeper on a live data plane: what nobody works on any more goes, what somebody works on stays."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from chains import Chain
from test_finalizer import plane

from workbench import dataplane
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.errors import DeadlineExceeded
from workbench.finalizer.sweeper import Sweeper
from workbench.wire import StagedCall

__all__ = ["plane"]  # a fixture, taken over from there

pytestmark = pytest.mark.ray


def sweeper(staging, train=frozenset(), *, grace_s=0.0):
    live = {dataplane.STAGING: lambda: staging, dataplane.TRAIN: lambda: train}
    return Sweeper(live, deadline_s=10, every_s=0.05, grace_s=grace_s)


async def stage(rollout_id, calls=2):
    grown = Chain(rollout_id)
    for number in range(calls):
        await TransferQueueSink(10.0).stage_async(grown.call(f"c{number - 1}" if number else None))
    return grown.staged


async def listed(partition=dataplane.STAGING):
    return sorted(await dataplane.tags(partition, deadline_s=10))


async def test_calls_of_a_superseded_attempt_go_and_those_of_the_winning_one_stay(plane):
    await stage("run.4.0.0")  # attempt A, half staged
    winning = await stage("run.4.0.1", 3)
    await stage("run.4.0.0", 3)  # a late commit of A
    assert await sweeper({"run.4.0.1"}).sweep() == 3
    assert await listed() == [f"run.4.0.1/c{i}" for i in range(3)]
    rows = await TransferQueueSource(10.0).fetch([call.staging_key for call in winning])
    assert rows == winning and all(isinstance(row, StagedCall) for row in rows)


async def test_a_key_without_a_row_goes_too(plane):
    await dataplane.put(dataplane.STAGING, ["run.5.0.0/c0"], None, [{"rollout_id": "run.5.0.0"}], deadline_s=10)
    assert await sweeper(set()).sweep() == 1
    assert await listed() == []


async def test_nothing_is_cleared_before_it_has_been_left_behind_for_the_grace(plane):
    await stage("run.6.0.0")
    live = {"run.6.0.0"}
    patient = sweeper(live, grace_s=3600.0)
    assert await patient.sweep() == 0
    live.clear()
    assert await patient.sweep() == 0 and len(await listed()) == 2
    # The time runs from the sweep that first found them.
    left = patient._left_since[dataplane.STAGING]
    left["run.6.0.0/c1"] -= 3601.0
    assert await patient.sweep() == 1 and await listed() == ["run.6.0.0/c0"]


async def test_a_rollout_that_became_live_while_the_keys_were_listed_is_not_touched(plane):
    live: set[str] = set()
    busy = sweeper(live)
    real = dataplane.tags

    async def tags(partition, **options):
        found = await real(partition, **options)
        if partition == dataplane.STAGING:
            live.add("run.7.0.0")
            await stage("run.7.0.0")
        return found

    busy._live = {dataplane.STAGING: lambda: live, dataplane.TRAIN: set}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataplane, "tags", tags)
        assert await busy.sweep() == 0
    assert len(await listed()) == 2


async def test_it_goes_on_after_a_sweep_that_failed(plane):
    await stage("run.8.0.0")
    failing = sweeper(set())
    real, failures = dataplane.clear, []

    async def clear(*arguments, **options):
        if not failures:
            failures.append(1)
            raise RuntimeError("storage is busy")
        await real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataplane, "clear", clear)
        task = asyncio.create_task(failing.run())
        deadline = asyncio.get_running_loop().time() + 20
        while await listed():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
        task.cancel()
    assert failures and failing.swept[dataplane.STAGING] == 2


async def test_a_clear_that_may_go_on_is_given_its_time_before_the_next(monkeypatch):
    """Two clears of one key at the same time can empty a slot that holds somebody else's new row."""
    cleared, clock = [], [0.0]

    async def tags(partition, **options):
        return {"run.9.0.0/c0": {}} if partition == dataplane.STAGING else {}

    async def clear(partition, keys, **options):
        cleared.append(clock[0])
        raise DeadlineExceeded("it goes on in the background")

    monkeypatch.setattr(dataplane, "tags", tags)
    monkeypatch.setattr(dataplane, "clear", clear)
    monkeypatch.setattr("workbench.finalizer.sweeper.time.monotonic", lambda: clock[0])
    slow = sweeper(set(), grace_s=100.0)
    for now in (0.0, 100.0, 101.0, 199.0, 200.0):
        clock[0] = now
        with contextlib.suppress(DeadlineExceeded):
            await slow.sweep()
    assert cleared == [100.0, 200.0]


async def test_at_the_end_both_partitions_are_empty_and_what_is_live_is_counted(plane):
    await stage("run.9.0.0")
    await stage("run.9.1.0")
    await dataplane.put(dataplane.TRAIN, ["run.9.2.0"], None, [{"group_id": "g9"}], deadline_s=10)
    assert await sweeper(set(), grace_s=3600.0).finish(10.0) == {"staging": 0, "train": 0}
    await stage("run.9.3.0")
    assert await sweeper({"run.9.3.0"}).finish(10.0) == {"staging": 2, "train": 0}
