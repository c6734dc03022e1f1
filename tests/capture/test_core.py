"""Capture core: durable before acknowledged, once a call, and typed failures that never reach the completion."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from workbench.capture import CaptureCore, CaptureFailure, StagingSink
from workbench.errors import CaptureError, StagingError
from workbench.wire import (
    CaptureAdmission,
    Cause,
    CommitCoords,
    StagedCall,
    chain_hash,
    extras_digest,
    hash_token_ids,
)

ROOT = {"prompt_token_ids": [1, 2, 3], "generated_token_ids": [4, 5], "logprobs": [-0.5, -0.25]}


class Shelf:
    """A sink that keeps calls, and can be told to misbehave."""

    def __init__(self, raises: BaseException | None = None, delay_s: float = 0.0, answer: Any = None) -> None:
        self.calls: list[StagedCall] = []
        self.raises = raises
        self.delay_s = delay_s
        self.answer = answer
        self.released = threading.Event()

    def stage(self, call: StagedCall) -> Any:
        if self.delay_s:
            self.released.wait(self.delay_s)
        if self.raises is not None:
            raise self.raises
        self.calls.append(call)
        return self.answer

    async def stage_async(self, call: StagedCall) -> Any:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.raises is not None:
            raise self.raises
        self.calls.append(call)
        return self.answer


def root(call_id: str = "c0") -> CaptureAdmission:
    return CaptureAdmission(rollout_id="r", model_call_id=call_id, mode="text")


def child(call_id: str, parent: str, prev_len: int, parent_chain_hash: str, **fields: Any) -> CaptureAdmission:
    fields = {"staging_chain": [f"r/{parent}"], **fields}
    return CaptureAdmission(
        rollout_id="r",
        model_call_id=call_id,
        mode="token_in",
        parent_call_id=parent,
        prev_len=prev_len,
        parent_chain_hash=parent_chain_hash,
        **fields,
    )


@pytest.fixture(params=["sync", "async"])
def complete(request: pytest.FixtureRequest) -> Any:
    """Both forms of `complete`, called the same way."""

    def run(core: CaptureCore, call: Any, **engine: Any) -> CommitCoords:
        if request.param == "sync":
            return core.complete(call, **engine)
        return asyncio.run(core.complete_async(call, **engine))

    return run


def test_a_root_and_its_child_are_staged_with_all_digests(complete: Any) -> None:
    shelf = Shelf()
    versions = iter([7, 8])
    core = CaptureCore(shelf, lambda: next(versions))
    first = complete(core, core.begin(root()), **ROOT)
    call = core.begin(child("c1", "c0", 5, first.chain_hash), [1, 2, 3, 4, 5])
    extras = {"finish_reason": "stop"}
    second = complete(
        core,
        call,
        prompt_token_ids=[1, 2, 3, 4, 5, 6],
        generated_token_ids=np.array([7, 8]),
        logprobs=np.array([-1.0, -0.1]),
        extras=extras,
    )
    assert (first.disposition, first.prev_len, first.delta_len, first.cum_len) == ("staged", 0, 5, 5)
    assert (second.disposition, second.prev_len, second.delta_len, second.cum_len) == ("staged", 5, 3, 8)
    assert (first.weight_version, second.weight_version) == (7, 8)
    staged = shelf.calls[1]
    assert staged.token_ids_delta.tolist() == [6, 7, 8]
    assert staged.token_mask_delta.tolist() == [0.0, 1.0, 1.0]
    assert staged.generation_log_probs_delta.tolist() == [0.0, -1.0, float(np.float32(-0.1))]
    assert second.chain_hash == chain_hash(first.chain_hash, [6, 7, 8])
    assert second.cumulative_hash == hash_token_ids(range(1, 9))
    assert second.extras_digest == extras_digest(extras) and staged.extras == extras
    assert second.staging_key == "r/c1"
    # What was staged passes the record's own validation, so every digest in it holds.
    assert StagedCall.model_validate(staged.model_dump()) == staged
    assert call.token_ids is not None and call.token_ids.tolist() == list(range(1, 9))
    assert core.counts == {"staged": 2}
    assert call.failure is None


def test_coordinates_exist_only_after_the_sink_returned() -> None:
    order: list[str] = []

    class Slow(Shelf):
        def stage(self, call: StagedCall) -> None:
            self.released.wait(0.05)
            order.append("durable")

    core = CaptureCore(Slow(), lambda: 0)
    assert core.complete(core.begin(root()), **ROOT).disposition == "staged"
    order.append("coordinates")
    assert order == ["durable", "coordinates"]


def test_the_weight_version_is_the_one_at_begin(complete: Any) -> None:
    version = 3
    core = CaptureCore(Shelf(), lambda: version)
    call = core.begin(root())
    version = 4
    assert complete(core, call, **ROOT).weight_version == 3


@pytest.mark.parametrize("version", [-1, None, 1.0, True, "1"])
def test_a_weight_version_that_is_none_is_refused(version: Any) -> None:
    with pytest.raises(CaptureError, match="weight version"):
        CaptureCore(Shelf(), lambda: version).begin(root())


def test_a_call_begins_once_and_completes_once(complete: Any) -> None:
    core = CaptureCore(Shelf(), lambda: 0)
    call = core.begin(root())
    with pytest.raises(CaptureError, match="r/c0 was begun before"):
        core.begin(root())
    complete(core, call, **ROOT)
    with pytest.raises(CaptureError, match="r/c0 was completed before"):
        complete(core, call, **ROOT)
    with pytest.raises(CaptureError, match="completed before"):
        core.fail(call, Cause.SINK_ERROR, "late")
    with pytest.raises(CaptureError, match="begun before"):
        core.begin(root())


HEX = "ab" * 32


@pytest.mark.parametrize(
    ("admission", "prefix", "message"),
    [
        (root(), [1], "takes no prefix"),
        (child("c", "p", 2, HEX), None, "staging_chain"),
        (child("c", "p", 2, HEX), [1], "must have 2 ids"),
        (child("c", "p", 2, HEX), [1, -1], "-1"),
        (child("c", "p", 2, HEX, staging_chain=[], required_prefix_token_ids=[1, 2]), [1, 3], "differs"),
    ],
)
def test_a_prefix_that_does_not_fit_its_admission_is_refused(
    admission: CaptureAdmission, prefix: list[int] | None, message: str
) -> None:
    core = CaptureCore(Shelf(), lambda: 0)
    with pytest.raises(CaptureError, match=message):
        core.begin(admission, prefix)
    # A refused begin leaves nothing behind: the id can still be used.
    if admission.mode == "text":
        core.begin(admission)
    else:
        core.begin(admission, [1, 2])


FAILURES = {
    "nan": ({"logprobs": [-0.5, math.nan]}, Cause.NONFINITE_LOGPROB, "position 1 is nan"),
    "infinite": ({"logprobs": [-math.inf, -0.5]}, Cause.NONFINITE_LOGPROB, "position 0"),
    "beyond float32": ({"logprobs": [-1e39, -0.5]}, Cause.NONFINITE_LOGPROB, "position 0"),
    "None among them": ({"logprobs": [None, -0.5]}, Cause.NONFINITE_LOGPROB, "c0"),
    "too few": ({"logprobs": [-0.5]}, Cause.LOGPROB_COUNT_MISMATCH, "2 sampled ids but 1 log-probs"),
    "too many": ({"logprobs": [-0.5] * 3}, Cause.LOGPROB_COUNT_MISMATCH, "3 log-probs"),
    "none": ({"logprobs": None}, Cause.LOGPROB_COUNT_MISMATCH, "0 log-probs"),
    "no ids": ({"generated_token_ids": None}, Cause.INVALID_STAGING_ROW, "no token ids"),
    "negative id": ({"prompt_token_ids": [1, -2]}, Cause.INVALID_STAGING_ROW, "position 1 is -2"),
    "text": ({"prompt_token_ids": ["a"]}, Cause.INVALID_STAGING_ROW, "prompt ids"),
    "nothing": (
        {"prompt_token_ids": [], "generated_token_ids": [], "logprobs": []},
        Cause.INVALID_STAGING_ROW,
        "no token after",
    ),
    "extras": ({"extras": {"at": (1, 2)}}, Cause.INVALID_STAGING_ROW, "extras.at is a tuple"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_call_that_breaks_the_contract_fails_with_its_cause(name: str, complete: Any) -> None:
    change, cause, detail = FAILURES[name]
    heard: list[CaptureFailure] = []
    shelf = Shelf()
    core = CaptureCore(shelf, lambda: 5, on_failure=heard.append)
    call = core.begin(root())
    coords = complete(core, call, **{**ROOT, **change})
    assert_failed(coords)
    assert coords.weight_version == 5 and coords.cum_len == coords.prev_len == 0
    failure = call.failure
    assert failure is not None and failure.cause is cause and detail in failure.detail
    assert heard == [failure] and core.counts == {cause: 1}
    assert shelf.calls == []


def assert_failed(coords: CommitCoords) -> None:
    assert coords.disposition == "capture_failed" and coords.delta_len == 0
    proof = (coords.digest, coords.extras_digest, coords.staging_key, coords.chain_hash, coords.cumulative_hash)
    assert set(proof) == {None}


@pytest.mark.parametrize(("prompt", "detail"), [([9, 9, 5], "position 1 the prompt has 9"), ([9], "has 1 ids")])
def test_child_prompt_begins_with_parents_cumulative_ids(prompt: list[int], detail: str, complete: Any) -> None:
    core = CaptureCore(Shelf(), lambda: 0, on_failure=lambda failure: None)
    call = core.begin(child("c1", "c0", 2, HEX), [9, 8])
    coords = complete(core, call, prompt_token_ids=prompt, generated_token_ids=[3], logprobs=[-0.1])
    assert_failed(coords)
    assert (coords.parent_call_id, coords.prev_len, coords.cum_len) == ("c0", 2, 2)
    failure = call.failure
    assert failure is not None and failure.cause is Cause.PREFIX_MISMATCH and detail in failure.detail


def test_a_prompt_without_generation_is_staged(complete: Any) -> None:
    shelf = Shelf()
    core = CaptureCore(shelf, lambda: 0)
    coords = complete(core, core.begin(root()), prompt_token_ids=[1], generated_token_ids=[], logprobs=[])
    assert coords.disposition == "staged" and shelf.calls[0].token_mask_delta.tolist() == [0.0]


class Refusal:
    ok = False
    error = "disk full"


@pytest.mark.parametrize(
    ("faults", "detail"),
    [
        ({"raises": RuntimeError("gone")}, "RuntimeError: gone"),
        ({"raises": KeyError("x")}, "KeyError"),
        ({"answer": False}, "refused r/c0"),
        ({"answer": Refusal()}, "disk full"),
    ],
)
def test_a_sink_that_fails_gives_failed_coordinates(faults: dict[str, Any], detail: str, complete: Any) -> None:
    shelf = Shelf(**faults)
    core = CaptureCore(shelf, lambda: 0, on_failure=lambda failure: None)
    call = core.begin(root())
    assert_failed(complete(core, call, **ROOT))
    failure = call.failure
    assert failure is not None and failure.cause is Cause.SINK_ERROR and detail in failure.detail
    # One failed call does not spoil the next.
    shelf.raises, shelf.answer = None, None
    assert complete(core, core.begin(root("c1")), **ROOT).disposition == "staged"


def test_a_sink_that_hangs_is_given_up_at_the_deadline(complete: Any) -> None:
    shelf = Shelf(delay_s=30.0)
    core = CaptureCore(shelf, lambda: 0, sink_timeout_s=0.1, on_failure=lambda failure: None)
    started = time.monotonic()
    call = core.begin(root())
    assert_failed(complete(core, call, **ROOT))
    assert time.monotonic() - started < 5.0
    failure = call.failure
    assert failure is not None and failure.cause is Cause.SINK_TIMEOUT and "0.1 s" in failure.detail
    shelf.delay_s = 0.0
    assert complete(core, core.begin(root("c1")), **ROOT).disposition == "staged"
    shelf.released.set()


def test_a_sink_that_raises_timeout_itself_counts_as_one(complete: Any) -> None:
    core = CaptureCore(Shelf(raises=TimeoutError()), lambda: 0, on_failure=lambda failure: None)
    call = core.begin(root())
    assert_failed(complete(core, call, **ROOT))
    failure = call.failure
    assert failure is not None and failure.cause is Cause.SINK_TIMEOUT


def test_a_sink_that_gave_up_before_the_capture_did_is_a_timeout_in_its_own_words(complete: Any) -> None:
    """A sink has a deadline of its own, and says so; its cause is not to become another one on the way."""
    gave_up = StagingError("call r/c0 was not staged: no answer for 60 s", cause=Cause.SINK_TIMEOUT, key="r/c0")
    core = CaptureCore(Shelf(raises=gave_up), lambda: 0, sink_timeout_s=120.0, on_failure=lambda failure: None)
    call = core.begin(root())
    assert_failed(complete(core, call, **ROOT))
    failure = call.failure
    assert failure is not None and failure.cause is Cause.SINK_TIMEOUT and "no answer for 60 s" in failure.detail


async def test_a_sink_that_swallows_cancellation_does_not_hold_the_completion_back() -> None:
    class Stubborn(Shelf):
        async def stage_async(self, call: StagedCall) -> None:
            while not self.released.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

    shelf = Stubborn()
    core = CaptureCore(shelf, lambda: 0, sink_timeout_s=0.05, on_failure=lambda failure: None)
    async with asyncio.timeout(5.0):
        assert_failed(await core.complete_async(core.begin(root()), **ROOT))
    shelf.released.set()


async def test_a_cancelled_completion_is_a_failed_capture() -> None:
    core = CaptureCore(Shelf(delay_s=30.0), lambda: 0, on_failure=lambda failure: None)
    call = core.begin(root())
    task = asyncio.ensure_future(core.complete_async(call, **ROOT))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    failure = call.failure
    assert failure is not None and failure.cause is Cause.SINK_ERROR and "cancelled" in failure.detail


async def test_a_sink_with_a_blocking_form_alone_does_not_block_the_loop() -> None:
    begun, released = threading.Event(), threading.Event()

    class Blocking:
        def stage(self, call: StagedCall) -> None:
            begun.set()
            assert released.wait(10.0), "the loop goes on and releases it"

    core = CaptureCore(Blocking(), lambda: 0)  # type: ignore[arg-type]
    completing = asyncio.ensure_future(core.complete_async(core.begin(root()), **ROOT))
    assert await asyncio.to_thread(begun.wait, 10.0) and not completing.done()
    released.set()
    assert (await completing).disposition == "staged"


def test_calls_of_many_threads_are_staged_each_once() -> None:
    shelf = Shelf()
    core = CaptureCore(shelf, lambda: 0)
    results: list[CommitCoords] = []

    def work(first: int) -> None:
        for number in range(first, first + 50):
            results.append(core.complete(core.begin(root(f"c{number}")), **ROOT))

    threads = [threading.Thread(target=work, args=(50 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {coords.disposition for coords in results} == {"staged"}
    assert len({call.model_call_id for call in shelf.calls}) == len(results) == core.counts["staged"] == 400


def test_a_given_up_call_has_its_cause() -> None:
    core = CaptureCore(Shelf(), lambda: 2, on_failure=lambda failure: None)
    call = core.begin(root())
    assert_failed(core.fail(call, Cause.SPLICE_BOUNDARY, "two places fit"))
    assert call.failure == CaptureFailure("r", "c0", Cause.SPLICE_BOUNDARY, "two places fit")


def test_of_two_attempts_with_one_call_id_only_the_one_that_failed_has_a_cause(complete: Any) -> None:
    core = CaptureCore(Shelf(), lambda: 0, on_failure=lambda failure: None)
    first, second = (
        core.begin(CaptureAdmission(rollout_id=f"run.0.0.{attempt}", model_call_id="c0", mode="text"))
        for attempt in range(2)
    )
    assert_failed(complete(core, first, **{**ROOT, "logprobs": [math.nan, -0.25]}))
    assert complete(core, second, **ROOT).disposition == "staged"
    assert second.failure is None
    assert first.failure is not None and first.failure.rollout_id == "run.0.0.0"


def test_a_listener_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def listener(failure: CaptureFailure) -> None:
        raise ValueError("listener")

    core = CaptureCore(Shelf(), lambda: 0, on_failure=listener)
    assert_failed(core.fail(core.begin(root()), Cause.SINK_ERROR, "x"))
    assert "listener" in caplog.text


def test_failures_that_nobody_listens_to_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    core = CaptureCore(Shelf(), lambda: 0)
    core.complete(core.begin(root()), **{**ROOT, "logprobs": []})
    assert "r/c0" in caplog.text and "logprob_count_mismatch" in caplog.text


def test_the_shelf_is_a_staging_sink() -> None:
    assert isinstance(Shelf(), StagingSink)
