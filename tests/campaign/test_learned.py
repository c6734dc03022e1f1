"""Learned: the interval finds a rise, finds none in noise, and says so of its own error rate."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.campaign.report.learned import reward_rise, rise_over_seeds, t_quantile_95
from workbench.config import load_recipe


@pytest.mark.parametrize(("freedom", "expected"), [(1, 6.314), (2, 2.920), (3, 2.353), (6, 1.943), (22, 1.717)])
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile_95(freedom) == pytest.approx(expected, abs=0.01)


def test_a_rise_is_found_and_a_flat_run_is_not():
    rise = reward_rise([0.1, 0.12, *[0.3] * 4, 0.5, 0.52])
    assert rise is not None and rise.learned
    assert (rise.quarter_steps, rise.difference) == (2, pytest.approx(0.4))
    flat = reward_rise([0.3, 0.35, *[0.3] * 4, 0.36, 0.31])
    assert flat is not None and not flat.learned and flat.lower < 0 < flat.upper
    assert reward_rise([0.1, None, *[0.2] * 6]) is None


def test_noise_alone_learns_in_one_run_of_twenty():
    runs = np.random.default_rng(0).normal(0.3, 0.1, (2000, 48))
    share = np.mean([reward_rise(rewards).learned for rewards in runs])
    assert 0.035 < share < 0.065


def test_over_seeds_the_spread_between_runs_is_the_noise():
    # Differences 0.4, 0.5 and 0.6: t with two degrees of freedom is 2.92, and 2.92 · 0.1 / √3 = 0.1686.
    rise = rise_over_seeds([[0.1] * 4 + [0.1 + d] * 4 for d in (0.4, 0.5, 0.6)])
    assert rise is not None and rise.learned
    assert rise.differences == pytest.approx((0.4, 0.5, 0.6))
    assert (rise.mean, rise.lower, rise.upper) == pytest.approx((0.5, 0.3314, 0.6686), abs=1e-3)
    # Seeds that do not agree have not shown anything, however sure each of them is of itself.
    torn = rise_over_seeds([[0.1] * 4 + [0.1 + d] * 4 for d in (0.6, 0.0, 0.1)])
    assert torn is not None and not torn.learned
    assert rise_over_seeds([[0.1] * 8]) is None and rise_over_seeds([[0.1] * 8, [0.1] * 3]) is None


def test_over_seeds_noise_alone_learns_in_one_recipe_of_twenty():
    recipes = np.random.default_rng(1).normal(0.3, 0.1, (2000, 3, 40))
    share = np.mean([rise_over_seeds(runs).learned for runs in recipes])
    assert 0.035 < share < 0.065


def test_the_control_differs_from_its_campaign_in_the_shuffle_alone():
    learns, control = load_recipe("cpu_learns"), load_recipe("cpu_learns_control")
    assert control.train.advantage.shuffle and not learns.train.advantage.shuffle
    changed = {"name": learns.name, "train": control.train.model_copy(update={"advantage": learns.train.advantage})}
    assert control.model_copy(update=changed) == learns
    assert learns.train.steps >= 40 and learns.environment.options["turns"] >= 2
