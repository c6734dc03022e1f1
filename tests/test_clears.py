"""A clear goes on to its end, whoever gave it up: half of one leaves rows that nobody can reach.

TransferQueue's own clear is a stand-in here that ends when the test says so; the real one is cleared in test_staging.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import dataplane
from workbench.errors import DeadlineExceeded
from workbench.train.rows import TrainPartition


class SlowQueue:
    """Clears what it is asked to once `may_end`; a clear that was cancelled has cleared nothing."""

    def __init__(self) -> None:
        self.may_end = False
        self.begun: list[list[str]] = []
        self.cleared: list[list[str]] = []

    async def async_kv_clear(self, keys: list[str], partition_id: str) -> None:
        self.begun.append(keys)
        while not self.may_end:  # noqa: ASYNC110 - the loop that called may be another thread's
            await asyncio.sleep(0.001)
        self.cleared.append(keys)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> SlowQueue:
    made = SlowQueue()
    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(async_kv_clear=made.async_kv_clear))
    monkeypatch.setattr(dataplane, "_connected", True)
    return made


async def test_a_clear_whose_caller_is_cancelled_goes_on(queue: SlowQueue) -> None:
    caller = asyncio.create_task(dataplane.clear(dataplane.TRAIN, ["a"], deadline_s=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert queue.begun == [["a"]]
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    queue.may_end = True
    await dataplane.drain_clears(10)
    assert queue.cleared == [["a"]]


async def test_a_clear_that_outlives_its_deadline_goes_on(queue: SlowQueue) -> None:
    with pytest.raises(DeadlineExceeded, match=r"clear of key a from train took longer than 0\.01 s"):
        await dataplane.clear(dataplane.TRAIN, ["a"], deadline_s=0.01)
    queue.may_end = True
    await dataplane.drain_clears(10)
    assert queue.cleared == [["a"]]


async def test_a_clear_that_is_late_in_the_trainer_goes_on_too(
    queue: SlowQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has no loop of its own: the one that a clear is begun in would take it along when it ends."""
    drain = dataplane.drain_clears

    async def let_it_end(timeout_s: float) -> Any:
        queue.may_end = True
        await drain(10)

    monkeypatch.setattr(dataplane, "drain_clears", let_it_end)
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(TrainPartition(0.01).clear, ["a", "b"])
    assert queue.cleared == [["a", "b"]]


async def test_a_clear_that_never_ends_is_given_up_with_its_process(queue: SlowQueue) -> None:
    with pytest.raises(DeadlineExceeded, match="goes on in the background"):
        await dataplane.clear(dataplane.TRAIN, ["a"], deadline_s=0.01)
    (task,) = dataplane._clears
    await dataplane.drain_clears(0.01)
    assert task.cancelled() and queue.cleared == []
