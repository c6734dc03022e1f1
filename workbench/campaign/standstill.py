"""Standstill: an agent that keeps the event loop to itself, and with it every other rollout.

    no beat of the loop for 10 s             ──▶ told, with the line that runs
    none for half of `rollouts.timeout_s`    ──▶ `StoodStill` is raised in the agent's code: it costs its rollout, and
                                                 the others, whose time runs on meanwhile, have the other half
Beats are counted by a thread that looks twice a second, so a process that was stopped is not taken for such an agent.
What waits in C (`time.sleep`) is raised in when it comes back. Not here: agents that await for too long (rollouts).
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType

from workbench import own_code

LOOK_EVERY_S = 0.5
TOLD_AFTER_S = 10.0
SHARE = 0.5
"""Of the time that a rollout has, how much one may keep all others waiting."""


class StoodStill(Exception):
    """Raised in an agent's code by another thread."""


class Standstill:
    """Watches the loop in which `run` is awaited; `runs_agents` is the function that every agent is called by."""

    def __init__(
        self, rollout_timeout_s: float, runs_agents: Callable[..., object], tell: Callable[[str], None]
    ) -> None:
        self._longest_s = SHARE * rollout_timeout_s
        self._code: CodeType = runs_agents.__code__  # type: ignore[attr-defined]
        self._tell = tell
        self._beats = 0

    async def run(self) -> None:
        """Runs for ever."""
        ended = threading.Event()
        arguments = (threading.get_ident(), ended)
        threading.Thread(target=self._look, args=arguments, name="workbench-standstill", daemon=True).start()
        try:
            while True:
                self._beats += 1
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            ended.set()

    def _look(self, thread: int, ended: threading.Event) -> None:
        beats, still_s = self._beats, 0.0
        while not ended.wait(LOOK_EVERY_S):
            if beats != self._beats:
                beats, still_s = self._beats, 0.0
                continue
            before_s, still_s = still_s, still_s + LOOK_EVERY_S
            if before_s < TOLD_AFTER_S <= still_s:
                self._tell(
                    f"the event loop has stood still for {TOLD_AFTER_S:g} s{own_code.place_in(_frame(thread))}: "
                    "no rollout can go on"
                )
            if still_s >= self._longest_s and self._in_agent(_frame(thread)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(StoodStill))
                still_s = 0.0

    def _in_agent(self, frame: FrameType | None) -> bool:
        return any(caller.f_code is self._code for caller, _ in traceback.walk_stack(frame)) if frame else False


def _frame(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)
