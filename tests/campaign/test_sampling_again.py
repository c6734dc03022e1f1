"""The rollout pump, when groups were evicted as too stale, and when a stopped run left groups open."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from campaign.test_sampling import Bench

from workbench.campaign import sampling
from workbench.campaign.left_off import OpenGroup
from workbench.errors import ReplayBufferError, first_cause
from workbench.train.samplers import Sampler, Selection

WINDOWED = ("train.sampler.name=windowed", "train.max_staleness=0", "train.groups_per_step=2", "train.steps=2")


@pytest.fixture
def cleared(monkeypatch):
    """Train keys that the pump has removed from the data plane."""
    gone: list[str] = []

    async def clear(keys, *, deadline_s):
        gone.extend(keys)

    monkeypatch.setattr(sampling, "clear_rows", clear)
    return gone


def of_kind(bench, kind):
    return [event["group_id"] for event in bench.events if event["kind"] == kind]


async def test_a_ready_group_that_became_stale_is_cleared_counted_and_replaced(cleared):
    bench = Bench(*WINDOWED)
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    await bench.settle()
    # The weights move on before the step is taken: both groups of the old ones are now too stale for it.
    await bench.versions.confirm(1)
    step = asyncio.create_task(bench.supply.take(2, 1))
    taken = await asyncio.wait_for(step, 10)
    assert of_kind(bench, "group_evicted") == ["g00000", "g00001"] and bench.state.evicted == 2
    assert cleared == [f"run.{group}.{index}.0" for group in (0, 1) for index in range(3)]
    assert {entry.weight_version for entry in taken} == {1}
    # Two for step 2 and two in place of the evicted ones: no step is short of groups.
    assert len(of_kind(bench, "group_started")) == 6
    await asyncio.wait_for(bench.supply.take(2, 1), 10)
    await bench.versions.confirm(2)
    await asyncio.wait_for(pump, 10)


@dataclass(frozen=True)
class NothingIsGoodEnough(Sampler):
    """Gives up every group that is ready, the newest ones too."""

    def select(self, entries, count, version):
        return Selection([], [entry for entry in entries if entry.ready])


async def test_a_sampler_that_gives_up_whatever_comes_ends_the_campaign_with_its_name(cleared):
    bench = Bench(f"train.sampler.name={__name__}:NothingIsGoodEnough", "train.buffer_groups=2")
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    with pytest.raises(ReplayBufferError, match="NothingIsGoodEnough has given up 5 groups at weight version 0"):
        await asyncio.wait_for(bench.supply.take(2, 0), 10)
    pump.cancel()
    await asyncio.wait([pump])


async def test_a_group_evicted_while_it_is_played_is_replaced_at_once_and_cleared_when_it_ends(cleared):
    bench = Bench(*WINDOWED, "train.steps=1", "rollouts.max_inflight_groups=4")
    pump = asyncio.create_task(bench.pump.run())
    await bench.settle()
    bench.versions.version = 1
    step = asyncio.create_task(bench.supply.take(2, 1))
    await bench.settle()
    assert of_kind(bench, "group_evicted") == ["g00000", "g00001"]
    assert of_kind(bench, "group_started") == ["g00000", "g00001", "g00002", "g00003"]
    assert cleared == []  # nothing of theirs has been published yet
    bench.release.set()
    taken = await asyncio.wait_for(step, 10)
    assert [entry.group_id for entry in taken] == ["g00002", "g00003"]
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)
    assert sorted(cleared) == [f"run.{group}.{index}.0" for group in (0, 1) for index in range(3)]
    assert bench.supply.staging() == bench.supply.training() - {k for e in taken for k in e.train_keys} == set()


async def test_groups_that_were_left_open_come_first_in_their_order_and_only_unfinished_ones_are_played(monkeypatch):
    bench = Bench("train.groups_per_step=2", "train.steps=4", "rollouts.max_inflight_groups=4")
    outcomes = {}

    def read_group(run_dir, group_id):
        number = int(group_id[1:])
        rollouts = [sampling.RolloutOutcome(rollout_id=f"run.{number}.{i}.0", index=i) for i in range(3)]
        outcomes[group_id] = rollouts
        return SimpleNamespace(outcomes=rollouts)

    async def republish(request):
        await asyncio.sleep(0.02)  # later than the others: the order must not depend on who is quick
        return await bench.finalize(request)

    monkeypatch.setattr(sampling, "read_group", read_group)
    bench.republish = republish
    bench.release.set()
    left_open = [
        OpenGroup(f"g0000{n}", [f"run.{n}.{i}.0" for i in range(3)], n, 2, finished, recorded=True, weight_version=1)
        for n, finished in ((4, True), (5, False), (6, True))
    ]
    bench.pump._left_open, bench.pump._next_group, bench.pump._steps_done = deque(left_open), 7, 2
    bench.versions.version = 2
    pump = asyncio.create_task(bench.pump.run())
    steps = [await asyncio.wait_for(bench.supply.take(2, 2), 10)]
    await bench.versions.confirm(3)
    steps.append(await asyncio.wait_for(bench.supply.take(2, 3), 10))
    await bench.versions.confirm(4)
    await asyncio.wait_for(pump, 10)
    assert [[entry.group_id for entry in step] for step in steps] == [["g00004", "g00005"], ["g00006", "g00007"]]
    assert set(outcomes) == {"g00004", "g00006"}
    assert sorted(bench.ended) == [*(f"run.5.{i}.2" for i in range(3)), *(f"run.7.{i}.0" for i in range(3))]
    assert steps[0][0].weight_version == 1


async def test_a_group_that_lost_its_parts_since_the_run_was_opened_ends_it_and_frees_its_place(monkeypatch):
    bench = Bench("train.groups_per_step=1", "train.steps=2", "rollouts.max_inflight_groups=1")
    monkeypatch.setattr(sampling, "read_group", lambda run_dir, group_id: None)
    left = OpenGroup("g00004", [f"run.4.{i}.0" for i in range(3)], 4, 2, True, recorded=True, weight_version=1)
    bench.pump._left_open, bench.pump._next_group = deque([left]), 5
    with pytest.raises(BaseExceptionGroup) as ended:
        await asyncio.wait_for(bench.pump.run(), 10)
    assert "g00004 has lost its parts" in str(first_cause(ended.value))
    assert bench.supply.staging() == set()
