"""The bench of router replay: its arms differ in their routes alone, and its run is an ordinary one."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.demo.moe_bench import LAYERS, MoeBench, delta_by_agreement
from workbench.inspect import TokenStrip


@pytest.fixture(scope="module")
def bench():
    return MoeBench()


@pytest.fixture(scope="module")
def arms(bench):
    return {"own": bench.step(replay=False), "replay": bench.step(replay=True)}


def test_arms_train_the_same_tokens_and_only_one_replays(arms):
    own, replay = (arms[name].steps.row(0, named=True) for name in ("own", "replay"))
    assert (own["replay_coverage"], replay["replay_coverage"]) == (None, 1.0)
    # About as often as between real engines and trainers.
    assert 0.8 < replay["router_agreement"] < 0.95
    assert replay["mean_abs_logprob_delta"] < 0.5 * own["mean_abs_logprob_delta"]
    for rollout_id in arms["own"].rollouts["rollout_id"]:
        tokens = [run.tokens(rollout_id).select("token_id", "sampled", "logprob") for run in arms.values()]
        assert tokens[0].equals(tokens[1])
    assert arms["replay"].groups["route_coverage"].to_list() == [1.0]
    assert set(arms["replay"].calls["mode"]) == {"text", "token_in"}


def test_routes_one_token_beside_are_told_by_the_agreement(bench, arms):
    beside = bench.step(replay=True, beside=1).steps.row(0, named=True)
    assert beside["replay_coverage"] == 1.0 and beside["router_agreement"] < 0.2
    assert beside["mean_abs_logprob_delta"] > arms["own"].steps["mean_abs_logprob_delta"][0]


def test_tokens_that_went_elsewhere_are_those_that_differ(arms):
    frame = delta_by_agreement(arms["own"], arms["replay"])
    assert frame["layers that agree"][0] == LAYERS and frame["tokens"].sum() == 4 * 2 * 20
    assert frame["own"][-1] > 1.5 * frame["own"][0]


def test_the_ribbon_shows_where_routers_agree(arms):
    """One panel more where routes were replayed; no bar where there is no route."""
    with_routes, without = (TokenStrip(arms[name], "moe.0.0.0").draw().axes for name in ("replay", "own"))
    assert len(with_routes) == len(without) + 1
    heights = [bar.get_height() for bar in with_routes[-1].patches]
    tokens = arms["replay"].tokens("moe.0.0.0")
    np.testing.assert_allclose(heights, tokens["route_agreement"].fill_null(0).to_list())
    ends = np.flatnonzero(tokens["model_call_id"].to_numpy()[1:] != tokens["model_call_id"].to_numpy()[:-1])
    assert [heights[at] for at in (*ends, len(heights) - 1)] == [0, 0]


def test_routers_that_are_not_off_leave_nothing_to_replay():
    same = MoeBench(noise=0.0)
    for replay in (False, True):
        assert same.step(replay=replay).steps["mean_abs_logprob_delta"][0] < 1e-5
