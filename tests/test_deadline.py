"""A blocking call with a deadline: its outcome, on a loop or without one, and what becomes of its thread."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from workbench.deadline import TooLate, await_with_deadline, call_with_deadline

Call = Callable[[Callable[[], Any], float], Any]


def on_a_loop(function: Callable[[], Any], timeout_s: float) -> Any:
    return asyncio.run(await_with_deadline(function, timeout_s))


both = pytest.mark.parametrize("call", [call_with_deadline, on_a_loop])


def runners() -> int:
    return sum(thread.name == "workbench-deadline" for thread in threading.enumerate())


def fails(error: BaseException) -> Any:
    raise error


@both
def test_a_call_in_time_has_its_own_outcome_and_leaves_its_thread_for_the_next(call: Call) -> None:
    first = call(threading.current_thread, 10.0)
    assert first.daemon and first is not threading.current_thread()
    for error in (KeyError("score"), TimeoutError("its own"), SystemExit(3)):
        with pytest.raises(type(error), match=r"score|its own|3") as raised:
            call(lambda error=error: fails(error), 10.0)  # type: ignore[misc]
        assert not isinstance(raised.value, TooLate)
    assert call(threading.current_thread, 10.0) is first


@both
def test_a_thread_whose_call_was_too_late_ends_with_it(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    before, released = runners(), threading.Event()
    for _ in range(3):
        with pytest.raises(TooLate, match=r"no answer within 0\.01 s"):
            call(released.wait, 0.01)
    assert call(lambda: "another thread", 10.0) == "another thread"
    released.set()
    deadline = time.monotonic() + 10.0
    while runners() > before + 1:
        assert time.monotonic() < deadline, f"{runners()} threads, {before} before"
        time.sleep(0.01)
    gc.collect()
    assert not caplog.records, "of the loops that are closed by now nobody was told anything"


async def test_who_stops_waiting_on_a_loop_leaves_the_call_to_its_end() -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait(10.0)
        ended.set()

    waiting = asyncio.create_task(await_with_deadline(work, 10.0))
    assert await asyncio.to_thread(begun.wait, 10.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await await_with_deadline(lambda: not ended.is_set(), 10.0), "its thread is not given to another call"
    released.set()
    assert await asyncio.to_thread(ended.wait, 10.0)


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    call_with_deadline(int, 10.0)
    child = os.fork()
    if child == 0:
        try:
            call_with_deadline(int, 5.0)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
