"""Loop time: which callbacks keep an event loop from everything else, and for how long: whom to ask when it is late.

A callback's own time is the time it took, less the time in which it was ready to run and had no processor: so a busy
machine adds nothing, and computing, waiting for a disk and sleeping all count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from workbench.campaign.watch import queueing


@dataclass
class LoopTime:
    """`blocks`: (own seconds, what ran) of every callback that took `LONG_S` or more of its own."""

    blocks: list[tuple[float, str]] = field(default_factory=list)

    def worst(self, count: int = 5) -> str:
        return "; ".join(f"{own_s:.3f} s {what}" for own_s, what in sorted(self.blocks, reverse=True)[:count])


LONG_S = 0.01

MOST_OWN_P99_S = 0.25
"""What the tests allow of a controller's own lateness. On a machine of one's own it stays below 0.05 s, which is for
`make bench` to measure; here it only has to catch a wait for a disk or a model on the loop."""


@contextlib.contextmanager
def loop_time() -> Iterator[LoopTime]:
    """Measure the callbacks of this thread's loop inside the block."""
    found = LoopTime()
    run = asyncio.Handle._run
    with queueing() as queued_s:

        def measured(handle: asyncio.Handle) -> None:
            started, queued = time.monotonic(), queued_s()
            what = _described(handle)
            try:
                run(handle)
            finally:
                if asyncio.Handle._run is measured:  # no longer in the callback that leaves the block
                    own_s = time.monotonic() - started - (queued_s() - queued)
                    if own_s >= LONG_S:
                        found.blocks.append((own_s, what))

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        try:
            yield found
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


def _described(handle: asyncio.Handle) -> str:
    callback: Any = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return _innermost(task.get_coro())
    return getattr(callback, "__qualname__", repr(callback))


def _innermost(coroutine: Any) -> str:
    """The chain of awaiting functions of a task, as far as they are of Python."""
    names = []
    while coroutine is not None and hasattr(coroutine, "cr_frame") and coroutine.cr_frame is not None:
        names.append(f"{coroutine.__qualname__}:{coroutine.cr_frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(names[-4:]) or "a coroutine"
