"""Loop time: which callbacks keep an event loop from everything else, and for how long.

A callback's own time is the time it took, less the time in which it was ready to run and had no processor: so a busy
machine adds nothing, and computing, waiting for a disk and sleeping all count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoopTime:
    """`blocks`: (own seconds, what ran) of every callback that took `LONG_S` or more of its own."""

    blocks: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def share_later_than(self, limit_s: float) -> float:
        """The share of moments at which what becomes ready has to wait longer than `limit_s`: 0.01 is its p99."""
        return sum(max(0.0, own_s - limit_s) for own_s, _ in self.blocks) / self.seconds

    def worst(self, count: int = 5) -> str:
        return "; ".join(f"{own_s:.3f} s {what}" for own_s, what in sorted(self.blocks, reverse=True)[:count])


LONG_S = 0.01


@contextlib.contextmanager
def loop_time() -> Iterator[LoopTime]:
    """Measure the callbacks of this thread's loop inside the block."""
    found, began = LoopTime(), time.monotonic()
    # Nanoseconds on a processor, nanoseconds of waiting for one, turns; see sched-stats of the kernel's documentation.
    statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    run = asyncio.Handle._run

    def waited_s() -> float:
        return int(os.pread(statistics, 100, 0).split()[1]) * 1e-9

    def measured(handle: asyncio.Handle) -> None:
        started, waited = time.monotonic(), waited_s()
        what = _described(handle)
        try:
            run(handle)
        finally:
            own_s = time.monotonic() - started - (waited_s() - waited)
            if own_s >= LONG_S:
                found.blocks.append((own_s, what))

    asyncio.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield found
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        os.close(statistics)
        found.seconds = time.monotonic() - began


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
