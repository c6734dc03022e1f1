"""Pool: the finalizer actors of a campaign. One that is lost is replaced, and what it had in hand is reconciled.

    finalize(request) ─► idlest member ─► answer
                            └─ lost (dead, or silent past its deadline) ─► killed ─► another member: reconcile(request)
                                                                                 └─► a new member takes its place

Invariants: at most one actor at a time works on a group (one that is lost is dead before the group goes to another); a
request whose outcome is unknown is never just sent again: what was published and stored is read first
(`Finalizer.reconcile`); a group that loses two finalizers in turn ends in an error that names it.
Not here: one actor and its end (member), what a finalizer does with a group (actor), how an actor is made
(campaign.fleet gives `start`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from workbench.actors import ActorLost, answer
from workbench.errors import ComponentDied, DeadlineExceeded, FinalizerError
from workbench.finalizer.member import Member
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup

Report = Callable[..., None]
"""`report(kind, **fields)`: an event for the run's record."""

_AGAIN_AFTER_S = 1.0


class FinalizerPool:
    """`size` finalizer actors, each made by `start(number)`: a place in the pool keeps its number when it is replaced.

    `timeout_s` bounds one group at one member, `replace_timeout_s` the time until a lost one is replaced. `report` is
    told `finalizer_lost`, `finalizer_replaced`, `finalizer_not_replaced` and `group_reconciled`.
    """

    def __init__(
        self, start: Callable[[int], Any], size: int, *, timeout_s: float, replace_timeout_s: float, report: Report
    ) -> None:
        self._start_actor = start
        self._size = size
        self._timeout_s = timeout_s
        self._replace_timeout_s = replace_timeout_s
        self._report = report
        self._members: dict[int, Member] = {}  # by place, also those that are still coming up; without the lost ones
        self._replacements: set[asyncio.Task[None]] = set()
        self._given_up: set[int] = set()  # places that stay empty
        self._changed = asyncio.Condition()
        self._failure: Exception | None = None  # why no group gets a member any more

    @property
    def actors(self) -> list[Any]:
        """The handles of the members that there are now, in the order of their places."""
        return [member.actor for _, member in sorted(self._members.items())]

    async def start(self, timeout_s: float) -> None:
        """Start all members; ComponentDied or DeadlineExceeded when one does not come up within `timeout_s`."""
        await asyncio.gather(
            *(self._bring_up(number, timeout_s, "engine.start_timeout_s") for number in range(self._size))
        )

    async def finalize(self, request: FinalizationRequest) -> FinalizedGroup:
        """Have a group finalised; returns metadata only.

        Raises FinalizerError where the group can be neither published nor stored, ComponentDied or DeadlineExceeded
        when finalizers were lost over it or none could be brought up.
        """
        try:
            return await self._ask(await self._idlest(), "finalize", request)
        except FinalizerError as error:
            why = str(error)
        except ActorLost as lost:
            why = f"its finalizer was lost: {lost}"
        group = await self._reconcile(request)
        self._report("group_reconciled", group_id=request.group_id, because=why)
        return group

    async def republish(self, request: FinalizationRequest) -> FinalizedGroup:
        """Publish a group again that is stored already and whose rows went with their data plane.

        A finalizer that is lost over it is replaced and another one asked, once. Raises as `finalize` does.
        """
        try:
            return await self._ask(await self._idlest(), "reconcile", request)
        except ActorLost:
            return await self._reconcile(request)

    async def stop(self, timeout_s: float) -> None:
        """Let every member come to an end, then kill it. Harmless for members that are dead or never came up.

        A group that is in hand or waits for a member then ends in ComponentDied, and nothing is started any more.
        """
        import ray

        async with self._changed:
            self._failure = ComponentDied("the finalizers were stopped; what is stored of a group stays for a resume")
            self._changed.notify_all()  # who waits for a member gets none any more
        for task in self._replacements:
            task.cancel()
        actors = self.actors
        await asyncio.gather(*(answer(actor.stop.remote(), timeout_s) for actor in actors), return_exceptions=True)
        for actor in actors:
            await asyncio.to_thread(ray.kill, actor)

    async def _reconcile(self, request: FinalizationRequest) -> FinalizedGroup:
        try:
            return await self._ask(await self._idlest_alive(), "reconcile", request)
        except ActorLost as lost:
            error_type = ComponentDied if lost.died else DeadlineExceeded
            raise error_type(
                f"two finalizers in turn were lost over group {request.group_id} ({len(request.rollouts)} rollouts): "
                f"{lost}. Next: see whether the data plane is alive, and whether the machine has memory left; its "
                "staged rows are kept."
            ) from None

    async def _ask(self, member: Member, method: str, request: FinalizationRequest) -> FinalizedGroup:
        """Raises ActorLost when the member is lost over it, and is then dead."""
        member.in_hand[request.group_id] = None
        try:
            reply = await member.ask(method, request.model_dump(mode="json"), self._timeout_s)
        except ActorLost as lost:
            await self._retire(member, lost)
            raise
        finally:
            member.in_hand.pop(request.group_id, None)
        return FinalizedGroup.model_validate(reply)

    async def _idlest(self) -> Member:
        """The ready member with the fewest groups in hand; waits for one to come up when there is none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or self._ready())
            if self._failure is not None:
                raise self._failure
            return min(self._ready(), key=lambda member: (len(member.in_hand), member.number))

    def _ready(self) -> list[Member]:
        return [member for member in self._members.values() if member.ready]

    async def _idlest_alive(self) -> Member:
        """The idlest member that answers. Of two that die at the same time one is known to be dead a moment later, and
        is not to count as the second that a group has lost."""
        for _ in range(self._size):
            member = await self._idlest()
            try:
                await member.answers(self._timeout_s)
            except ActorLost as lost:
                await self._retire(member, lost)
            else:
                if member.ready:  # and not lost to another group meanwhile
                    return member
        return await self._idlest()

    async def _retire(self, member: Member, lost: ActorLost) -> None:
        """Give the place of a lost member to a new one, and return when the lost one is dead; DeadlineExceeded when it
        does not die. Every group that it had in hand comes here; the first one empties the place."""
        if self._members.get(member.number) is member:
            del self._members[member.number]
            if self._failure is not None:  # stopped: it was killed here, and nobody is to take its place
                return
            self._report("finalizer_lost", finalizer=member.number, why=str(lost), in_hand=list(member.in_hand))
            task = asyncio.create_task(self._replace(member.number))
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)
        await member.end(lost)

    async def _replace(self, number: int) -> None:
        began = time.monotonic()
        try:
            await self._bring_up_again(number, began + self._replace_timeout_s)
        except Exception as error:
            self._given_up.add(number)
            async with self._changed:
                if len(self._given_up) == self._size:
                    self._failure = error  # nobody is left, and nobody comes
                self._changed.notify_all()
            self._report("finalizer_not_replaced", finalizer=number, error=str(error))
        else:
            seconds = round(time.monotonic() - began, 3)
            self._report("finalizer_replaced", finalizer=number, seconds=seconds)

    async def _bring_up_again(self, number: int, deadline: float) -> None:
        """`_bring_up` until one stays: Ray still sends actors to a node that was lost just now, where they die."""
        while True:
            try:
                left_s = max(0.1, round(deadline - time.monotonic(), 1))
                return await self._bring_up(number, left_s, "deadlines.replace_s")
            except ComponentDied:
                if time.monotonic() + _AGAIN_AFTER_S > deadline:
                    raise
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _bring_up(self, number: int, timeout_s: float, key: str) -> None:
        member = self._members[number] = Member(number, self._start_actor(number))
        try:
            await member.come_up(timeout_s, key)
        except Exception:
            del self._members[number]
            raise
        async with self._changed:
            self._changed.notify_all()
