"""The finalizer with a live data plane: staging -> train partition -> disk -> cleared, in that order."""

from __future__ import annotations

import asyncio

import numpy as np
import polars as pl
import pytest
from test_group import chain, outcome

from workbench import dataplane
from workbench.capture.staged_row import pack
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.errors import FinalizerError
from workbench.finalizer.actor import Finalizer, FinalizerActor, bos_of
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup
from workbench.finalizer.sweeper import Sweeper
from workbench.train.rows import TrainPartition
from workbench.wire import Cause

pytestmark = pytest.mark.ray


@pytest.fixture
async def plane(tq):
    yield tq
    for partition in (dataplane.STAGING, dataplane.TRAIN):
        await dataplane.clear(partition, list(await dataplane.tags(partition, deadline_s=10)), deadline_s=10)


async def staged_group(n=4, turns=3, **options):
    chains = [chain(i, turns, **options) for i in range(n)]
    sink = TransferQueueSink(20.0)
    await asyncio.gather(*(sink.stage_async(call) for grown in chains for call in grown.staged))
    outcomes = [outcome(i, grown, f"c{turns - 1}") for i, grown in enumerate(chains)]
    return chains, FinalizationRequest(group_id="run.g0", weight_version=3, rollouts=outcomes)


async def corrupt(call):
    """Change one token of a staged call in TransferQueue itself."""
    import torch
    from tensordict import TensorDict

    ids = pack(call)["token_ids"].copy()
    ids[1] += 1
    fields = TensorDict({"token_ids": torch.from_numpy(ids)[None]}, batch_size=1)
    await dataplane.put(dataplane.STAGING, [call.staging_key], fields, [{}], deadline_s=10)


async def finalize(finalizer, request):
    return FinalizedGroup.model_validate(await finalizer.finalize(request.model_dump(mode="json")))


async def test_a_group_goes_from_staging_to_train_in_one_read_and_staging_is_cleared(plane, tmp_path):
    chains, request = await staged_group(weight_version=2)
    source = TransferQueueSource(20.0)
    group = await finalize(Finalizer(str(tmp_path), bos_token_id=1, source=source), request)
    assert source.reads == 1
    assert group.train_keys == [f"run.0.{i}.0" for i in range(4)]
    assert set(group.timings_s) == {"fetch", "verify", "publish", "store", "clear"}
    tags = await dataplane.tags(dataplane.TRAIN, deadline_s=10)
    assert tags["run.0.1.0"] == {
        "group_id": "run.g0", "index": 1, "weight_version_min": 2, "weight_version_max": 2, "sample_mask": 1,
        "n_routes_backfilled": 0,
    }  # fmt: skip
    rows = await asyncio.to_thread(TrainPartition(20.0).fetch, group.train_keys)
    for row, grown in zip(rows, chains, strict=True):
        assert row.token_ids.dtype == np.int64 and np.array_equal(row.token_ids.view(np.uint64), grown.ids["c2"])
        captured = np.concatenate([call.generation_log_probs_delta for call in grown.staged])
        assert row.logprobs.dtype == np.float32 and np.array_equal(row.logprobs, captured)
        assert row.sample_mask and row.token_mask.sum() == 21
    assert await dataplane.tags(dataplane.STAGING, deadline_s=10) == {}
    calls = pl.read_parquet(tmp_path / "calls" / "run.g0.parquet")
    assert calls.height == 12 and (tmp_path / "receipts" / "run.g0.jsonl").exists()


async def test_one_corrupted_token_rejects_that_rollout_and_the_group_keeps_n_rows(plane, tmp_path):
    chains, request = await staged_group()
    await corrupt(chains[2].staged[1])
    await dataplane.clear(dataplane.STAGING, ["run.0.3.0/c0"], deadline_s=10)
    group = await finalize(Finalizer(str(tmp_path), bos_token_id=1), request)
    assert [row.cause for row in group.rows] == [None, None, Cause.CORRUPT_DIGEST, Cause.MISSING_STAGING_ROW]
    assert (group.rows[2].call_id, group.rows[3].call_id) == ("c1", "c0")
    rows = await asyncio.to_thread(TrainPartition(20.0).fetch, group.train_keys)
    assert [row.sample_mask for row in rows] == [True, True, False, False]
    assert not rows[2].token_mask.any()
    assert np.array_equal(rows[2].token_ids.view(np.uint64), chains[0].ids["c0"][:5])
    assert (await dataplane.tags(dataplane.TRAIN, deadline_s=10))["run.0.2.0"]["sample_mask"] == 0
    kept = pl.read_parquet(tmp_path / "calls" / "run.g0.parquet").filter(pl.col("rollout_id") == "run.0.2.0")
    assert kept["token_ids"][1].to_numpy()[1] == chains[2].staged[1].token_ids_delta[1] + 1


class StubbornSource(TransferQueueSource):
    """Refuses its first clears."""

    def __init__(self, refusals):
        super().__init__(20.0)
        self.refusals = refusals

    async def clear(self, keys):
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("storage is busy")
        await super().clear(keys)


async def test_a_failed_clear_never_fails_a_published_group_and_is_left_to_the_sweeper(plane, tmp_path):
    _, request = await staged_group(2)
    finalizer = Finalizer(str(tmp_path), bos_token_id=1, source=StubbornSource(1))
    group = await finalize(finalizer, request)
    assert len(group.train_keys) == 2
    assert len(await dataplane.tags(dataplane.STAGING, deadline_s=10)) == 6
    sweeper = Sweeper({dataplane.STAGING: set}, deadline_s=10, every_s=1, grace_s=0)
    assert await sweeper.sweep() == 6
    assert await dataplane.tags(dataplane.STAGING, deadline_s=10) == {}


async def test_a_group_that_cannot_be_stored_is_withdrawn_and_can_be_finalised_again(plane, tmp_path):
    _, request = await staged_group(2)
    (tmp_path / "calls").write_text("in the way")
    finalizer = Finalizer(str(tmp_path), bos_token_id=1)
    with pytest.raises(FinalizerError, match=r"run\.g0 .* could not be stored"):
        await finalize(finalizer, request)
    assert await dataplane.tags(dataplane.TRAIN, deadline_s=10) == {}
    (tmp_path / "calls").unlink()
    group = await finalize(finalizer, request)
    assert [row.cause for row in group.rows] == [None, None]


async def test_groups_are_finalised_side_by_side_in_a_ray_actor(plane, tmp_path, ray_cluster):
    (tmp_path / "config.json").write_text('{"bos_token_id": [7], "eos_token_id": 2}')
    assert bos_of(tmp_path) == 7
    actor = FinalizerActor.remote(str(tmp_path / "run"), str(tmp_path))
    await asyncio.wait_for(actor.ready.remote(), 60)
    requests = []
    sink = TransferQueueSink(20.0)
    for g in range(3):
        outcomes = []
        for i in range(2):
            grown = chain(i)
            renamed = type(grown)(f"run.{g}.{i}.0", seed=g * 10 + i)
            renamed.call(), renamed.call("c0")
            for call in renamed.staged:
                await sink.stage_async(call)
            outcomes.append(outcome(i, renamed).model_copy(update={"rollout_id": renamed.rollout_id}))
        requests.append(FinalizationRequest(group_id=f"run.g{g}", weight_version=0, rollouts=outcomes))
    answers = await asyncio.gather(*(actor.finalize.remote(r.model_dump(mode="json")) for r in requests))
    groups = [FinalizedGroup.model_validate(answer) for answer in answers]
    assert [group.train_keys for group in groups] == [[f"run.{g}.{i}.0" for i in range(2)] for g in range(3)]
    assert all(row.cause is None for group in groups for row in group.rows)
    assert len(list((tmp_path / "run" / "rows").glob("*.parquet"))) == 3
    with pytest.raises(Exception, match="indexes"):
        await actor.finalize.remote(
            {"group_id": "x", "weight_version": 0, "rollouts": [{"rollout_id": "r", "index": 4}]}
        )
    ray_cluster.kill(actor)
