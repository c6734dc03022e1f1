"""Pool: the finalizer actors of a campaign. One that is lost is replaced, and what it had in hand is reconciled.

    finalize(request) ─► idlest member ─► answer
                            └─ lost (dead, or silent past its deadline) ─► killed ─► another member: reconcile(request)
                                                                                 └─► a new member takes its place

Invariants: at most one actor at a time works on a group (one that is lost is dead before the group goes to another); a
request whose outcome is unknown is never just sent again: what was published and stored is read first
(`Finalizer.reconcile`); a group that loses two finalizers in turn ends in an error that names it.
Not here: what a finalizer does with a group (actor), how an actor is made (campaign.fleet gives `start`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from workbench.actors import ActorLost, answer, within
from workbench.errors import ComponentDied, DeadlineExceeded, FinalizerError
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup

Report = Callable[..., None]
"""`report(kind, **fields)`: an event for the run's record."""

_GONE_WITHIN_S = 15.0
_GONE_EVERY_S = 0.05
_AGAIN_AFTER_S = 1.0
# How long Ray lets an actor live that does not end itself when told to, and a little more.
_RAY_KILLS_AFTER_S = 6.0


@dataclass(eq=False)
class _Member:
    """One place in the pool. `actor` changes when it is replaced, `ready` is cleared meanwhile."""

    number: int
    actor: Any = None
    process: psutil.Process | None = None  # of the actor; None: not up yet, or on another machine
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    in_hand: dict[str, None] = field(default_factory=dict)  # group ids, in the order they came


class FinalizerPool:
    """`size` finalizer actors, each made by `start(number)`: a place in the pool keeps its number when it is replaced.

    `timeout_s` bounds one group at one member, `replace_timeout_s` the time until a lost one is replaced. `report` is
    told `finalizer_lost`, `finalizer_replaced`, `finalizer_not_replaced` and `group_reconciled`.
    """

    def __init__(
        self, start: Callable[[int], Any], size: int, *, timeout_s: float, replace_timeout_s: float, report: Report
    ) -> None:
        self._start_actor = start
        self._timeout_s = timeout_s
        self._replace_timeout_s = replace_timeout_s
        self._report = report
        self._members = [_Member(number) for number in range(size)]
        self._replacements: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failure: Exception | None = None

    @property
    def actors(self) -> list[Any]:
        """The handles of the members that there are now."""
        return [member.actor for member in self._members if member.actor is not None]

    async def start(self, timeout_s: float) -> None:
        """Start all members; ComponentDied or DeadlineExceeded when one does not come up within `timeout_s`."""
        await asyncio.gather(*(self._bring_up(member, timeout_s) for member in self._members))

    async def finalize(self, request: FinalizationRequest) -> FinalizedGroup:
        """Have a group finalised; returns metadata only.

        Raises FinalizerError where the group can be neither published nor stored, ComponentDied or DeadlineExceeded
        when finalizers were lost over it or none could be brought up.
        """
        message = request.model_dump(mode="json")
        group_id = request.group_id
        try:
            return await self._ask(await self._idlest(), "finalize", message, group_id)
        except FinalizerError as error:
            why = str(error)
        except ActorLost as lost:
            why = f"its finalizer was lost: {lost}"
        group = await self._reconcile(request, message)
        self._report("group_reconciled", group_id=group_id, because=why)
        return group

    async def republish(self, request: FinalizationRequest) -> FinalizedGroup:
        """Publish a group again that is stored already and whose rows went with their data plane.

        A finalizer that is lost over it is replaced and another one asked, once. Raises as `finalize` does.
        """
        message = request.model_dump(mode="json")
        try:
            return await self._ask(await self._idlest(), "reconcile", message, request.group_id)
        except ActorLost:
            return await self._reconcile(request, message)

    async def stop(self, timeout_s: float) -> None:
        """Let every member come to an end, then kill it. Harmless for members that are dead or never came up."""
        import ray

        for task in self._replacements:
            task.cancel()
        actors = self.actors
        await asyncio.gather(*(answer(actor.stop.remote(), timeout_s) for actor in actors), return_exceptions=True)
        for actor in actors:
            await asyncio.to_thread(ray.kill, actor)

    async def _reconcile(self, request: FinalizationRequest, message: dict[str, Any]) -> FinalizedGroup:
        try:
            return await self._ask(await self._idlest_alive(), "reconcile", message, request.group_id)
        except ActorLost as lost:
            error_type = ComponentDied if lost.died else DeadlineExceeded
            raise error_type(
                f"two finalizers in turn were lost over group {request.group_id} ({len(request.rollouts)} rollouts): "
                f"{lost}. Next: see whether the data plane is alive, and whether the machine has memory left; its "
                "staged rows are kept."
            ) from None

    async def _ask(self, member: _Member, method: str, message: dict[str, Any], group_id: str) -> FinalizedGroup:
        actor, process = member.actor, member.process
        member.in_hand[group_id] = None
        try:
            reply = await answer(getattr(actor, method).remote(message), self._timeout_s)
        except ActorLost as lost:
            await self._retire(member, actor, process, lost)
            raise
        finally:
            member.in_hand.pop(group_id, None)
        return FinalizedGroup.model_validate(reply)

    async def _idlest(self) -> _Member:
        """The ready member with the fewest groups in hand; waits for one to come up when there is none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or any(m.ready.is_set() for m in self._members))
            if self._failure is not None:
                raise self._failure
            return min((m for m in self._members if m.ready.is_set()), key=lambda m: (len(m.in_hand), m.number))

    async def _idlest_alive(self) -> _Member:
        """The idlest member that answers. Of two that die at the same time one is known to be dead a moment later, and
        is not to count as the second that a group has lost."""
        for _ in self._members:
            member = await self._idlest()
            actor, process = member.actor, member.process
            try:
                await answer(actor.__ray_ready__.remote(), self._timeout_s)
            except ActorLost as lost:
                await self._retire(member, actor, process, lost)
            else:
                if member.actor is actor:
                    return member
        return await self._idlest()

    async def _retire(self, member: _Member, actor: Any, process: psutil.Process | None, lost: ActorLost) -> None:
        """Make sure that `actor` does nothing any more, and start another in its place. Returns when it is dead.

        Raises DeadlineExceeded when it does not die: nobody else may have its groups then.
        """
        if member.actor is actor:
            member.actor = None
            member.ready.clear()
            self._report("finalizer_lost", finalizer=member.number, why=str(lost), in_hand=list(member.in_hand))
            task = asyncio.create_task(self._replace(member))
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)
        await _until_dead(actor, process, f"finalizer {member.number}")
        if process is None and not lost.died:
            await asyncio.sleep(_RAY_KILLS_AFTER_S)  # nobody here sees the end of a process on another machine

    async def _replace(self, member: _Member) -> None:
        began = time.monotonic()
        try:
            await self._bring_up_again(member, began + self._replace_timeout_s)
        except Exception as error:
            async with self._changed:
                self._replacements.discard(asyncio.current_task())  # type: ignore[arg-type]
                if not self.actors and not self._replacements:
                    self._failure = error  # nobody is left, and nobody comes
                self._changed.notify_all()
            self._report("finalizer_not_replaced", finalizer=member.number, error=str(error))
        else:
            seconds = round(time.monotonic() - began, 3)
            self._report("finalizer_replaced", finalizer=member.number, seconds=seconds)

    async def _bring_up_again(self, member: _Member, deadline: float) -> None:
        """`_bring_up` until one stays: Ray still sends actors to a node that was lost just now, where they die."""
        while True:
            try:
                return await self._bring_up(member, max(0.1, round(deadline - time.monotonic(), 1)))
            except ComponentDied:
                if time.monotonic() + _AGAIN_AFTER_S > deadline:
                    raise
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _bring_up(self, member: _Member, timeout_s: float) -> None:
        actor, name = self._start_actor(member.number), f"finalizer {member.number}"
        member.actor, member.process = actor, None
        try:
            await within(actor.ready.remote(timeout_s), timeout_s, name, "starting")
            member.process = await within(_process_of(actor), timeout_s, name, "starting")
        except Exception:
            member.actor = None
            with contextlib.suppress(DeadlineExceeded):  # it has no group that another one might get
                await _until_dead(actor, None, name)
            raise
        async with self._changed:
            member.ready.set()
            self._changed.notify_all()


async def _process_of(actor: Any) -> psutil.Process | None:
    """The process behind an actor; None where it is on another machine."""
    import ray

    node, pid = await actor.__ray_call__.remote(_whereabouts)
    if node != ray.get_runtime_context().get_node_id():
        return None
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None  # dead again; whoever asks it for something hears so


def _whereabouts(_: Any) -> tuple[str, int]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


async def _until_dead(actor: Any, process: psutil.Process | None, name: str) -> None:
    """Kill an actor and wait until Ray says that it is dead, and until its `process` is gone, which is another matter:
    of one that does not listen, because it is stopped or waits for a disk, Ray says so some seconds earlier."""
    import ray

    await asyncio.to_thread(ray.kill, actor)
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _GONE_WITHIN_S
    while not (await _said_dead(actor) and (process is None or _is_gone(process))):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{name} was killed and is not dead after {_GONE_WITHIN_S:g} s")
        await asyncio.sleep(_GONE_EVERY_S)


async def _said_dead(actor: Any) -> bool:
    try:
        await answer(actor.__ray_ready__.remote(), _GONE_WITHIN_S / 3)
    except ActorLost as lost:
        return lost.died
    return False


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
