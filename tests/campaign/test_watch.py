"""The stall watchdog: what stands still ends the campaign and is named; what is slow and has a deadline does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from campaign.test_sampling import Bench

from workbench.campaign import watch as watching
from workbench.campaign.watch import Watch
from workbench.config import load_recipe
from workbench.errors import DeadlineExceeded, RecipeError

LIMIT_S = 300.0


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def until(self, moment: float) -> None:
        for _ in range(100_000):
            if self.now >= moment:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"the clock stands at {self.now}")


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watching, "time", made)
    monkeypatch.setattr(watching, "asyncio", SimpleNamespace(sleep=made.sleep))
    return made


async def test_what_stands_still_ends_the_campaign_and_is_named(clock):
    watch = Watch(LIMIT_S)
    with watch.doing("g00003", "sampling"), pytest.raises(DeadlineExceeded) as caught:
        await watch.until_stalled()
    assert str(caught.value) == (
        "nothing has moved for 300 s (rollouts.stall_timeout_s); in flight: g00003 (sampling)."
    )
    assert LIMIT_S < clock.now < LIMIT_S + 5


async def test_what_comes_to_its_end_begins_the_clock_again(clock):
    watch = Watch(LIMIT_S)
    stalled = asyncio.create_task(watch.until_stalled())
    await clock.until(200)
    watch.moved()
    await clock.until(499)
    assert not stalled.done()
    with pytest.raises(DeadlineExceeded):
        await stalled


async def test_a_step_that_is_held_to_a_deadline_of_its_own_is_no_stall(clock):
    watch = Watch(LIMIT_S)
    stalled = asyncio.create_task(watch.until_stalled())
    with watch.doing("step 3", "training", bounded=True):
        await clock.until(5000)
        assert not stalled.done()
        watch.moved()
    with pytest.raises(DeadlineExceeded):
        await stalled
    assert clock.now > 5000 + LIMIT_S


async def test_every_rollout_that_ends_has_moved_not_only_the_last_of_its_group():
    bench = Bench("rollouts.max_inflight_rollouts=1", "train.groups_per_step=1", "train.steps=1")
    moved = []
    bench.state.watch.moved = lambda: moved.append(sorted(bench.ended))
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    await asyncio.wait_for(bench.supply.take(1, 0), 10)
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)
    assert [ended[-1] for ended in moved[:3]] == ["run.0.0.0", "run.0.1.0", "run.0.2.0"]


@pytest.mark.parametrize("key", ["rollouts.timeout_s", "finalizer.timeout_s"])
def test_a_limit_that_would_take_what_is_slow_for_a_stall_is_refused(key):
    with pytest.raises(RecipeError, match=rf"rollouts.stall_timeout_s: expected at least {key} \(400\)"):
        load_recipe("cpu_smoke", [f"{key}=400"])
    assert load_recipe("cpu_smoke", [f"{key}=400", "rollouts.stall_timeout_s=400"])
