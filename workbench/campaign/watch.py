"""Watch: who is alive, what is in flight, when something last moved, and how late the event loop runs.

Invariants: a campaign in which a part died, or in which nothing moves for `stall_timeout_s`, ends, and the error names
the part and what was in flight. Not here: deadlines of single waits (workbench.actors), what replaces a part (pool).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping

import numpy as np

from workbench.actors import ActorLost, answer
from workbench.errors import ComponentDied, DeadlineExceeded

Heartbeat = Callable[[], Awaitable[object]]
"""A call to a part that fails once the part is dead, whenever it was made."""

_LAG_EVERY_S = 0.1
_LAGS_KEPT = 36_000  # of the last hour; a run of a week must not grow by them
_IN_FLIGHT = "; in flight: "


class Watch:
    """Kept by the pumps, read by the two tasks here.

    `in_flight` maps what is being worked on (a group id, `step 3`) to what is being done with it.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.in_flight: dict[str, str] = {}
        self.last_in_flight = ""
        """What was in flight when the first thing failed; empty as long as nothing has."""
        self._stall_timeout_s = stall_timeout_s
        self._bounded: set[str] = set()
        self._last_moved = time.monotonic()
        self._lags_s: deque[tuple[float, float]] = deque(maxlen=_LAGS_KEPT)

    def moved(self) -> None:
        """Something came to an end: the clock of the stall begins again."""
        self._last_moved = time.monotonic()

    @contextlib.contextmanager
    def doing(self, what: str, doing: str, *, bounded: bool = False) -> Iterator[None]:
        """`what` is in flight inside the block; set `in_flight[what]` there when what is being done changes.

        `bounded`: every wait in the block has a deadline of its own, so that however long it takes it is no stall.
        """
        self.in_flight[what] = doing
        if bounded:
            self._bounded.add(what)
        try:
            yield
        except BaseException:
            self.last_in_flight = self.last_in_flight or self.described()
            raise
        finally:
            self.in_flight.pop(what, None)
            self._bounded.discard(what)

    def described(self) -> str:
        """What is in flight, for a sentence."""
        return ", ".join(f"{what} ({doing})" for what, doing in sorted(self.in_flight.items())) or "nothing"

    async def until_dead(self, part: str, beat: Heartbeat, every_s: float) -> None:
        """Runs until `part` is dead and then raises ComponentDied."""
        while True:
            if (why := await _why_dead(beat, None)) is not None:
                raise ComponentDied(f"{part} died: {why.rstrip('.')}{_IN_FLIGHT}{self.described()}.")
            await asyncio.sleep(every_s)

    async def find_dead(
        self, beats: Mapping[str, Heartbeat], timeout_s: float, seen: BaseException
    ) -> ComponentDied | None:
        """Ask every part once, for an error that may only be the consequence of a death; None when all are alive.

        One that does not answer within `timeout_s` is busy, not dead. A death that was `seen` by whoever needed the
        part is one, though its process may still be on its way out.
        """
        whys = await asyncio.gather(*(_why_dead(beat, timeout_s) for beat in beats.values()))
        dead = [f"{part} died: {why.rstrip('.')}" for part, why in zip(beats, whys, strict=True) if why is not None]
        if not dead and isinstance(seen, ComponentDied) and _IN_FLIGHT not in str(seen):
            dead = [str(seen).rstrip(".")]
        in_flight = self.last_in_flight or self.described()
        return ComponentDied(f"{'; '.join(dead)}{_IN_FLIGHT}{in_flight}.") if dead else None

    async def until_stalled(self) -> None:
        """Runs until nothing has moved for `rollouts.stall_timeout_s` and then raises DeadlineExceeded. A step, a
        weight sync or a checkpoint may take longer: they are held to deadlines of their own."""
        limit_s = self._stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            if not self._bounded and time.monotonic() - self._last_moved > limit_s:
                raise DeadlineExceeded(
                    f"nothing has moved for {limit_s:g} s (rollouts.stall_timeout_s); in flight: {self.described()}."
                )

    async def measure_loop_lag(self) -> None:
        """Runs for ever: how much later than asked a sleeping task wakes up is how long the loop was blocked.

        Its own share of that is what is left without the time in which this thread was ready and had no processor.
        """
        with queueing() as queued_s:
            while True:
                due, queued = time.monotonic() + _LAG_EVERY_S, queued_s()
                await asyncio.sleep(_LAG_EVERY_S)
                late_s = max(0.0, time.monotonic() - due)
                self._lags_s.append((late_s, max(0.0, late_s - (queued_s() - queued))))

    def loop_lag_p99_s(self) -> dict[str, float | None]:
        """99th percentile of the loop's lateness in seconds, as `total` and as its `own` share, which a busy machine
        does not add to; None before the first measurement."""
        if not self._lags_s:
            return {"total": None, "own": None}
        total, own = np.quantile(np.array(self._lags_s), 0.99, axis=0)
        return {"total": float(total), "own": float(own)}


@contextlib.contextmanager
def queueing() -> Iterator[Callable[[], float]]:
    """A function that says for how many seconds the thread that enters has waited for a processor so far; 0 where the
    kernel does not count that."""
    try:
        # Nanoseconds on a processor, nanoseconds of waiting for one, turns: Documentation/scheduler/sched-stats.
        statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(statistics, 100, 0).split()[1]) * 1e-9
    finally:
        os.close(statistics)


async def _why_dead(beat: Heartbeat, timeout_s: float | None) -> str | None:
    """None: alive, or at least not found dead within `timeout_s`."""
    try:
        await answer(beat(), timeout_s)
    except ActorLost as lost:
        return str(lost) if lost.died else None
    except ComponentDied as died:
        return str(died)
    return None
