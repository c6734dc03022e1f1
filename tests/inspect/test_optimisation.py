"""Optimisation: the training half by step, and nothing called unusual but by the recipe's own bounds."""

from __future__ import annotations

import re
from types import SimpleNamespace

import polars as pl
import pytest
from stored_run import StoredRun, make_run
from test_views import outside, unreadable

from workbench import runs
from workbench.demo import recorded_run
from workbench.errors import RunStoreError
from workbench.inspect import Optimisation
from workbench.inspect.html import number
from workbench.inspect.style import house_style

TRAIN = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "max_grad_norm": 1.0,
    "max_staleness": 1,
    "off_policy": {"policy": "allow"},
}
STEPS = {
    "step": [1, 2, 3],
    "loss": [-0.01, 0.02, 0.0],
    "grad_norm": [0.4, 2.5, 0.0],
    "clip_fraction": [0.0, 0.073, 0.0],
    **{f"probs_ratio_p{q:02d}": [value] * 3 for q, value in ((1, 0.9), (5, 0.95), (50, 1.0), (95, 1.05), (99, 1.1))},
    "approx_entropy": [2.5, 2.0, 1.5],
    "advantage_abs_mean": [0.1, 0.3, 0.0],
    "token_lag_mean": [0.0, 1.0, 1.5],
    "token_lag_max": [0, 1, 2],
    "gen_kl_error": [0.001, 0.01, 0.012],
    "loss_tokens": [500, 480, 510],
    "optimizer_stepped": [1, 1, 1],
    "off_policy_rows": [0, 0, 0],
    "disagreeing_rows": [0, 0, 2],
}


def view(train=TRAIN, **changed) -> Optimisation:
    return Optimisation(SimpleNamespace(steps=pl.DataFrame(STEPS | changed), recipe={"train": train}))


def test_a_reader_of_the_recorded_run_finds_clip_ratio_gradient_and_entropy_of_each_step():
    recorded = runs.open(recorded_run())
    shown = Optimisation(recorded)
    most = recorded.steps["clip_fraction"].max()
    assert f"clipped at most {most:.1%} of tokens" in repr(shown) and repr(shown) == repr(Optimisation(recorded))
    for name, spec in (("grad_norm", ".3f"), ("probs_ratio_p99", ".3f"), ("approx_entropy", ".3f"), ("loss", ".4f")):
        for value in recorded.steps[name]:
            assert f">{value:{spec}}<" in shown.html(), name
    assert shown.snapshot() == Optimisation(runs.open(recorded_run())).snapshot()
    assert not re.search(r"<script|<link|<img|http|class=", shown.html())


def test_each_bound_of_the_recipe_that_a_step_reached_is_said_with_what_it_means():
    clipped, gradient, advantages, lag, rows = view().notes()
    assert clipped.startswith("Clipped: 7.3%") and "step 2" in clipped and "0.8 to 1.28" in clipped
    assert "max_grad_norm = 1 in step 2" in gradient and "2.500" in gradient
    assert "all 0 in step 3" in advantages and "more than 1 version old in step 3" in lag
    assert rows.startswith("2 rows left out") and "step 3" in rows
    (*_, others) = view(other_component_rows=[3, 0, 1]).notes()
    assert others.startswith("4 rows left out: their rewards have other components than most") and "step" in others
    (ratio,) = view(
        clip_fraction=[0.0] * 3, grad_norm=[0.4] * 3, advantage_abs_mean=[0.1] * 3, token_lag_max=[0, 1, 1],
        disagreeing_rows=[0] * 3, probs_ratio_p99=[1.1, 1.2, 1.5],
    ).notes()  # fmt: skip
    assert ratio.startswith("Ratio: at least 1% of the tokens lie outside of the clip range on one side in step 3.")


STILL = {"grad_norm": [0.0] * 3, "advantage_abs_mean": [0.0] * 3, "clip_fraction": [0.0] * 3, "token_lag_max": [0] * 3}


def of_no_advantage(train, **changed) -> str:
    (told,) = (words for words in view(TRAIN | train, **STILL | changed).notes() if words.startswith("Advantages"))
    return told.partition("they gave no gradient.")[2].strip()


def test_what_moves_weights_without_a_gradient_is_said_only_where_it_is_there():
    decay = {"weight_decay": 0.5}
    by_decay = "What moves weights there all the same: weight decay (train.weight_decay = 0.5)."
    assert of_no_advantage(decay) == by_decay
    assert of_no_advantage({"weight_decay": 0.0}) == "Nothing else moves weights, and none was changed."
    assert of_no_advantage({}) == "", "a recipe that says nothing of weight decay"
    later = {"grad_norm": [0.4, 0.0, 0.0], "advantage_abs_mean": [0.1, 0.0, 0.0]}
    memory = "What moves weights there all the same: AdamW's memory of earlier gradients."
    assert of_no_advantage({"weight_decay": 0.0}, **later) == memory
    between = {"grad_norm": [0.0, 0.4, 0.0], "advantage_abs_mean": [0.0, 0.1, 0.0]}
    but = memory.removesuffix(".") + " (in step 1 nothing, and none was changed)."
    assert of_no_advantage({"weight_decay": 0.0}, **between) == but
    first = {"grad_norm": [0.0, 0.0, 0.4], "advantage_abs_mean": [0.0, 0.0, 0.1]}
    assert of_no_advantage(decay, **first) == by_decay, "a gradient that came later is no memory"
    assert "the KL penalty" in of_no_advantage({"kl": {"coefficient": 0.1}}, grad_norm=[0.1] * 3)


def test_what_the_recipe_sets_no_bound_for_is_called_nothing():
    calm = {"grad_norm": [0.4] * 3, "clip_fraction": [0.0] * 3, "advantage_abs_mean": [0.1] * 3}
    calm |= {"token_lag_max": [0, 1, 1], "disagreeing_rows": [0] * 3, "approx_entropy": [90.0, 1e-9, 5.0]}
    assert view(**calm).notes() == [] and "No step reached a bound" in view(**calm).html()
    assert "nothing clipped" in repr(view(**calm))
    without = view({}, **calm | {"grad_norm": [1e9] * 3, "probs_ratio_p99": [99.0] * 3})
    assert without.notes() == [] and "recipe cannot be read" in without.html()


def test_a_signal_that_no_step_has_is_greyed_with_its_reason_and_no_zero():
    shown = view(grad_norm=[None] * 3, approx_entropy=[None, 2.0, None])
    assert (
        "gradient norm: not in the lines of the run&#x27;s steps.jsonl" in shown.html()
        and "gradient norm" not in repr(shown)
    )
    assert "no KL penalty (train.kl.coefficient is 0)" in shown.html()
    with house_style():
        figure = shown.draw()
    words = {text.get_text() for ax in figure.axes for text in ax.texts}
    assert words == {"not in the lines of the\nrun's steps.jsonl"}
    capped = view(TRAIN | {"loss": {"tis_cap": 2.0}})
    assert "ratio p99" not in repr(capped) and any("by definition" in words for words in capped.notes())


def test_a_reason_that_many_signals_share_is_said_once():
    columns = [name for name in view().steps.columns if name not in ("step", "loss", "grad_norm")]
    nothing = {name: [None] * 3 for name in columns} | {"grad_norm": [0.0] * 3, "loss_tokens": [0] * 3}
    html = view(**nothing).html()
    assert html.count("no step had a token in the loss") == 1
    assert "clipped, ratio p01, median, p99, entropy (nat), mean <span" in html
    with house_style():
        (panel,) = view(**nothing).draw().axes
    assert [text.get_text() for text in panel.texts] == ["no step had a token in the loss"]
    assert "no gradient" in repr(view(**nothing)) and "0.000" not in repr(view(**nothing))


def test_where_nothing_is_known_of_the_bounds_none_is_said_to_be_kept():
    assert "No step reached a bound" not in view(**{name: [None] * 3 for name in view().steps.columns[1:]}).html()


def test_one_step_has_no_first_and_no_last_entropy():
    assert repr(view(approx_entropy=[None, 2.0, None])).endswith("entropy 2.00 nat")
    assert repr(view(approx_entropy=[1.5, 2.0, None])).endswith("entropy 1.50 nat (step 1), 2.00 (step 2)")


def test_a_number_that_rounds_to_zero_has_no_sign():
    assert [number(value, ".3f") for value in (-0.0, -0.0004, 0.0004, -0.0006)] == ["0.000", "0.000", "0.000", "-0.001"]
    assert [number(value, spec) for value, spec in ((-1e-9, ".1%"), (-1e-9, ".1e"), (-10, ",d"))] == [
        "0.0%",
        "-1.0e-09",
        "-10",
    ]


def test_a_column_of_divergences_has_one_format_that_shows_every_one_of_them():
    small = view(gen_kl_error=[4e-5, 0.0, 0.012])
    assert ">4.0e-05<" in small.html() and ">1.2e-02<" in small.html() and ">0<" in small.html()
    assert ">0.0010<" in view().html() and ">0.0120<" in view().html()  # where four places show them all
    with house_style():
        figure = view(gen_kl_error=[4e-5, 8e-5, 1.2e-4]).draw()
    figure.canvas.draw()
    marks = {label.get_text() for label in figure.axes[-1].get_yticklabels()}
    assert {"0", "5.0e-05", "1.0e-04"} <= marks


def test_what_needs_a_word_has_one_under_the_table_and_what_is_not_shown_has_none():
    words = view().html()
    for meaning in ("mean of −log-prob over the sampled tokens", "1% above p99", "KL(sampler ‖ trainer)"):
        assert meaning in words
    assert "KL(policy ‖ reference)" not in words and "KL(policy ‖ reference)" in view(kl_penalty=[0.1] * 3).html()


def test_runs_without_steps_say_why(tmp_path):
    stored = StoredRun(tmp_path / "empty")  # whose writer is at work as long as it is held
    ledger = SimpleNamespace(calls=pl.DataFrame(), rollouts=pl.DataFrame())
    rollouts = pl.DataFrame(schema={"trained_step": pl.Int64})
    served = SimpleNamespace(steps=pl.DataFrame(schema={"step": pl.Int64}), rollouts=rollouts, served=True)
    for source, words in (
        (runs.open(stored.run_dir), "no optimiser step yet"),
        (ledger, "a ledger has no optimiser steps"),
        (served, "a served run trains nothing"),
    ):
        assert words in repr(Optimisation(source)) and Optimisation(source).snapshot().png
    with pytest.raises(RunStoreError, match=r"Optimisation expected a run, got str; open a run: .*open_any\('first'\)"):
        Optimisation("first")
    stored.writer.close()


def test_many_steps_are_bounded_and_every_word_can_be_read(tmp_path):
    many = {name: (values * 100 if name != "step" else list(range(1, 301))) for name, values in STEPS.items()}
    shown = Optimisation(SimpleNamespace(steps=pl.DataFrame(many), recipe={"train": TRAIN}))
    assert "The last 40 of 300 steps" in shown.html() and len(shown.html()) < 100_000
    assert "steps 2, 5, 8, 11, 14, 17 and 94 more" in shown.html()
    for each in (
        shown,
        view(),
        view(kl_penalty=[0.1, 0.2, 0.3]),
        view(TRAIN | {"loss": {"tis_cap": 2.0}}),
        Optimisation(runs.open(make_run(tmp_path / "stored"))),
    ):
        assert unreadable(each.figure()) == [] and outside(each.figure()) == []
