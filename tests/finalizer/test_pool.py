"""The pool: a lost finalizer is replaced, its group reconciled by another one, and nothing is ever simply sent again.

The actors here are real Ray actors of a few lines, because how a finalizer works is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from workbench.actors import ActorLost
from workbench.errors import ComponentDied, DeadlineExceeded, FinalizerError
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.metrics import GroupMetrics
from workbench.finalizer.pool import FinalizerPool

pytestmark = pytest.mark.ray


@ray.remote
class Clerk:
    """Notes what it is asked in `log`, and does with a group what its id says."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)

    async def ready(self, timeout_s: float) -> bool:
        return True

    async def stop(self) -> None:
        return

    async def finalize(self, request: dict) -> dict:
        return await self._do("finalize", request)

    async def reconcile(self, request: dict) -> dict:
        return await self._do("reconcile", request)

    async def _do(self, method: str, request: dict) -> dict:
        group_id = request["group_id"]
        with self._log.open("a") as log:
            log.write(json.dumps([method, group_id, os.getpid()]) + "\n")
        if "stopped" in group_id and method == "finalize":
            os.kill(os.getpid(), signal.SIGSTOP)  # as a process that waits for a disk hears nothing
            await asyncio.sleep(1.0)  # the signal may find another thread; woken up, this one sleeps out the rest
            self._log.with_suffix(".woken").touch()
        if "fatal" in group_id or ("deadly" in group_id and method == "finalize"):
            os._exit(9)
        if "silent" in group_id and method == "finalize":
            await asyncio.sleep(3600)
        if "refused" in group_id and method == "finalize":
            raise FinalizerError(f"group {group_id} could not be published")
        if "slow" in group_id:
            await asyncio.sleep(1.0)
        group = FinalizedGroup(group_id=group_id, weight_version=0, train_keys=["a"], rows=[], metrics=GroupMetrics())
        return group.model_dump(mode="json")


class Desk:
    """A started pool, what it reported and what its actors were asked."""

    def __init__(self, tmp_path: Path, size: int, timeout_s: float) -> None:
        self.log = tmp_path / "log.jsonl"
        self.events: list[dict] = []
        self.pool = FinalizerPool(
            lambda number: Clerk.options(num_cpus=0.1).remote(str(self.log)),
            size,
            timeout_s=timeout_s,
            replace_timeout_s=60.0,
            report=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
        )

    def asked(self) -> list[tuple[str, str, int]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]

    async def until(self, kind: str) -> None:
        deadline = time.monotonic() + 60
        while not any(event["kind"] == kind for event in self.events):
            assert time.monotonic() < deadline, self.events
            await asyncio.sleep(0.02)

    async def finalize(self, group_id: str) -> FinalizedGroup:
        rollouts = [RolloutOutcome(rollout_id=f"run.{group_id}.0.0", index=0)]
        return await self.pool.finalize(FinalizationRequest(group_id=group_id, weight_version=0, rollouts=rollouts))


@pytest.fixture
async def desk(ray_cluster, tmp_path, request):
    made = Desk(tmp_path, *getattr(request, "param", (2, 60.0)))
    await made.pool.start(60.0)
    yield made
    await made.pool.stop(5.0)


async def test_a_dead_one_is_replaced_and_what_it_had_in_hand_is_reconciled_by_others(desk):
    slow = asyncio.create_task(desk.finalize("slow0"))  # occupies the first member
    group = await desk.finalize("deadly")
    assert group.train_keys == ["a"] and (await slow).train_keys == ["a"]
    methods = [(method, name) for method, name, _ in desk.asked() if name == "deadly"]
    assert methods == [("finalize", "deadly"), ("reconcile", "deadly")]
    await desk.until("finalizer_replaced")
    kinds = [event["kind"] for event in desk.events]
    assert sorted(kinds) == ["finalizer_lost", "finalizer_replaced", "group_reconciled"]
    lost = desk.events[kinds.index("finalizer_lost")]
    assert lost["in_hand"] == ["deadly"] and "died" in lost["why"]
    # The replacement works: both members get groups again.
    before = len(desk.asked())
    await asyncio.gather(desk.finalize("slow1"), desk.finalize("slow2"))
    assert len({pid for _, _, pid in desk.asked()[before:]}) == 2


@pytest.mark.parametrize("desk", [(1, 1.0)], indirect=True)
async def test_a_silent_one_is_killed_before_its_group_goes_to_another(desk):
    pid = await desk.pool.actors[0].__ray_call__.remote(lambda self: os.getpid())
    group = await desk.finalize("silent")
    assert group.train_keys == ["a"]
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    (_, _, first), (method, _, second) = desk.asked()
    assert (first, method) == (pid, "reconcile") and second != pid
    assert "no answer within 1 s" in desk.events[0]["why"]


@pytest.mark.parametrize("desk", [(1, 1.0)], indirect=True)
async def test_one_that_cannot_even_hear_that_it_is_killed_is_gone_before_its_group_goes_to_another(desk):
    finalizing = asyncio.create_task(desk.finalize("stopped"))
    await desk.until("finalizer_lost")
    (_, _, pid), *_ = desk.asked()
    assert (await finalizing).train_keys == ["a"]
    assert [(method, name) for method, name, _ in desk.asked()] == [("finalize", "stopped"), ("reconcile", "stopped")]
    # What would wake it up finds nobody any more.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    assert not desk.log.with_suffix(".woken").exists()


async def test_a_group_that_loses_two_in_turn_is_an_error_that_names_it(desk):
    with pytest.raises(ComponentDied, match=r"two finalizers in turn were lost over group fatal \(1 rollouts\)"):
        await desk.finalize("fatal")
    # The others are not held up by it: both are replaced.
    assert (await desk.finalize("next")).train_keys == ["a"]


async def test_a_group_that_could_not_be_published_is_reconciled_once_not_sent_again(desk):
    assert (await desk.finalize("refused")).train_keys == ["a"]
    assert [method for method, _, _ in desk.asked()] == ["finalize", "reconcile"]
    assert desk.events[0]["kind"] == "group_reconciled" and "could not be published" in desk.events[0]["because"]


async def test_two_that_are_lost_at_once_are_both_replaced_and_both_groups_reconciled(desk):
    groups = await asyncio.gather(desk.finalize("deadly0"), desk.finalize("deadly1"), desk.finalize("deadly2"))
    assert [group.train_keys for group in groups] == [["a"]] * 3
    done = [(name, method) for method, name, _ in desk.asked()]
    # A group that was in hand when another one took its finalizer along was perhaps never begun there.
    for name in ("deadly0", "deadly1", "deadly2"):
        assert [method for other, method in done if other == name] in (["finalize", "reconcile"], ["reconcile"])
    lost = [event["finalizer"] for event in desk.events if event["kind"] == "finalizer_lost"]
    assert sorted(lost) == [0, 1]
    assert (await desk.finalize("next")).train_keys == ["a"]


@pytest.mark.parametrize("desk", [(1, 60.0)], indirect=True)
async def test_a_pool_that_is_stopped_with_a_group_in_hand_starts_no_other_actor(desk, monkeypatch):
    started: list[int] = []
    start = desk.pool._start_actor
    monkeypatch.setattr(desk.pool, "_start_actor", lambda number: started.append(number) or start(number))
    finalizing = asyncio.create_task(desk.finalize("silent"))
    deadline = time.monotonic() + 30
    while not desk.log.exists():
        assert time.monotonic() < deadline, "the group reaches its finalizer"
        await asyncio.sleep(0.02)
    await desk.pool.stop(5.0)
    with pytest.raises(ComponentDied, match="the finalizers were stopped"):
        await asyncio.wait_for(finalizing, 30.0)
    assert not started and not desk.events and not desk.pool._replacements


async def test_when_the_last_one_cannot_be_replaced_every_group_that_waits_for_it_ends(ray_cluster, tmp_path):
    started: list[int] = []
    events: list[str] = []

    def start(number: int):
        started.append(number)
        room = 0.1 if len(started) == 1 else 1000  # no machine has that
        return Clerk.options(num_cpus=room).remote(str(tmp_path / "log"))

    def report(kind: str, **fields: object) -> None:
        events.append(kind)

    pool = FinalizerPool(start, 1, timeout_s=60.0, replace_timeout_s=1.0, report=report)
    await pool.start(60.0)
    requests = [
        FinalizationRequest(group_id=name, weight_version=0, rollouts=[RolloutOutcome(rollout_id=name, index=0)])
        for name in ("deadly", "slow")
    ]
    ended = await asyncio.wait_for(
        asyncio.gather(*(pool.finalize(request) for request in requests), return_exceptions=True), 60
    )
    assert all("finalizer 0 did not finish starting within 1 s" in str(error) for error in ended), ended
    assert {type(error) for error in ended} == {DeadlineExceeded}
    assert events == ["finalizer_lost", "finalizer_not_replaced"]


async def test_when_nobody_can_be_brought_up_the_wait_ends(ray_cluster, tmp_path):
    pool = FinalizerPool(
        lambda number: Clerk.options(num_cpus=1000).remote(str(tmp_path / "log")),  # no machine has room for it
        1,
        timeout_s=5.0,
        replace_timeout_s=1.0,
        report=lambda kind, **fields: None,
    )
    with pytest.raises(
        DeadlineExceeded, match=r"finalizer 0 did not finish starting within 1 s\. Next: raise engine\.start_timeout_s"
    ):
        await pool.start(1.0)


class Remote:
    def __init__(self, does):
        self.remote = does


@pytest.fixture
def two_lost(monkeypatch):
    """A pool whose two members are lost; `replacing(ready)` has `ready(number, start)` awaited by every actor."""

    async def done(*_): ...

    monkeypatch.setattr("workbench.finalizer.member._process_of", done)
    monkeypatch.setattr("workbench.finalizer.member.Member._until_dead", done)
    monkeypatch.setattr("workbench.finalizer.pool._AGAIN_AFTER_S", 0.5)

    async def replacing(ready, report=lambda kind, **fields: None):
        starts = [0, 0]

        def start(number):
            starts[number] += 1
            place = number, starts[number]
            return SimpleNamespace(ready=Remote(lambda timeout_s: done() if place[1] == 1 else ready(*place)))

        pool = FinalizerPool(start, 2, timeout_s=5.0, replace_timeout_s=30.0, report=report)
        await pool.start(5.0)
        for member in list(pool._members.values()):
            await pool._retire(member, ActorLost("its node is gone", died=True))
        return pool

    return replacing


async def test_one_that_cannot_be_replaced_ends_nothing_while_another_is_on_its_way(two_lost):
    """Between two attempts to bring it up the other one has no actor either."""
    told, tried = asyncio.Event(), asyncio.Event()

    async def ready(number, start):
        match number, start:
            case 0, _:
                await tried.wait()
                await asyncio.sleep(0.05)  # until the other one is between two attempts
                raise DeadlineExceeded("no machine has room for it")
            case 1, 2:
                tried.set()
                raise ComponentDied("it was sent to a node that is lost")
            case 1, 3:
                await told.wait()

    def report(kind, **fields):
        if kind == "finalizer_not_replaced":
            told.set()

    pool = await two_lost(ready, report)
    assert await asyncio.wait_for(pool._idlest(), 30.0) is pool._members[1]
    assert told.is_set()


async def test_when_none_of_several_can_be_replaced_at_the_same_time_the_wait_ends(two_lost):
    together = asyncio.Barrier(2)

    async def ready(number, start):
        await together.wait()
        raise DeadlineExceeded(f"finalizer {number} has no room")

    pool = await two_lost(ready)
    with pytest.raises(DeadlineExceeded, match="has no room"):
        await asyncio.wait_for(pool._idlest(), 30.0)


async def test_who_waits_for_a_member_when_the_pool_is_stopped_waits_no_more(two_lost, ray_cluster):
    never = asyncio.Event()

    async def ready(number, start):
        await never.wait()

    pool = await two_lost(ready)
    waiting = asyncio.create_task(pool._idlest())
    await asyncio.sleep(0)
    pool._members.clear()  # what came up of them are no actors that Ray could kill
    await pool.stop(1.0)
    with pytest.raises(ComponentDied, match="the finalizers were stopped"):
        await asyncio.wait_for(waiting, 30.0)
