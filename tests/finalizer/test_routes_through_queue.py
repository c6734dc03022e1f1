"""Routes through the live data plane: stage → wire → row → trainer, every id and the sentinel as they were."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_finalizer import finalize, plane  # noqa: F401 - a fixture
from test_route_rows import CARRY, GENERATED, chain

from workbench import dataplane
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.errors import TrainerError
from workbench.finalizer.actor import Finalizer
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.train.route_rows import fetch_routes
from workbench.train.rows import TrainPartition
from workbench.wire import Cause

pytestmark = pytest.mark.ray

EDGE_IDS = [0, 127, 128, 255, 256, 511, -1]


def edges(dtype, turn):
    """A call's routes [12, 2, 7 or fewer] with every edge id that the dtype has; the last row is -1."""
    ids = [value for value in EDGE_IDS if value <= np.iinfo(dtype).max]
    values = np.array([np.roll(ids, row + turn) for row in range(CARRY + GENERATED)], dtype=dtype)
    values = np.stack([values, values[::-1]], axis=1)
    values[-1] = -1
    return values


async def staged(group_id, fragments, **receipt):
    """Chains in TransferQueue, a rollout an entry of `fragments`, and the request to finalise them."""
    sink, outcomes = TransferQueueSink(20.0), []
    for index, own in enumerate(fragments):
        grown = chain(index, own)
        for call in grown.staged:
            await sink.stage_async(call)
        receipt_of = grown.receipt(f"c{len(grown.staged) - 1}", **receipt)
        outcomes.append(RolloutOutcome(rollout_id=grown.rollout_id, index=index, receipt=receipt_of))
    return FinalizationRequest(group_id=group_id, weight_version=0, rollouts=outcomes)


@pytest.mark.parametrize("mode", ["direct", "deferred"])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
async def test_every_id_and_the_sentinel_survive_stage_wire_row_and_trainer(plane, tmp_path, dtype, mode):  # noqa: F811
    fragments = [[edges(dtype, 0), edges(dtype, 1)], [edges(dtype, 2)], [edges(dtype, 3), None]]
    request = await staged("run.g0", fragments)
    source = TransferQueueSource(20.0)
    finalizer = Finalizer(str(tmp_path), bos_token_id=1, source=source, routes={"mode": mode, "missing": "reject"})
    group = await finalize(finalizer, request)
    assert [row.cause for row in group.rows] == [None, None, Cause.ROUTE_MISSING]
    tags = await dataplane.tags(dataplane.TRAIN, deadline_s=10)
    assert [tags[key]["n_routes_backfilled"] for key in group.train_keys] == [0, 0, 0]
    partition = TrainPartition(20.0, routes=mode == "direct")
    rows = await asyncio.to_thread(partition.fetch, group.train_keys)
    if mode == "deferred":
        assert all(row.routes is None for row in rows)
        rows = fetch_routes(tmp_path, rows)
    for row, own in zip(rows, fragments[:2], strict=False):
        assert row.routes.dtype == dtype and np.array_equal(row.routes, np.concatenate(own))
    assert rows[2].routes.dtype == dtype and (rows[2].routes == -1).all() and not rows[2].sample_mask


async def test_a_group_that_leaves_by_its_exit_is_cleared_and_the_next_one_tells_the_shape(plane, tmp_path):  # noqa: F811
    finalizer = Finalizer(str(tmp_path), bos_token_id=1, routes={"mode": "direct"})
    fragments = [[edges(np.int16, 0)], [edges(np.int16, 1)]]
    gone = await finalize(finalizer, await staged("run.g0", fragments, capture_poisoned=True))
    assert (gone.train_keys, gone.rows, gone.exit_cause) == ([], [], Cause.ROUTE_DIMS_UNKNOWN)
    assert not list(tmp_path.glob("rows/*"))
    for partition in (dataplane.STAGING, dataplane.TRAIN):
        assert await dataplane.tags(partition, deadline_s=10) == {}
    known = await finalize(finalizer, await staged("run.g1", fragments))
    assert [row.sample_mask for row in known.rows] == [1, 1]
    await dataplane.clear(dataplane.TRAIN, known.train_keys, deadline_s=10)
    # From now on a group of poisoned rollouts is one of placeholders like any other.
    masked = await finalize(finalizer, await staged("run.g2", fragments, capture_poisoned=True))
    assert [row.sample_mask for row in masked.rows] == [0, 0] and masked.exit_cause is None
    rows = await asyncio.to_thread(TrainPartition(20.0, routes=True).fetch, masked.train_keys)
    assert all(row.routes.shape[1:] == (2, 7) and (row.routes == -1).all() for row in rows)


async def test_rows_that_were_published_without_routes_are_not_taken_for_rows_with(plane, tmp_path):  # noqa: F811
    request = await staged("run.g0", [[edges(np.int8, 0)]])
    group = await finalize(Finalizer(str(tmp_path), bos_token_id=1), request)
    rows = await asyncio.to_thread(TrainPartition(20.0, routes=True).fetch, group.train_keys)
    assert rows[0].routes is None
    with pytest.raises(TrainerError, match=r"has no plan of its routes, although router replay is on"):
        fetch_routes(tmp_path, rows)
