"""Member: one finalizer actor of a pool, from its start until it is certainly dead.

Invariant: when `end` returns, nothing of the actor is at work any more, so that its groups may go to another one.
Not here: which member gets a group, and what becomes of its place when it is lost (pool).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

import psutil

from workbench.actors import ActorLost, answer, within
from workbench.errors import DeadlineExceeded

_GONE_WITHIN_S = 15.0
_GONE_EVERY_S = 0.05
# How long Ray lets an actor live that does not end itself when told to, and a little more.
_RAY_KILLS_AFTER_S = 6.0


class Member:
    """The actor that has place `number` in its pool. Nothing brings a lost one back: its place gets another member."""

    def __init__(self, number: int, actor: Any) -> None:
        self.name = f"finalizer {number}"
        self.number = number
        self.actor = actor
        self.ready = False
        self.in_hand: dict[str, None] = {}
        """Group ids, in the order they came."""
        self._process: psutil.Process | None = None  # None: not up yet, or on another machine

    async def come_up(self, timeout_s: float, key: str) -> None:
        """Wait until it is ready. ComponentDied or DeadlineExceeded where it does not get there; it is dead then.
        `key` of the recipe raises `timeout_s`."""
        try:
            await within(self.actor.ready.remote(timeout_s), timeout_s, self.name, "starting", key=key)
            self._process = await within(_process_of(self.actor), timeout_s, self.name, "starting", key=key)
        except Exception:
            with contextlib.suppress(DeadlineExceeded):  # it has no group that another one might get
                await self._until_dead()
            raise
        self.ready = True

    async def ask(self, method: str, message: dict[str, Any], timeout_s: float) -> Any:
        """What the actor's `method` answers. Raises ActorLost, and whatever the method raised."""
        return await answer(getattr(self.actor, method).remote(message), timeout_s)

    async def answers(self, timeout_s: float) -> None:
        """Raises ActorLost where it does not answer."""
        await answer(self.actor.__ray_ready__.remote(), timeout_s)

    async def end(self, lost: ActorLost) -> None:
        """Kill it, and return when it is dead. Raises DeadlineExceeded when it does not die: nobody else may have its
        groups then."""
        self.ready = False
        await self._until_dead()
        if self._process is None and not lost.died:
            await asyncio.sleep(_RAY_KILLS_AFTER_S)  # nobody here sees the end of a process on another machine

    async def _until_dead(self) -> None:
        """Kill it and wait until Ray says that it is dead, and until its process is gone, which is another matter: of
        one that does not listen, because it is stopped or waits for a disk, Ray says so some seconds earlier."""
        import ray

        await asyncio.to_thread(ray.kill, self.actor)
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        deadline = time.monotonic() + _GONE_WITHIN_S
        while not (await self._said_dead() and (self._process is None or _is_gone(self._process))):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.name} was killed and is not dead after {_GONE_WITHIN_S:g} s")
            await asyncio.sleep(_GONE_EVERY_S)

    async def _said_dead(self) -> bool:
        try:
            await self.answers(_GONE_WITHIN_S / 3)
        except ActorLost as lost:
            return lost.died
        return False


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


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
