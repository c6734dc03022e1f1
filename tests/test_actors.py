"""Waiting for actors: a deadline names the part, what it was doing, and the recipe's key where one gives it more."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayTaskError

from workbench.actors import answer, root_cause, within
from workbench.errors import DeadlineExceeded, SetupError


async def test_a_missed_deadline_names_the_part_and_the_key_that_gives_it_more() -> None:
    with pytest.raises(DeadlineExceeded, match=r"Ray did not finish starting within 0\.01 s\. Next: raise deadlines\."):
        await within(asyncio.Event().wait(), 0.01, "Ray", "starting", key="deadlines.start_s")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s\. Next: workbench doctor"):
        await within(asyncio.Event().wait(), 0.01, "the trainer", "loading the model")


async def test_a_deliberate_error_comes_out_as_itself() -> None:
    async def refuses() -> None:
        raise SetupError("no such model")

    with pytest.raises(SetupError, match="no such model"):
        await within(refuses(), 5.0, "the trainer", "loading the model")


async def test_a_time_out_inside_the_actor_is_not_taken_for_a_silent_actor() -> None:
    inside = RayTaskError("train_step", "the actor's traceback", TimeoutError("the ranks did not meet"))

    async def times_out() -> None:
        raise inside.as_instanceof_cause()

    for timeout_s in (5.0, None):
        with pytest.raises(RayTaskError, match="the actor's traceback"):
            await answer(times_out(), timeout_s)


@pytest.mark.timeout(30)  # one that goes on keeps the loop from ending too
async def test_a_watch_that_is_told_to_stop_while_the_answer_comes_stops() -> None:
    """For each turn of the loop at which it can be told so."""

    async def watch() -> None:
        while True:
            asked = loop.create_future()
            loop.call_soon(asked.set_result, None)
            await answer(asked, 5.0)

    loop = asyncio.get_running_loop()
    for turns in range(12):
        task = asyncio.create_task(watch())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert task.done(), f"told to stop after {turns} turns of the loop, it went on"


def test_of_a_remote_traceback_the_exception_is_said() -> None:
    remote = (
        "RayTaskError: \x1b[36mray::PolicyWorker.start()\x1b[39m (pid=1)\n"
        '  File "worker.py", line 1, in start\n    raise ValueError\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        '  File "worker.py", line 2, in start\n    return self._start()\n           ^^^^^^\n'
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, too long"
    )
    assert (
        root_cause(remote)
        == "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, too long"
    )
    assert root_cause("SetupError: no such model") == "SetupError: no such model"
    assert root_cause('Odd: nothing is raised\n  File "x", line 1') == 'Odd: nothing is raised\n  File "x", line 1'
