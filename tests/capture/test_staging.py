"""Staging: what is staged comes back bit for bit, and what does not come back is named, key by key."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from chains import Chain
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import dataplane
from workbench.capture import staged_row
from workbench.capture.staged_row import pack, tags_of, unpack
from workbench.capture.staging import MemorySink, TransferQueueSink, TransferQueueSource
from workbench.errors import DeadlineExceeded, StagingError
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyWorker
from workbench.wire import Cause, StagedCall, encode_routes
from workbench.wire.extras import FINISH_REASON, ROUTED_EXPERTS


def routes(tokens, dtype):
    return encode_routes(np.arange(tokens * 2 * 2, dtype=dtype).reshape(tokens, 2, 2))


def two_turns(rollout_id, **options):
    chain = Chain(rollout_id, **options)
    chain.call(extras={FINISH_REASON: "stop", "temperature": 1.0, "n": 1})
    chain.call("c0", extras={})
    return chain


# a row, without TransferQueue


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40),
    generated=st.integers(0, 40),
    extras=st.one_of(
        st.none(),
        st.dictionaries(
            st.text(max_size=5),
            st.one_of(
                st.none(),
                st.booleans(),
                st.integers(-(2**63), 2**63 - 1),
                st.floats(allow_nan=False, allow_infinity=False),
                st.text(max_size=8),
            ),
            max_size=4,
        ),
    ),
)
def test_unpack_gives_back_what_was_packed_bit_for_bit(ids, generated, extras):
    chain = Chain("run.0.0.0")
    call = chain.call(token_ids=ids, generated=min(generated, len(ids)), extras=extras)
    columns = pack(call)
    assert {name: column.dtype for name, column in columns.items()} == {
        "token_ids": np.int64,
        "logprobs": np.float32,
        "meta": np.uint8,
    }
    back = unpack(call.staging_key, columns)
    assert back == call
    assert back.recompute_digest() == call.digest
    StagedCall.model_validate(back.model_dump())


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_routes_are_staged_in_their_wire_dtype_and_come_back_as_the_same_envelope(dtype):
    call = Chain("run.0.0.0").call(extras={FINISH_REASON: "stop", ROUTED_EXPERTS: routes(12, dtype)})
    columns = pack(call)
    assert (columns["routes"].dtype, columns["routes"].shape) == (dtype, (12, 2, 2))
    assert b"nrlre1" not in columns["meta"].tobytes()
    assert unpack(call.staging_key, columns) == call


def test_a_delta_that_is_not_carry_then_generation_is_refused_before_it_is_staged():
    call = Chain("run.0.0.0").call()
    mask = call.token_mask_delta.copy()
    mask[0], mask[-1] = 1, 0
    with pytest.raises(StagingError, match="carry") as error:
        pack(call.model_copy(update={"token_mask_delta": mask}))
    assert error.value.cause == Cause.INVALID_STAGING_ROW


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda c: c.pop("logprobs"), "no column logprobs"),
        (lambda c: c.update(meta=np.frombuffer(b"{", dtype=np.uint8)), "not JSON"),
        (lambda c: c.update(meta=np.frombuffer(b"{}", dtype=np.uint8)), "exactly the fields"),
        (lambda c: c.pop("routes"), "routed experts did not come back"),
        (lambda c: c.update(routes=c["routes"].astype(np.float32)), "routed experts cannot be read"),
        (lambda c: c.update(token_ids=c["token_ids"].astype(np.int32)), "token_ids must be int64"),
        (lambda c: c.update(token_ids=c["token_ids"][:3]), "7 log-probs for 3"),
        (
            lambda c: c.update(meta=np.frombuffer(c["meta"].tobytes().replace(b'"c0"', b'"c9"'), dtype=np.uint8)),
            "call r/c9",
        ),
        (
            lambda c: c.update(
                meta=np.frombuffer(c["meta"].tobytes().replace(b'prev_len":0', b'prev_len":"0"'), dtype=np.uint8)
            ),
            "another type",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_invalid_and_says_why(spoil, why):
    columns = pack(Chain("r").call(extras={ROUTED_EXPERTS: routes(12, np.int16)}))
    spoil(columns)
    with pytest.raises(StagingError, match=why) as error:
        unpack("r/c0", columns)
    assert (error.value.cause, error.value.key) == (Cause.INVALID_STAGING_ROW, "r/c0")


@pytest.mark.parametrize("meta", [b"{", b"[]", b"{}", b"7"])
def test_metadata_that_says_nothing_names_no_row_and_promises_no_routes(meta):
    columns = {"meta": np.frombuffer(meta, dtype=np.uint8)}
    assert staged_row.identity(columns) is None and not staged_row.has_routes(columns)


def test_an_envelope_in_another_spelling_stays_as_it_was_written():
    """Base64 of one byte leaves bits unused; another writer may have set them, and the digest is of the text."""
    grown = Chain("run.0.0.0")
    envelope = "nrlre1:int8:1x1x1:AB=="
    call = grown.call(extras={ROUTED_EXPERTS: envelope})
    columns = pack(call)
    assert "routes" not in columns
    assert unpack(call.staging_key, columns) == call


async def test_the_memory_sink_answers_in_the_order_asked_and_isolates_bad_rows():
    chain = two_turns("r")
    sink = MemorySink()
    for call in chain.staged:
        await sink.stage_async(call)
    sink.rows["r/c1"].pop("meta")
    first, missing, bad, again = await sink.fetch(["r/c0", "r/nope", "r/c1", "r/c0"])
    assert first == again == chain.staged[0]
    assert (missing.cause, bad.cause) == (Cause.MISSING_STAGING_ROW, Cause.INVALID_STAGING_ROW)
    assert sink.reads == 1 and sink.tags["r/c0"] == {"rollout_id": "r", "weight_version": 0}
    await sink.clear(["r/c0", "r/unknown"])
    assert (await sink.fetch(["r/c0"]))[0].cause == Cause.MISSING_STAGING_ROW


# with TransferQueue


@pytest.fixture
async def plane(tq):
    """Sink and source; whatever a test staged is cleared after it."""
    yield TransferQueueSink(20.0), TransferQueueSource(20.0)
    if listed := list(await dataplane.tags(dataplane.STAGING, deadline_s=10)):
        await dataplane.clear(dataplane.STAGING, listed, deadline_s=10)


async def overwrite(key, **columns):
    """Write columns of a staged row anew, as a faulty worker or a storage fault would leave them."""
    import torch
    from tensordict import TensorDict

    fields = TensorDict({n: torch.from_numpy(np.array(c))[None] for n, c in columns.items()}, batch_size=1)
    await dataplane.put(dataplane.STAGING, [key], fields, [{}], deadline_s=10)


@pytest.mark.ray
async def test_staged_calls_come_back_exact_in_one_read_with_the_fixed_tags(plane):
    sink, source = plane
    chains = [two_turns(f"run.0.{i}.0", seed=i, weight_version=i) for i in range(8)]
    calls = [call for chain in chains for call in chain.staged]
    calls.append(Chain("run.0.9.0").call(token_ids=[2**64 - 1, 0, 7], generated=2))
    calls.append(Chain("run.0.10.0").call(generated=0))
    await asyncio.gather(*map(sink.stage_async, calls))
    keys = [call.staging_key for call in reversed(calls)] + [calls[0].staging_key]
    fetched = await source.fetch(keys)
    assert fetched == [*reversed(calls), calls[0]]
    assert source.reads == 1
    for call in fetched:
        assert call.recompute_digest() == call.digest
        dtypes = call.token_ids_delta.dtype, call.token_mask_delta.dtype, call.generation_log_probs_delta.dtype
        assert dtypes == (np.uint64, np.float32, np.float32)
    listed = await dataplane.tags(dataplane.STAGING, deadline_s=10)
    assert listed == {call.staging_key: tags_of(call) for call in calls}
    assert {frozenset(tags) for tags in listed.values()} == {frozenset({"rollout_id", "weight_version"})}


@pytest.mark.ray
async def test_missing_keys_are_named_though_transferqueue_leaves_them_out_silently(plane):
    sink, source = plane
    chain = two_turns("run.1.0.0")
    for call in chain.staged:
        await sink.stage_async(call)
    answers = await source.fetch(["run.1.0.0/gone", "run.1.0.0/c1", "run.1.0.0/lost", "run.1.0.0/c0"])
    assert [getattr(a, "cause", None) for a in answers] == [Cause.MISSING_STAGING_ROW, None] * 2
    assert [answers[1], answers[3]] == chain.staged[::-1]
    assert [a.cause for a in await source.fetch(["x/1", "x/2"])] == [Cause.MISSING_STAGING_ROW] * 2
    assert await source.fetch([]) == []


@pytest.mark.ray
async def test_one_bad_row_is_isolated_and_the_others_come_back(plane):
    sink, source = plane
    chain = Chain("run.2.0.0")
    for parent in (None, "c0", "c1", "c2", "c3"):
        await sink.stage_async(chain.call(parent))
    await overwrite("run.2.0.0/c1", meta=np.frombuffer(b"{}", dtype=np.uint8).copy())
    await overwrite("run.2.0.0/half", token_ids=np.arange(3))  # a row without the other columns
    await dataplane.put(dataplane.STAGING, ["run.2.0.0/phantom"], None, [{"rollout_id": "x"}], deadline_s=10)
    keys = [f"run.2.0.0/{name}" for name in ("c0", "c1", "half", "c2", "phantom", "c3", "c4")]
    answers = await source.fetch(keys)
    assert [getattr(a, "cause", "") for a in answers] == [
        "", Cause.INVALID_STAGING_ROW, Cause.INVALID_STAGING_ROW, "", Cause.MISSING_STAGING_ROW, "", "",
    ]  # fmt: skip
    assert [a for a in answers if not isinstance(a, StagingError)] == [chain.staged[i] for i in (0, 2, 3, 4)]


@pytest.mark.ray
async def test_one_key_that_fails_the_whole_read_costs_a_few_reads_more_not_one_a_row(plane):
    sink, source = plane
    chain = Chain("run.2.1.0")
    for turn in range(31):
        await sink.stage_async(chain.call(f"c{turn - 1}" if turn else None, carry=1, generated=1))
    await dataplane.put(dataplane.STAGING, ["run.2.1.0/phantom"], None, [{"rollout_id": "x"}], deadline_s=10)
    keys = [*(call.staging_key for call in chain.staged[:20]), "run.2.1.0/phantom"]
    keys += [call.staging_key for call in chain.staged[20:]]
    answers = await source.fetch(keys)
    assert answers.pop(20).cause == Cause.MISSING_STAGING_ROW
    assert answers == chain.staged
    assert source.reads <= 2 * 5 + 2


@pytest.mark.ray
async def test_a_changed_token_is_not_repaired_and_not_hidden(plane):
    sink, source = plane
    call = Chain("run.3.0.0").call()
    await sink.stage_async(call)
    ids = pack(call)["token_ids"].copy()
    ids[3] += 1
    await overwrite(call.staging_key, token_ids=ids)
    (fetched,) = await source.fetch([call.staging_key])
    assert fetched.token_ids_delta[3] == call.token_ids_delta[3] + 1
    assert fetched.digest == call.digest != fetched.recompute_digest()


@pytest.mark.ray
@pytest.mark.parametrize("dtype", [np.int8, np.int16])
async def test_routes_on_some_calls_only_come_back_though_the_batch_drops_the_column(plane, dtype):
    sink, source = plane
    with_routes = Chain("run.4.0.0").call(extras={ROUTED_EXPERTS: routes(12, dtype)})
    longer = Chain("run.4.1.0").call(generated=9, extras={ROUTED_EXPERTS: routes(14, dtype)})
    without = Chain("run.4.2.0").call(extras={FINISH_REASON: "stop"})
    for call in (with_routes, longer, without):
        await sink.stage_async(call)
    assert await source.fetch([with_routes.staging_key, longer.staging_key]) == [with_routes, longer]
    assert source.reads == 1
    assert await source.fetch([c.staging_key for c in (with_routes, without, longer)]) == [with_routes, without, longer]
    assert source.reads == 3


@pytest.mark.ray
async def test_cleared_calls_are_gone_and_clearing_twice_or_unknown_keys_is_fine(plane):
    sink, source = plane
    for round_ in range(5):  # slots are reused, so old data under a new key would show here
        call = Chain("run.5.0.0", seed=round_).call(generated=4 + round_)
        await sink.stage_async(call)
        assert await source.fetch([call.staging_key]) == [call]
        await source.clear([call.staging_key, "run.5.0.0/unknown"])
        await source.clear([call.staging_key])
        assert (await source.fetch([call.staging_key]))[0].cause == Cause.MISSING_STAGING_ROW
    await dataplane.put(dataplane.STAGING, ["run.5.0.0/tag"], None, [{"rollout_id": "x"}], deadline_s=10)
    await source.clear(["run.5.0.0/tag"])
    assert await dataplane.tags(dataplane.STAGING, deadline_s=10) == {}


@pytest.mark.ray
def test_a_caller_without_an_event_loop_can_stage(tq):
    call = Chain("run.6.0.0").call()
    TransferQueueSink(20.0).stage(call)

    async def read_and_clear():
        source = TransferQueueSource(20.0)
        fetched = await source.fetch([call.staging_key])
        await source.clear([call.staging_key])
        return fetched

    assert asyncio.run(read_and_clear()) == [call]


def test_what_a_failed_put_leaves_behind_goes_also_without_an_event_loop(monkeypatch):
    cleared = []

    async def connected(*_, **__): ...

    async def put(*_, **__):
        raise RuntimeError("a storage unit is gone")

    async def clear(partition, keys, **_):
        await asyncio.sleep(0.01)
        cleared.extend(keys)

    for name, fake in (("connect", connected), ("put", put), ("clear", clear)):
        monkeypatch.setattr(dataplane, name, fake)
    call = Chain("run.7.1.0").call()
    with pytest.raises(StagingError, match="a storage unit is gone"):
        TransferQueueSink().stage(call)
    assert cleared == [call.staging_key]


@pytest.mark.ray
async def test_a_put_that_outlives_its_deadline_is_a_timeout_and_leaves_no_key(plane):
    _, source = plane
    call = Chain("run.7.0.0").call()
    sink = TransferQueueSink(deadline_s=0.0)
    with pytest.raises(StagingError) as error:
        await sink.stage_async(call)
    assert error.value.cause == Cause.SINK_TIMEOUT
    assert isinstance(error.value.__cause__, DeadlineExceeded)
    assert (await source.fetch([call.staging_key]))[0].cause == Cause.MISSING_STAGING_ROW


@pytest.mark.ray
async def test_the_data_plane_leaves_torchs_number_of_threads_alone(plane):
    import torch

    sink, source = plane
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        call = Chain("run.8.0.0").call()
        await sink.stage_async(call)
        await source.fetch([call.staging_key])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("sink_timeout_s", "bound_s"), [(10.0, 60.0), (90.0, 90.0)])
def test_a_worker_waits_for_a_staging_as_long_as_its_setting_says(monkeypatch, sink_timeout_s, bound_s):
    made = []
    monkeypatch.setattr("workbench.serving.worker.PolicyServer", lambda settings, *plane: made.extend(plane))
    monkeypatch.setattr("workbench.capture.staging.TransferQueueSink", lambda deadline_s: deadline_s)
    config = WorkerConfig(model_path="model", engine="scripted", script_path="script", sink_timeout_s=sink_timeout_s)
    PolicyWorker(config.model_dump())
    assert made[0] == bound_s
