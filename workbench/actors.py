"""Actors: wait for a call to another process with a deadline, and say which process was at fault.

In: an awaitable (a Ray reference, or a thread), seconds, the part's name and what it was doing. Out: its result, or
`DeadlineExceeded`, `ComponentDied`, or the deliberate error raised inside the actor, as itself.
Not here: starting and stopping actors (campaign.fleet), replacing dead ones (finalizer.pool).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TypeVar

from workbench.errors import ComponentDied, DeadlineExceeded, WorkbenchError

T = TypeVar("T")
_TRACEBACK = '\n  File "'
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)


class ActorLost(Exception):
    """A call did not come back, and whether it did what was asked is unknown. `str()` says why, in half a sentence."""

    def __init__(self, why: str, *, died: bool) -> None:
        super().__init__(why)
        self.died = died
        """False: it may still be alive and at work."""


async def answer(awaitable: Awaitable[T], timeout_s: float | None) -> T:
    """Await a call to an actor. Raises `ActorLost` where it is gone or `timeout_s` has passed, and what the method
    raised otherwise: a deliberate error as itself, not wrapped in Ray's."""
    import ray.exceptions as ray_errors

    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except ray_errors.RayTaskError as error:  # first: it is of the type that the method raised as well
        cause = error.cause if isinstance(error.cause, WorkbenchError) else None
        if cause is None:
            raise
        raise cause from None
    except TimeoutError:
        raise ActorLost(f"no answer within {timeout_s:g} s", died=False) from None
    except ray_errors.ActorUnavailableError:
        why = "no connection to its process any more; the process, its node or the network between is gone"
        raise ActorLost(why, died=True) from None
    except ray_errors.RayActorError as error:
        raise ActorLost(str(error).strip().splitlines()[0], died=True) from None


async def within(awaitable: Awaitable[T], timeout_s: float, component: str, doing: str, *, key: str = "") -> T:
    """Await with a deadline, and turn a dead Ray actor into an error that names it.

    Raises `DeadlineExceeded` after `timeout_s` seconds, with the recipe's `key` that raises it where there is one, and
    `ComponentDied` where the actor or its node is gone.
    A deliberate error raised inside the actor comes out as itself, not wrapped in Ray's.
    """
    try:
        return await answer(awaitable, timeout_s)
    except ActorLost as lost:
        if lost.died:
            raise ComponentDied(f"{component} died while {doing}: {lost}") from None
        longer = f"raise {key} where the machine is only busy, else " if key else ""
        raise DeadlineExceeded(
            f"{component} did not finish {doing} within {timeout_s:g} s. Next: {longer}workbench doctor, and the last "
            "events of the run (events.jsonl)."
        ) from None


def root_cause(error: str) -> str:
    """What an error's text says in the end: of a remote traceback, as Ray sends it, the exception that it is about."""
    if _TRACEBACK not in error:
        return error
    said = [match.start() for match in _RAISED.finditer(error)]
    return error[said[-1] :] if said else error
