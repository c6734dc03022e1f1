"""Deadline: run one blocking call in a thread and stop waiting for it after a time, on an event loop or without one.

In: a function and seconds. Out: its result, its exception, or TooLate. Threads are daemons and are used again,
so a hop costs microseconds; one whose call is too late ends with it, and cannot hold up the exit of the process.
Not here: what can be awaited itself (`asyncio.timeout`), actors (actors).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TooLate(TimeoutError):
    """The deadline passed; a TimeoutError of the function's own is none of these."""


class _Runner:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="workbench-deadline").start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            function, future = job
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del job, function, future  # what they hold is not kept until the next one comes


_idle: list[_Runner] = []
os.register_at_fork(after_in_child=_idle.clear)  # a fork has none of these threads


def call_with_deadline(function: Callable[[], T], timeout_s: float) -> T:
    """Call `function` and return what it returns or raise what it raises. Raises TooLate after `timeout_s`."""
    with _running(function) as future:
        try:
            future.exception(timeout_s)  # waits; what the function raised it returns
        except TimeoutError:
            raise TooLate(f"no answer within {timeout_s:g} s") from None
        return future.result()


async def await_with_deadline(function: Callable[[], T], timeout_s: float) -> T:
    """`call_with_deadline` on an event loop, which goes on meanwhile."""
    with _running(function) as future:
        awaited = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([awaited], timeout=timeout_s)
        finally:
            awaited.cancel()  # else a call that is too late would look for a loop that may be closed by then
        if not done:
            raise TooLate(f"no answer within {timeout_s:g} s")
        return awaited.result()


@contextlib.contextmanager
def _running(function: Callable[[], T]) -> Iterator[Future[T]]:
    try:
        runner = _idle.pop()  # list.pop and append are atomic
    except IndexError:
        runner = _Runner()
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who stops waiting cancels nothing
    runner.jobs.put((function, future))
    try:
        yield future
    finally:
        if future.done():
            _idle.append(runner)
        else:
            runner.jobs.put(None)  # nobody asks it again: it ends once the call has returned after all
