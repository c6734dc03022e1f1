"""Deadline: run one blocking call in a thread and stop waiting for it after a time.

In: a function and seconds. Out: its result, its exception, or TimeoutError. Threads are daemons and are used again,
so a hop costs microseconds; one whose call is too late ends with it, and cannot hold up the exit of the process.
Not here: asyncio, which has `asyncio.wait`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class _Runner:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="workbench-deadline").start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                outcome = True, job()
            except BaseException as error:
                outcome = False, error
            self.results.put(outcome)
            del job, outcome


_idle: list[_Runner] = []


def call_with_deadline(function: Callable[[], Any], timeout_s: float) -> Any:
    """Call `function` and return what it returns or raise what it raises. Raises TimeoutError after `timeout_s`."""
    try:
        runner = _idle.pop()  # list.pop and append are atomic
    except IndexError:
        runner = _Runner()
    runner.jobs.put(function)
    try:
        succeeded, outcome = runner.results.get(timeout=timeout_s)
    except queue.Empty:
        runner.jobs.put(None)  # nobody asks it again: it ends once the call has returned after all
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    _idle.append(runner)
    if not succeeded:
        raise outcome
    return outcome
