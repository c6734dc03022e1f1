"""Reconciling: a group whose finalizer was lost is brought to its end from what that one had done, and no row twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_finalizer import finalize, plane, staged_group
from test_group import BOS, chain, outcome, staged_of

from workbench import dataplane
from workbench.errors import FinalizerError, RunStoreError
from workbench.finalizer.actor import Finalizer
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.parts import write_group
from workbench.finalizer.stored import read_group
from workbench.train.rows import TrainPartition

__all__ = ["plane"]  # a fixture, taken over from there


async def test_a_stored_group_is_read_back_row_for_row(tmp_path):
    chains = [chain(i) for i in range(2)]
    outcomes = [
        outcome(0, chains[0], reward_components={"form": 0.5}),
        outcome(1, chains[1], reward=0.25),
        RolloutOutcome(rollout_id="run.0.2.0", index=2, detail="no receipt"),
    ]
    request = FinalizationRequest(group_id="g0", weight_version=3, rollouts=outcomes)
    staged, _ = await staged_of(request, chains)
    made = assemble(request, staged, BOS)
    assert read_group(tmp_path, "g0") is None
    write_group(tmp_path, request, staged, made)
    stored = read_group(tmp_path, "g0")
    assert stored.outcomes == request.rollouts and stored.summaries == made.summaries
    for ours, theirs in zip(stored.rows, made.rows, strict=True):
        for name in ("token_ids", "token_mask", "logprobs"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        for name in ("rollout_id", "reward", "reward_components", "link_spans", "weight_version_spans", "cause"):
            assert getattr(ours, name) == getattr(theirs, name)
    assert stored.finalized(3, {}).metrics == made.metrics
    # The receipts come last: without them the finalizer died before the group was stored.
    (tmp_path / "receipts" / "g0.jsonl").rename(tmp_path / "aside")
    assert read_group(tmp_path, "g0") is None
    (tmp_path / "aside").rename(tmp_path / "receipts" / "g0.jsonl")
    (tmp_path / "rows" / "g0.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(RunStoreError, match=r"g0 .* cannot be read back"):
        read_group(tmp_path, "g0")


class Puts:
    """Counts, by key, how often a row was put into the train partition; can be told to fail after a number of puts."""

    def __init__(self, monkeypatch):
        self.count: dict[str, int] = {}
        self._put = dataplane.put
        monkeypatch.setattr(dataplane, "put", self)

    async def __call__(self, partition, keys, *arguments, **options):
        if partition == dataplane.TRAIN:
            self.count |= {key: self.count.get(key, 0) + 1 for key in keys}
        await self._put(partition, keys, *arguments, **options)


class Lost(BaseException):
    """What ends a finalizer at a chosen place, as a kill would: nothing after it happens."""


class LostAtClear:
    """A staging source whose owner is lost when it begins to clear."""

    def __init__(self, source):
        self._source = source

    async def fetch(self, keys):
        return await self._source.fetch(keys)

    async def clear(self, keys):
        raise Lost


async def reconciled(tmp_path, request):
    answer = await Finalizer(str(tmp_path), bos_token_id=1).reconcile(request.model_dump(mode="json"))
    return FinalizedGroup.model_validate(answer)


async def check(group, chains, puts):
    """Every row was put once and is what was captured; staging is empty."""
    assert [row.cause for row in group.rows] == [None] * len(chains)
    assert group.train_keys == [grown.rollout_id for grown in chains]
    assert puts.count == dict.fromkeys(group.train_keys, 1)
    rows = await asyncio.to_thread(TrainPartition(20.0).fetch, group.train_keys)
    for row, grown in zip(rows, chains, strict=True):
        assert np.array_equal(row.token_ids.view(np.uint64), grown.ids["c2"])
    assert len(await dataplane.tags(dataplane.TRAIN, deadline_s=10)) == len(chains)
    assert await dataplane.tags(dataplane.STAGING, deadline_s=10) == {}


@pytest.mark.ray
async def test_lost_before_anything_was_published(plane, tmp_path, monkeypatch):
    chains, request = await staged_group(3)
    puts = Puts(monkeypatch)
    group = await reconciled(tmp_path, request)
    await check(group, chains, puts)
    assert set(group.timings_s) == {"reconcile", "fetch", "verify", "publish", "store", "clear"}


@pytest.mark.ray
async def test_lost_between_publishing_and_storing(plane, tmp_path, monkeypatch):
    chains, request = await staged_group(3)
    puts = Puts(monkeypatch)

    def lost(*_):
        raise Lost

    with monkeypatch.context() as patch:
        patch.setattr("workbench.finalizer.actor.write_group", lost)
        with pytest.raises(Lost):
            await finalize(Finalizer(str(tmp_path), bos_token_id=1), request)
    # One of the rows did not make it, and left the key without a row that a broken put leaves.
    await dataplane.clear(dataplane.TRAIN, ["run.0.1.0"], deadline_s=10)
    await dataplane.put(dataplane.TRAIN, ["run.0.1.0"], None, [{"group_id": "run.g0"}], deadline_s=10)
    puts.count["run.0.1.0"] = 0
    await check(await reconciled(tmp_path, request), chains, puts)
    assert read_group(tmp_path, "run.g0") is not None


@pytest.mark.ray
async def test_lost_after_storing_is_answered_for_from_the_parts(plane, tmp_path, monkeypatch):
    chains, request = await staged_group(3)
    puts = Puts(monkeypatch)
    finalizer = Finalizer(str(tmp_path), bos_token_id=1)
    finalizer._source = LostAtClear(finalizer._source)
    with pytest.raises(Lost):
        await finalize(finalizer, request)
    group = await reconciled(tmp_path, request)
    await check(group, chains, puts)
    assert set(group.timings_s) == {"reconcile", "publish", "clear"} and group.metrics.valid_rows == 3
    # Rows that the data plane lost come from the parts, too.
    await dataplane.clear(dataplane.TRAIN, ["run.0.0.0"], deadline_s=10)
    puts.count["run.0.0.0"] = 0
    await check(await reconciled(tmp_path, request), chains, puts)


@pytest.mark.ray
async def test_a_group_that_can_still_not_be_stored_stays_an_error(plane, tmp_path):
    _, request = await staged_group(2)
    (tmp_path / "calls").write_text("in the way")
    with pytest.raises(FinalizerError, match="could not be stored"):
        await reconciled(tmp_path, request)
