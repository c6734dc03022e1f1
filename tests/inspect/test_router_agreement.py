"""RouterAgreement: a layer's numbers are the run's, and a run without replay has none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import polars as pl

from workbench.inspect import RouterAgreement


def run(by_layer, delta):
    steps = pl.DataFrame(
        {
            "step": [1, 2],
            "router_agreement_by_layer": [None if by_layer is None else json.dumps(by_layer)] * 2,
            "replay_coverage": [None if by_layer is None else 1.0] * 2,
            "mean_abs_logprob_delta": [delta] * 2,
        },
        schema_overrides={"router_agreement_by_layer": pl.String, "replay_coverage": pl.Float64},
    )
    return SimpleNamespace(steps=steps)


def test_two_arms_stand_beside_each_other_and_one_without_replay_has_no_agreement():
    view = RouterAgreement(replay=run({"0": 1.0, "2": 0.5}, 0.01), none=run(None, 0.25))
    assert view.frame.select("arm", "step", "layer", "agreement").rows() == [
        ("replay", 1, 0, 1.0), ("replay", 2, 0, 1.0), ("replay", 1, 2, 0.5), ("replay", 2, 2, 0.5),
    ]  # fmt: skip
    assert "75.0% of tokens would go to the same experts · least in layer 2, 50.0%" in view.sentence()
    html = view.html()
    assert "0.0100" in html and "0.2500" in html and "100.0%" in html and ">none<" in html
    assert view.draw() is not None


def test_a_run_that_replayed_nothing_says_so():
    view = RouterAgreement(run(None, 0.1))
    assert view.frame.is_empty() and "no routes were replayed" in view.sentence()
    assert view.draw() is not None


def test_a_run_alone_is_called_by_its_name():
    one = run({"0": 1.0}, 0.1)
    one.name = "moe-third"
    view = RouterAgreement(one)
    assert list(view.runs) == ["moe-third"] and set(view.frame["arm"]) == {"moe-third"}
    assert ">moe-third<" in view.html()


def test_one_step_is_drawn_over_its_layers():
    one = run({"0": 1.0, "2": 0.5}, 0.01)
    one.steps = one.steps.head(1)
    (axes,) = RouterAgreement(one).draw().axes
    assert axes.get_xlabel() == "layer, in optimiser step 1"
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 1.0], [2.0, 0.5]]
    (beside,) = RouterAgreement(replay=one, again=one).draw().axes
    assert len(beside.lines) == 2 and beside.get_legend() is not None
