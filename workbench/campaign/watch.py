"""Watch: what is in flight, when something last moved, and how late the event loop runs.

Invariant: a campaign in which nothing moves for `stall_timeout_s` ends, and the error names what was in flight.
Not here: deadlines of single waits (workbench.actors), what to do about it (controller).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from workbench.errors import DeadlineExceeded

_LAG_EVERY_S = 0.1


class Watch:
    """Kept by the pumps, read by the two tasks here.

    `in_flight` maps what is being worked on (a group id, `step 3`) to what is being done with it.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.in_flight: dict[str, str] = {}
        self._stall_timeout_s = stall_timeout_s
        self._last_moved = time.monotonic()
        self._lags_s: list[float] = []

    def moved(self) -> None:
        """Something came to an end: the clock of the stall begins again."""
        self._last_moved = time.monotonic()

    @contextlib.contextmanager
    def doing(self, what: str, doing: str) -> Iterator[None]:
        """`what` is in flight inside the block; set `in_flight[what]` there when what is being done changes."""
        self.in_flight[what] = doing
        try:
            yield
        finally:
            self.in_flight.pop(what, None)

    def described(self) -> str:
        """What is in flight, for a sentence."""
        return ", ".join(f"{what} ({doing})" for what, doing in sorted(self.in_flight.items())) or "nothing"

    async def until_stalled(self, check: Callable[[], None]) -> None:
        """Runs until nothing has moved for `rollouts.stall_timeout_s` and then raises DeadlineExceeded; `check` is
        called in between and may raise."""
        limit_s = self._stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            check()
            if time.monotonic() - self._last_moved > limit_s:
                raise DeadlineExceeded(
                    f"nothing has moved for {limit_s:g} s (rollouts.stall_timeout_s); in flight: {self.described()}."
                )

    async def measure_loop_lag(self) -> None:
        """Runs for ever: how much later than asked a sleeping task wakes up is how long the loop was blocked."""
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lags_s.append(max(0.0, time.monotonic() - due))

    def loop_lag_p99_s(self) -> float | None:
        """99th percentile of the loop's lateness in seconds; None before the first measurement."""
        return float(np.quantile(self._lags_s, 0.99)) if self._lags_s else None
