"""The rollout pump without its fleet: who waits for whom, what a failure leaves behind, what replaces what."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.campaign.environments import Task, task_seed
from workbench.campaign.sampling import RolloutPump
from workbench.campaign.supply import Supply
from workbench.campaign.training import TrainPump
from workbench.campaign.watch import Watch
from workbench.config import load_recipe
from workbench.errors import ComponentDied, GroupsDropped, NothingToTrainOn
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome, RowSummary
from workbench.finalizer.metrics import GroupMetrics
from workbench.train.buffer import ReplayBuffer
from workbench.wire import Cause


class Versions:
    """Weight versions, confirmed by the test."""

    def __init__(self) -> None:
        self.version = 0
        self._changed = asyncio.Condition()

    async def reached(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def confirm(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self._changed.notify_all()


class Bench:
    """A pump whose agents and finalizer do as the test says: they are the fakes, all between them is real."""

    def __init__(self, *overrides: str) -> None:
        self.recipe = load_recipe("cpu_smoke", ["train.rollouts_per_group=3", *overrides])
        self.events: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.rows: list[RowSummary] = []  # of every group
        self.playing: set[str] = set()
        self.most_groups = 0
        self.ended: list[str] = []
        self.exits: set[str] = set()  # groups that leave by their typed exit
        self.fails: str | None = None  # rollout whose player raises
        self.slow_task: asyncio.Event | None = None  # what the task that is asked for first waits for
        self.tasks_asked: list[int] = []
        self.release = asyncio.Event()
        self.versions = Versions()
        self.supply = Supply(ReplayBuffer.of(self.recipe.train))
        writer = SimpleNamespace(
            event=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            group=lambda row: None,
            status_soon=lambda **fields: self.status.update(fields),
        )
        self.state: Any = SimpleNamespace(
            recipe=self.recipe,
            fleet=SimpleNamespace(run_dir=Path("run"), finalizers=self),
            writer=writer,
            watch=Watch(60.0),
            weights=self.versions,
            supply=self.supply,
            replaced=0,
            dropped_in_a_row=0,
            evicted=0,
            rejections=Counter(),
            reasons=Counter(),
            counts=GroupMetrics(),
        )
        self.pump = RolloutPump(self.state, self)  # type: ignore[arg-type]

    async def task(self, seed: int) -> Task | str:
        if self.slow_task is not None and len(self.tasks_asked) == 0:
            self.tasks_asked.append(seed)
            await self.slow_task.wait()
        self.tasks_asked.append(seed)
        return Task(f"t-{seed}", seed, {})

    async def play(self, plan: Any) -> RolloutOutcome:
        self.playing.add(plan.rollout_id)
        self.most_groups = max(self.most_groups, len({rollout.split(".")[1] for rollout in self.playing}))
        try:
            if plan.rollout_id == self.fails:
                await asyncio.sleep(0.01)
                raise ComponentDied("the gateway is gone")
            await self.release.wait()
        finally:
            await asyncio.sleep(0)  # ending takes a moment, as closing a connection does
            self.playing.discard(plan.rollout_id)
            self.ended.append(plan.rollout_id)
        return RolloutOutcome(rollout_id=plan.rollout_id, index=plan.index)

    async def finalize(self, request: FinalizationRequest) -> FinalizedGroup:
        gone = request.group_id in self.exits
        keys = [] if gone else [outcome.rollout_id for outcome in request.rollouts]
        return FinalizedGroup(
            group_id=request.group_id,
            weight_version=request.weight_version,
            train_keys=keys,
            rows=self.rows,
            metrics=GroupMetrics(),
            exit_cause=Cause.ROUTE_DIMS_UNKNOWN if gone else None,
        )

    def started(self) -> list[tuple[int, str]]:
        return [(e["step"], e["group_id"]) for e in self.events if e["kind"] == "group_started"]

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


async def test_when_a_rollout_fails_its_siblings_have_ended_before_the_group_does():
    bench = Bench("rollouts.max_inflight_groups=1", "train.groups_per_step=1", "train.steps=1")
    bench.fails = "run.0.1.0"
    failure: BaseException | None = None
    try:
        await bench.pump.run()
    except BaseExceptionGroup as group:
        failure = group
        # At this very moment, without another turn of the loop, nobody is playing any more.
        assert bench.playing == set()
    assert failure is not None
    assert sorted(bench.ended) == ["run.0.0.0", "run.0.1.0", "run.0.2.0"]
    assert bench.supply.buffer.state("g00000") == "discarded"
    assert bench.supply.staging() == bench.supply.training() == set()
    assert bench.state.watch.in_flight == {} and bench.state.watch.last_in_flight == "g00000 (sampling)"


async def test_a_group_keeps_its_place_however_long_its_task_takes():
    bench = Bench(
        "rollouts.max_inflight_groups=2", "train.groups_per_step=2", "train.steps=1", "train.sampler.name=in_order"
    )
    bench.slow_task = asyncio.Event()
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    await bench.settle()
    assert [group_id for _, group_id in bench.started()] == ["g00000", "g00001"]
    bench.slow_task.set()
    taken = await asyncio.wait_for(bench.supply.take(2, 0), 10)
    assert [entry.group_id for entry in taken] == ["g00000", "g00001"]
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)


async def test_at_most_max_inflight_groups_are_played_at_once():
    bench = Bench("rollouts.max_inflight_groups=2", "train.groups_per_step=5", "train.steps=1")
    pump = asyncio.create_task(bench.pump.run())
    await bench.settle()
    assert len(bench.started()) == 2 and len(bench.playing) == 6
    assert bench.supply.staging() == bench.playing
    bench.release.set()
    taken = await asyncio.wait_for(bench.supply.take(5, 0), 10)
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)
    assert bench.most_groups == 2 and len(taken) == 5


async def test_a_group_that_leaves_by_its_exit_is_replaced_so_that_no_step_trains_short():
    bench = Bench("rollouts.max_inflight_groups=4", "train.groups_per_step=2", "train.steps=2", "train.max_staleness=0")
    bench.exits = {"g00000", "g00002"}
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    first = await asyncio.wait_for(bench.supply.take(2, 0), 10)
    # With no staleness allowed nothing of step 2 starts before the weights of step 1 are confirmed.
    await bench.settle()
    assert {step for step, _ in bench.started()} == {1}
    await bench.versions.confirm(1)
    second = await asyncio.wait_for(bench.supply.take(2, 1), 10)
    await bench.versions.confirm(2)
    await asyncio.wait_for(pump, 10)
    assert [len(entry.train_keys) for entry in (*first, *second)] == [3] * 4
    assert len({entry.group_id for entry in (*first, *second)} - bench.exits) == 4
    assert bench.state.replaced == 2
    assert [e["group_id"] for e in bench.events if e["kind"] == "group_replaced"] == ["g00000", "g00002"]
    # Every group, a replacement too, was started at weights its step may train on.
    assert all(entry.weight_version >= 1 for entry in second)


async def test_a_task_that_fails_costs_its_group_and_not_the_campaign():
    bench = Bench("train.groups_per_step=2", "train.steps=1")
    played: dict[str, Any] = {}

    async def task(seed: int) -> Task | str:
        return "no words left" if seed == task_seed(bench.recipe.seed, 1) else Task(f"t-{seed}", seed, {})

    async def play(plan: Any) -> RolloutOutcome:
        played[plan.rollout_id] = plan.task
        return RolloutOutcome(rollout_id=plan.rollout_id, index=plan.index, task_id=plan.task_id)

    bench.task, bench.play = task, play  # type: ignore[method-assign]
    pump = asyncio.create_task(bench.pump.run())
    assert len(await asyncio.wait_for(bench.supply.take(2, 0), 10)) == 2
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)
    assert [played[f"run.{group}.0.0"] for group in (0, 1)] == [
        await task(task_seed(bench.recipe.seed, 0)),
        "no words left",
    ]
    started = [e for e in bench.events if e["kind"] == "group_started"]
    assert [e["task_seed"] for e in started] == [task_seed(bench.recipe.seed, number) for number in (0, 1)]


async def test_groups_that_all_leave_by_their_exit_end_the_campaign_with_the_cause_and_how_many_they_were():
    bench = Bench("rollouts.max_dropped_in_a_row=3", "rollouts.max_inflight_groups=1")
    # One that becomes rows in between, and the count begins again.
    bench.exits = {f"g{number:05d}" for number in range(100)} - {"g00002"}
    bench.release.set()
    with pytest.RaisesGroup(GroupsDropped) as caught:
        await asyncio.wait_for(bench.pump.run(), 10)
    (error,) = caught.value.exceptions
    assert "4 groups in a row" in str(error) and "rollouts.max_dropped_in_a_row=3" in str(error)
    assert f"the last was g00006 ({Cause.ROUTE_DIMS_UNKNOWN}: " in str(error)
    assert [group for _, group in bench.started()] == [f"g{number:05d}" for number in range(7)]
    assert bench.state.replaced == 6 and bench.supply.buffer.state("g00002") == "ready"


def summary(index: int, cause: Cause | None = None, detail: str | None = None) -> RowSummary:
    return RowSummary(
        rollout_id=f"run.0.{index}.0", index=index, task_id="t", sample_mask=int(cause is None), reward=None,
        prompt_len=1, tokens=1, sampled_tokens=0, weight_version_min=None, weight_version_max=None,
        terminal_selection=None, cause=cause, detail=detail,
    )  # fmt: skip


RAISED = "the agent raised KeyError: 'score' at my_env.py:31"
REJECTED = [summary(0, Cause.ROLLOUT_FAILED, "gave up"), *(summary(i, Cause.ROLLOUT_FAILED, RAISED) for i in (1, 2))]


async def test_whoever_looks_on_is_told_what_most_rollouts_were_rejected_for_before_a_step_is_done():
    bench = Bench("train.groups_per_step=1", "train.steps=1")
    bench.rows = REJECTED
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    await asyncio.wait_for(bench.supply.take(1, 0), 10)
    assert bench.status == {"rejected": 3, "rejected_for": RAISED}
    await bench.versions.confirm(1)
    await asyncio.wait_for(pump, 10)


def test_steps_in_a_row_without_a_valid_row_end_the_campaign_with_the_commonest_cause():
    bench = Bench("train.max_empty_steps=3", "train.steps=9")
    training = TrainPump(bench.state)

    def step(number: int, rows: list[RowSummary]) -> None:
        entry = SimpleNamespace(payload=SimpleNamespace(rows=rows))
        training._end_if_empty(number, [entry, SimpleNamespace(payload=SimpleNamespace(rows=REJECTED))])  # type: ignore[list-item]

    step(1, REJECTED)
    step(2, REJECTED)
    step(3, [*REJECTED[:2], summary(2)])  # one valid row, and the count begins again
    step(4, REJECTED)
    step(5, REJECTED)
    with pytest.raises(NothingToTrainOn) as caught:
        step(6, REJECTED)
    said = str(caught.value)
    assert said.startswith(
        "3 steps in a row, 4 to 6, had no valid row (train.max_empty_steps=3): 18 of their 18 rollouts"
    )
    assert f"were rejected as rollout_failed, most often: {RAISED}. Next: workbench inspect " in said
    assert said.endswith(" run.0.1.0")
    training = TrainPump(bench.state)
    for number in (7, 8, 9):  # nothing is spared after the last step, and the summary says the same
        step(number, REJECTED)


async def test_a_full_buffer_holds_the_pump_back_until_the_trainer_takes_groups():
    bench = Bench(
        "rollouts.max_inflight_groups=8", "train.groups_per_step=2", "train.steps=3", "train.max_staleness=2",
        "train.buffer_groups=2",
    )  # fmt: skip
    bench.release.set()
    pump = asyncio.create_task(bench.pump.run())
    await bench.settle()
    assert len(bench.started()) == 2 and bench.supply.buffer.free == 0
    for step in (1, 2, 3):
        taken = await asyncio.wait_for(bench.supply.take(2, step - 1), 10)
        bench.supply.trained(taken)
        await bench.versions.confirm(step)
    await asyncio.wait_for(pump, 10)
    assert len(bench.started()) == 6 and bench.supply.training() == set()


async def test_the_error_says_what_was_in_flight_though_everything_has_been_cancelled_since():
    watch = Watch(60.0)

    async def dead() -> None:
        raise ComponentDied("ended with code -9")

    with pytest.raises(RuntimeError), watch.doing("step 3", "training"), watch.doing("g00007", "sampling"):
        raise RuntimeError("a consequence")
    found = await watch.find_dead({"the gateway": dead, "the trainer": lambda: asyncio.sleep(0)}, 1.0, OSError())
    assert str(found) == "the gateway died: ended with code -9; in flight: g00007 (sampling), step 3 (training)."
    busy = {"the trainer": lambda: asyncio.sleep(3600)}
    assert await watch.find_dead(busy, 0.05, OSError()) is None
    # Its sockets are gone, and the process itself is still on its way out.
    leaving = await watch.find_dead(busy, 0.05, ComponentDied("The gateway is gone (ConnectError)."))
    assert str(leaving) == "The gateway is gone (ConnectError); in flight: g00007 (sampling), step 3 (training)."


async def test_what_keeps_the_loop_is_measured_apart_from_what_keeps_the_machine():
    watch = Watch(60.0)
    assert watch.loop_lag_p99_s() == {"total": None, "own": None}
    measuring = asyncio.create_task(watch.measure_loop_lag())
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 - blocks the loop, which is what is measured
    await asyncio.sleep(0.2)
    measuring.cancel()
    lag = watch.loop_lag_p99_s()
    # A sleeping thread waits for no processor, so all of it is the loop's own, whatever else the machine does.
    assert lag["total"] >= 0.5 and 0 < lag["own"] <= lag["total"]
