"""Gate: calls run together, or one weight update runs alone.

Invariant: no generation straddles two weight versions, because a closing gate waits until the running ones are done.
The exception is asked for: with `straddle` running calls stay, and what the engine says of them is held back until the
new weights are proved. Of an engine in doubt (it may be paused, or have mixed weights) nothing is sampled: the gate
stays closed until an update ends well.
Not here: pausing the engine and loading weights (worker, weights), recording what ran (capture).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from workbench.errors import CaptureError, DeadlineExceeded


class GenerationGate:
    """Lets calls run together, or one weight update alone.

    A closing gate holds new calls back and, unless they may straddle, waits until the running ones are done.
    """

    def __init__(self) -> None:
        self.running = 0
        self.held = False
        """Whether a weight update has ended and keeps calls back all the same, until `open`."""
        self.in_doubt = False
        """Whether a weight update has begun to pause the engine or to change its weights, and has not ended well."""
        self._taken = False
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._proved = asyncio.Event()
        self._proved.set()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold while one generation runs."""
        while not self._open.is_set():
            await self._open.wait()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def alone(
        self, timeout_s: float, *, stay_closed: bool = False, straddle: bool = False
    ) -> AsyncIterator[None]:
        """Hold while nothing may run; `stay_closed` leaves the gate closed afterwards, until `open`.

        With `straddle` running calls stay, for the holder to pause them; their outputs wait in `proved` until `open`.
        A holder that sets `in_doubt` before it asks anything of the engine, and fails, leaves the gate closed for
        another to try.
        Raises `DeadlineExceeded`, with the gate open, when running calls do not end within `timeout_s`.
        """
        if self._taken or not (self._open.is_set() or self.in_doubt):
            raise CaptureError("A weight update is already in progress; expected one at a time.")
        self._taken = True
        self._open.clear()
        try:
            if straddle:
                self._proved.clear()
            else:
                await self._wait_until_idle(timeout_s)
            yield
        except BaseException:
            if not self.in_doubt:
                self.open()
            raise
        finally:
            self._taken = False
        self.held = stay_closed
        if not stay_closed:
            self.open()

    async def _wait_until_idle(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.running} generations still ran {timeout_s:g} s after a weight update asked for quiet."
            ) from error

    def open(self) -> None:
        """Let the calls go on that were held back."""
        self.held = False
        self._proved.set()
        self._open.set()

    @property
    def holds_outputs(self) -> bool:
        """Whether what running calls sample is held back for now."""
        return not self._proved.is_set()

    async def proved(self) -> None:
        """Wait while a running call may have output of weights that nobody has proved yet."""
        while self.holds_outputs:
            await self._proved.wait()


class GatedEngine:
    """An engine client whose generations wait at the gate; everything else is the engine's own."""

    def __init__(self, engine: Any, gate: GenerationGate) -> None:
        self._engine = engine
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """The engine's `generate`, unchanged."""
        async with self._gate.call():
            outputs = self._engine.generate(prompt, sampling_params, request_id, **kwargs)
            # Closed here and now when the reader leaves: the gate must not open while the engine still runs the call.
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    await self._gate.proved()
                    yield output
