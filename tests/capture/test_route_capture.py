"""Routes at capture: one row less than tokens, aligned with the delta, and never shifted to fit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from capture.scripted_worker import Agent, serving, write_script

from workbench.capture.routes import RouteCapture, align_routes
from workbench.errors import WireError
from workbench.wire import CaptureAdmission, Cause, chain_hash, decode_routes

IDS = np.array([0, 127, 128, 255], dtype=np.uint8)


def admission(prev_len=0):
    if not prev_len:
        return CaptureAdmission(rollout_id="r", model_call_id="c", mode="text", prev_len=0)
    return CaptureAdmission(
        rollout_id="r", model_call_id="c", parent_call_id="p", mode="token_in", prev_len=prev_len,
        parent_chain_hash=chain_hash(None, [1]), required_prefix_token_ids=list(range(prev_len)),
    )  # fmt: skip


def call(tokens, rows):
    return SimpleNamespace(prompt_ids=np.zeros(tokens - 2), sampled_ids=np.zeros(2), routed_experts=rows)


def test_the_rows_of_a_child_begin_at_its_own_tokens():
    rows = np.arange(6, dtype=np.uint8)[:, None, None] + np.zeros((6, 2, 3), np.uint8)
    aligned = align_routes(rows, 3, 7)
    assert aligned.dtype == np.int16 and aligned.shape == (4, 2, 3)
    assert aligned[:, 0, 0].tolist() == [3, 4, 5, -1]


@pytest.mark.parametrize("count", [5, 7])
def test_rows_that_are_not_one_less_than_tokens_are_not_shifted_to_fit(count):
    with pytest.raises(WireError, match=r"ran 7 tokens gives routes \[6, layers, topk\]"):
        align_routes(np.zeros((count, 2, 3), np.uint8), 3, 7)


async def test_unsigned_ids_keep_their_value_beside_the_sentinel():
    extras = await RouteCapture().extras(admission(), call(5, IDS[:, None, None]))
    routes = decode_routes(extras["routed_experts"])
    assert routes.dtype == "int16" and routes.values.ravel().tolist() == [0, 127, 128, 255, -1]


async def test_what_the_engine_keeps_elsewhere_is_asked_for_by_the_delta():
    asked = []

    async def take(*what):
        asked.append(what)
        return np.full((3, 1, 1), 9, dtype=np.int8)

    extras = await RouteCapture(take).extras(admission(4), call(8, None))
    assert asked == [("c", 4, 7)] and decode_routes(extras["routed_experts"]).values.ravel().tolist() == [9, 9, 9, -1]


async def test_a_call_without_fitting_routes_is_staged_without_and_counted():
    async def none(*what):
        return None

    capture = RouteCapture(none)
    assert await capture.extras(admission(), call(5, None)) == {}
    assert await capture.extras(admission(), call(5, IDS[:3, None, None])) == {}
    assert capture.faults == {Cause.ROUTE_MISSING: 1, Cause.ROUTE_LENGTH_MISMATCH: 1}


async def test_an_engine_that_fails_to_give_routes_costs_the_routes_and_not_the_call(monkeypatch):
    monkeypatch.setattr("workbench.capture.routes.TAKE_TIMEOUT_S", 0.01)

    async def fails(*what):
        raise RuntimeError("the engine is busy")

    async def hangs(*what):
        await asyncio.Event().wait()

    for take in (fails, hangs):
        capture = RouteCapture(take)
        assert await asyncio.wait_for(capture.extras(admission(), call(5, None)), 5.0) == {}
        assert capture.faults == {Cause.ROUTE_MISSING: 1}


USER = {"role": "user", "content": "Hello?"}


async def test_a_worker_without_routes_stages_what_it_always_did(tmp_path, monkeypatch, tiny_model):
    """Recording routes adds one extra and a count; without it, and for a model that has none, nothing changes."""
    script = write_script(tmp_path, {"text": "Fine."})
    staged = {}
    for asked in (False, True):
        async with serving(tiny_model, script, monkeypatch, capture_routes=asked) as (server, sink):
            call_id, _, outcome = await Agent(server, "run.0.0.0").call([USER])
            assert outcome["failure"] is None
            (columns,) = sink.rows.values()
            (call,) = await sink.fetch([f"run.0.0.0/{call_id}"])
            staged[asked] = sorted(columns), call.token_ids_delta.tolist(), call.extras
            faults = server.status().get("route_faults")
            assert faults == ({Cause.ROUTE_MISSING: 1} if asked else None)
    assert staged[True] == staged[False] and "routed_experts" not in staged[False][2]
    assert staged[False][0] == ["logprobs", "meta", "token_ids"]
