"""Routes of a row: put together from the verified chain, span by span, and counted where the loss looks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chains import Chain
from test_group import staged_of

from workbench.errors import FinalizerError, RunStoreError, TrainerError
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.metrics import GroupMetrics
from workbench.finalizer.parts import write_group
from workbench.finalizer.routes import (
    RouteDims,
    RouteSettings,
    dims_of,
    fragment_of,
    known_positions,
    loss_positions,
)
from workbench.finalizer.rows import pack_row
from workbench.finalizer.stored import read_group
from workbench.runs.frames import read_parts
from workbench.train.route_rows import fetch_routes
from workbench.train.rows import unpack_row
from workbench.wire import Cause, encode_routes
from workbench.wire.extras import FINISH_REASON, ROUTED_EXPERTS

DIRECT, DEFERRED = RouteSettings("direct"), RouteSettings("deferred")
CARRY, GENERATED, LAYERS, TOPK = 5, 7, 3, 2


def routes(seed, tokens=CARRY + GENERATED, dtype=np.int16, experts=512, shape=(LAYERS, TOPK)):
    """What a call stages: a row a token, the last one -1."""
    values = np.random.default_rng(seed).integers(0, experts, (tokens, *shape)).astype(dtype)
    values[-1] = -1
    return values


def chain(i, fragments):
    """A rollout whose calls staged these fragments; None: none."""
    grown = Chain(f"run.0.{i}.0", seed=i)
    for turn, values in enumerate(fragments):
        extras = {FINISH_REASON: "stop"}
        if values is not None:
            extras[ROUTED_EXPERTS] = values if isinstance(values, str) else encode_routes(values)
        grown.call(f"c{turn - 1}" if turn else None, extras=extras)
    return grown


async def finalized(chains, settings=DIRECT, dims=None, spoil=None, run_dir=None, **fields):
    outcomes = [
        RolloutOutcome(
            rollout_id=grown.rollout_id, index=i, receipt=grown.receipt(f"c{len(grown.staged) - 1}", **fields)
        )
        for i, grown in enumerate(chains)
    ]
    request = FinalizationRequest(group_id="g0", weight_version=0, rollouts=outcomes)
    staged, _ = await staged_of(request, chains, spoil)
    made = assemble(request, staged, 1, settings, dims)
    if run_dir is not None:
        write_group(run_dir, request, staged, made)
    return made


async def test_row_i_is_the_route_of_token_i_as_input():
    first, second = routes(1), routes(2)
    made = await finalized([chain(0, [first, second])])
    row = made.rows[0]
    assert row.routes.dtype == np.int16 and np.array_equal(row.routes, np.concatenate([first, second]))
    assert row.tags(0)["n_routes_backfilled"] == 0
    # Every position before a sampled token is covered; only the two that were sampled last have no route.
    counts = made.metrics.route_counts
    assert counts["positions"] == counts["covered"] == 2 * GENERATED
    assert (counts["tokens"], counts["sentinels"], counts["spans_full"]) == (24, 2, 2)
    assert made.metrics.rates()["route_coverage"] == 1.0
    assert made.metrics.rates()["route_sentinel_fraction"] == pytest.approx(2 / 24)


async def test_a_tail_covers_the_end_and_what_does_not_fit_is_sentinel():
    tail, short = routes(3, GENERATED + 2), routes(4, GENERATED - 1)
    made = await finalized([chain(0, [tail, short, None, routes(5)])])
    row = made.rows[0]
    assert [span[5] for span in row.route_plan["spans"]] == ["tail", "sentinel", "sentinel", "full"]
    assert (row.routes[:3] == -1).all() and np.array_equal(row.routes[3:12], tail)
    assert (row.routes[12:36] == -1).all() and np.array_equal(row.routes[36:], routes(5))
    assert made.metrics.route_faults == {Cause.ROUTE_LENGTH_MISMATCH: 1, Cause.ROUTE_MISSING: 1}
    assert row.tags(0)["n_routes_backfilled"] == 2
    assert made.metrics.rates()["route_coverage"] == 0.5


async def test_a_fragment_longer_than_its_delta_leaves_the_call_before_alone():
    first, long = routes(1), routes(2, CARRY + GENERATED + 3)
    made = await finalized([chain(0, [first, long])])
    row = made.rows[0]
    assert [span[5] for span in row.route_plan["spans"]] == ["full", "tail"]
    assert np.array_equal(row.routes, np.concatenate([first, long[3:]]))


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (None, Cause.ROUTE_MISSING),
        (routes(1, GENERATED - 1), Cause.ROUTE_LENGTH_MISMATCH),
        (routes(1, shape=(LAYERS + 1, TOPK)), Cause.ROUTE_LENGTH_MISMATCH),
        ("nrlre1:int8:2x1x1:AA==", Cause.ROUTE_LENGTH_MISMATCH),
    ],
)
async def test_where_routes_must_not_be_missing_the_rollout_loses_its_vote(broken, cause):
    reject = RouteSettings("direct", "reject")
    made = await finalized([chain(0, [routes(1), routes(2)]), chain(1, [routes(3), broken])], reject)
    assert [row.sample_mask for row in made.rows] == [1, 0]
    assert (made.summaries[1].cause, made.summaries[1].call_id) == (cause, "c1")
    # A placeholder has a row of routes as well: a batch in which one lacks the column would lose it for all.
    assert made.rows[1].routes.shape == (CARRY, LAYERS, TOPK) and (made.rows[1].routes == -1).all()
    assert made.metrics.route_faults == {}


async def test_one_changed_route_is_a_digest_mismatch():
    def spoil(rows):
        rows["run.0.0.0/c1"]["routes"][2, 1, 0] ^= 1

    made = await finalized([chain(0, [routes(1), routes(2)]), chain(1, [routes(3)])], spoil=spoil)
    assert [summary.cause for summary in made.summaries] == [Cause.ROUTE_DIGEST_MISMATCH, None]
    assert made.summaries[0].call_id == "c1"


async def test_a_group_that_cannot_tell_the_shape_leaves_by_its_exit():
    poisoned = [chain(i, [routes(i)]) for i in range(2)]
    made = await finalized(poisoned, capture_poisoned=True)
    assert (made.rows, made.summaries, made.exit_cause) == ([], [], Cause.ROUTE_DIMS_UNKNOWN)
    # Once another group has told it, the same rollouts are placeholders like any.
    made = await finalized(poisoned, dims=RouteDims(LAYERS, TOPK, "int16"), capture_poisoned=True)
    assert made.exit_cause is None and [row.sample_mask for row in made.rows] == [0, 0]
    assert made.rows[0].routes.shape[1:] == (LAYERS, TOPK)


async def test_an_engine_that_gives_no_routes_is_an_error_and_not_an_exit():
    with pytest.raises(FinalizerError, match=r"no call of its 2 verified rollouts has routed experts"):
        await finalized([chain(i, [None]) for i in range(2)])


async def test_without_replay_a_row_is_what_it_was(tmp_path):
    with_routes, without = chain(0, [routes(1), routes(2)]), chain(0, [None, None])
    for grown in (with_routes, without):
        made = await finalized([grown], None)
        columns = pack_row(made.rows[0])
        assert sorted(columns) == ["logprobs", "meta", "token_ids", "token_mask"]
        assert b"route" not in columns["meta"].tobytes()
        assert made.metrics.rates()["route_coverage"] is None and made.metrics + GroupMetrics() == made.metrics


async def test_deferred_rows_carry_a_plan_and_get_the_same_routes(tmp_path):
    chains = [
        chain(0, [routes(1), routes(2, GENERATED), None]),
        chain(1, [routes(3)]),
        chain(2, [routes(4, GENERATED - 2)]),
    ]
    direct = await finalized(chains, DIRECT)
    deferred = await finalized(chains, DEFERRED, run_dir=tmp_path)
    assert all("routes" not in pack_row(row) for row in deferred.rows)
    assert direct.metrics == deferred.metrics
    fetched = fetch_routes(tmp_path, [unpack_row(pack_row(row)) for row in deferred.rows])
    for now, then in zip(fetched, direct.rows, strict=True):
        assert now.routes.dtype == then.routes.dtype and np.array_equal(now.routes, then.routes)
    # And what is read back to publish again, or to take a step again.
    stored = read_group(tmp_path, "g0")
    assert [row.route_plan for row in stored.rows] == [row.route_plan for row in direct.rows]
    assert all(np.array_equal(a.routes, b.routes) for a, b in zip(stored.rows, direct.rows, strict=True))
    assert stored.finalized(0, {}).metrics == direct.metrics


async def test_a_fragment_that_changed_on_disk_is_not_replayed(tmp_path):
    made = await finalized([chain(0, [routes(1), routes(2)])], DEFERRED, run_dir=tmp_path)
    path = tmp_path / "calls" / "g0.parquet"
    table = pq.read_table(path)
    held = bytearray(table["routes"][1].as_py())
    held[4] ^= 1
    changed = pa.array([table["routes"][0].as_py(), bytes(held)], pa.binary())
    pq.write_table(table.set_column(table.column_names.index("routes"), "routes", changed), path)
    with pytest.raises(TrainerError, match=f"{Cause.ROUTE_DIGEST_MISMATCH}: the extras of call c1"):
        fetch_routes(tmp_path, [unpack_row(pack_row(row)) for row in made.rows])
    row = unpack_row(pack_row(made.rows[0]))
    for plan in ({"dims": [3, 2, "int16"]}, {"dims": [3, 2, "int64"], "spans": []}, {"dims": 3, "spans": []}):
        with pytest.raises(TrainerError, match="has no readable plan of its routes"):
            fetch_routes(tmp_path, [replace(row, meta=row.meta | {"route_plan": plan})])
    with pytest.raises(RunStoreError, match="c1"):
        read_group(tmp_path, "g0")


async def test_stored_routes_are_plain_bytes_beside_the_extras(tmp_path):
    await finalized([chain(0, [routes(1, dtype=np.int8, experts=16)])], run_dir=tmp_path)
    stored = read_parts("calls", [tmp_path / "calls" / "g0.parquet"], ["extras", "routes"]).row(0)
    assert stored[1] == routes(1, dtype=np.int8, experts=16).tobytes()
    assert f'"nrlre1:int8:{CARRY + GENERATED}x{LAYERS}x{TOPK}:"' in stored[0]


def test_a_position_counts_where_its_logits_enter_the_loss():
    assert loss_positions(np.array([0, 0, 1, 1, 0, 1])).tolist() == [False, True, True, False, True, False]


def test_a_position_is_covered_where_every_layer_with_experts_has_its_whole_route():
    """Replay leaves a layer of a token to its own router where any id of it is unknown; coverage must say so."""
    values = np.ones((5, 3, 2), dtype=np.int16)
    values[:, 1] = -1  # a dense layer
    values[1, 2] = -1
    values[2, 0, 1] = -1
    values[4] = -1
    assert known_positions(values).tolist() == [True, False, False, True, False]
    assert known_positions(values, [0]).tolist() == [True, True, False, True, False]
    assert not known_positions(values, [0, 1, 2]).any()
    assert not known_positions(np.full((3, 2, 2), -1, dtype=np.int8)).any()


def test_routes_of_old_writers_are_read_as_whole_numbers():
    nested = [[[1, 2]] * LAYERS] * 4
    assert fragment_of({ROUTED_EXPERTS: nested}).dtype == np.int32
    assert fragment_of({ROUTED_EXPERTS: nested}).tolist() == nested


def test_the_shape_of_routes_is_that_of_the_first_that_can_be_read():
    calls = chain(0, [None, "no envelope", routes(1)]).staged
    assert dims_of(calls) == RouteDims(LAYERS, TOPK, "int16")
    assert dims_of(calls[:2]) is None


async def test_parts_that_do_not_belong_together_are_not_read_back(tmp_path):
    made = await finalized([chain(0, [routes(1), routes(2)]), chain(1, [routes(3)])], DEFERRED, run_dir=tmp_path)
    calls, receipts = tmp_path / "calls" / "g0.parquet", tmp_path / "receipts" / "g0.jsonl"
    whole, lines = pq.read_table(calls), receipts.read_bytes().splitlines(keepends=True)
    receipts.write_bytes(b"".join(lines[::-1]))
    with pytest.raises(RunStoreError, match="are not about the same rollouts"):
        read_group(tmp_path, "g0")
    receipts.write_bytes(b"".join(lines))
    pq.write_table(whole.slice(1), calls)
    with pytest.raises(RunStoreError, match=f"{Cause.ROUTE_MISSING}: call c0 has no routed experts there"):
        read_group(tmp_path, "g0")
    row = unpack_row(pack_row(made.rows[0]))
    with pytest.raises(TrainerError, match="has no plan of its routes, although router replay is on"):
        fetch_routes(tmp_path, [replace(row, meta=row.meta | {"route_plan": None})])
