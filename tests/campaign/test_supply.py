"""Supply: groups live in coroutines, and each of those may be let on, failed or cancelled at any moment.

Whatever happens: a group ends once, no published row is forgotten, nobody waits for room or groups that are there.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from workbench.campaign.supply import Supply
from workbench.train.buffer import ReplayBuffer
from workbench.train.samplers import SAMPLERS, sampler

CAPACITY = 5
WINDOW = 1


def keys(group, n=2):
    return [f"{group}.{i}.0" for i in range(n)]


def ids(entries):
    return [entry.group_id for entry in entries]


class BetweenCoroutines(RuleBasedStateMachine):
    """Groups live in coroutines, as in the controller, and each may be let on, failed or cancelled at any moment."""

    playing = Bundle("playing")

    def __init__(self, name):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.supply = Supply(ReplayBuffer(CAPACITY, sampler(name, WINDOW)))
        self.supply.on_evicted = self._evicted
        self.buffer = self.supply.buffer
        self.version = self.started = 0
        self.tasks: dict[str, asyncio.Task] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.outcome: dict[str, str] = {}  # how each group ended; a second end is an error
        self.steps: list[asyncio.Task] = []
        self.published: set[str] = set()  # keys that must be trained on or cleared, sooner or later

    def teardown(self):
        for task in (*self.tasks.values(), *self.steps):
            task.cancel()
        self._settle()
        # Whatever happened: a group ended once at most, and no published row was forgotten.
        held = {key for entry in self.buffer.groups("ready") for key in entry.train_keys}
        assert self.published == held
        assert not self.buffer.groups("reserved")
        self.loop.close()

    def _settle(self):
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))

    def _ended(self, group, how):
        assert group not in self.outcome, f"{group} was {self.outcome[group]} and is now {how}"
        self.outcome[group] = how

    async def _play(self, group):
        await self.supply.reserve(group, keys(group), lambda: self.version)
        try:
            await self.gates[group].wait()  # agents, then the finalizer
        except asyncio.CancelledError:
            if await asyncio.shield(self.supply.abort(group)) is not None:
                self._ended(group, "cancelled")
            raise
        self.published |= set(keys(group))
        if not await self.supply.commit(SimpleNamespace(group_id=group, train_keys=keys(group)), self.version):
            self.published -= set(keys(group))  # told so: it clears what it has just published

    async def _step(self, count):
        taken = await self.supply.take(count, self.version)
        for entry in taken:
            self._ended(entry.group_id, "trained")
            self.published -= set(entry.train_keys)

    def _evicted(self, gone):
        self._ended(gone.group_id, "evicted")
        self.published -= set(gone.train_keys)

    @rule(target=playing)
    def start_a_group(self):
        group = f"g{self.started}"
        self.started += 1
        self.gates[group] = asyncio.Event()
        self.tasks[group] = self.loop.create_task(self._play(group))
        self._settle()
        return group

    @rule(group=playing)
    def let_it_finish(self, group):
        self.gates[group].set()
        self._settle()

    @rule(group=playing)
    def let_it_finish_and_cancel_it_at_once(self, group):
        self.gates[group].set()
        self.tasks[group].cancel()
        self._settle()

    @rule(group=playing)
    def cancel_it(self, group):
        self.tasks[group].cancel()
        self._settle()

    @rule(count=st.integers(1, 3))
    def wait_for_a_step(self, count):
        if len(self.steps) < 3:
            self.steps.append(self.loop.create_task(self._step(count)))
        self._settle()

    @rule()
    def give_a_step_up(self):
        if self.steps:
            self.steps.pop(0).cancel()
        self._settle()

    @rule()
    def new_version(self):
        self.version += 1

    @invariant()
    def nothing_failed_and_nobody_waits_for_what_is_there(self):
        for task in (*self.tasks.values(), *self.steps):
            assert not task.done() or task.cancelled() or task.exception() is None
        waiting = [g for g, t in self.tasks.items() if not t.done() and self.buffer.state(g) is None]
        assert self.buffer.free == 0 or not waiting
        self.steps = [step for step in self.steps if not step.done()]
        assert len(self.buffer.groups("reserved")) + len(self.buffer.groups("ready")) <= CAPACITY


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_interleaving_of_groups_and_steps(name):
    steps = settings(max_examples=50, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(lambda: BetweenCoroutines(name), settings=steps)


async def test_a_waiting_step_gets_its_groups_and_the_pump_hears_of_the_evicted():
    supply = Supply(ReplayBuffer(3, sampler("windowed", max_staleness=0)))
    gone = []
    supply.on_evicted = gone.append
    for group, version in (("g0", 0), ("g1", 1), ("g2", 1)):
        await supply.reserve(group, keys(group), lambda version=version: version)
    waiting_for_room = asyncio.create_task(supply.reserve("g3", keys("g3"), lambda: 1))
    step = asyncio.create_task(supply.take(2, 1))
    await asyncio.sleep(0)
    for group in ("g0", "g1", "g2"):
        assert not step.done()
        kept = await supply.commit(SimpleNamespace(group_id=group, train_keys=keys(group)), 1)
        assert kept == (group != "g0")
    assert ids(await asyncio.wait_for(step, 5)) == ["g1", "g2"]
    assert ids(gone) == ["g0"]
    await asyncio.wait_for(waiting_for_room, 5)


async def test_a_group_that_waited_for_room_is_of_the_weights_of_the_moment_it_got_it():
    supply = Supply(ReplayBuffer(1, sampler("windowed", max_staleness=1)))
    gone, version = [], 0
    supply.on_evicted = gone.append
    await supply.reserve("g0", keys("g0"), lambda: version)
    waiting_for_room = asyncio.create_task(supply.reserve("g1", keys("g1"), lambda: version))
    await asyncio.sleep(0)
    version = 1
    await supply.commit(SimpleNamespace(group_id="g0", train_keys=keys("g0")), 0)
    assert ids(await asyncio.wait_for(supply.take(1, version), 5)) == ["g0"]
    assert await asyncio.wait_for(waiting_for_room, 5) == 1
    # A step later it lags by one version, which the sampler allows, not by two.
    version = 2
    step = asyncio.create_task(supply.take(1, version))
    await asyncio.sleep(0)
    assert await supply.commit(SimpleNamespace(group_id="g1", train_keys=keys("g1")), 1)
    assert ids(await asyncio.wait_for(step, 5)) == ["g1"] and gone == []
