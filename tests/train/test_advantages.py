"""Advantages: known values, and the rules that every registered estimator obeys."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import TrainerError
from workbench.train import advantages
from workbench.train.estimators import ESTIMATORS, estimator

CHOICES = [(name, {}) for name in ESTIMATORS] + [
    *(
        ("grpo", {"baseline": baseline, "normalize_std": normalize})
        for baseline in ("leave_one_out", "mean")
        for normalize in (False, True)
    ),
    ("gdpo", {"weights": [2.0], "normalize_batch": False}),
]
every_estimator = pytest.mark.parametrize(("name", "options"), CHOICES, ids=str)
group_centred = pytest.mark.parametrize(
    ("name", "options"), [choice for choice in CHOICES if ESTIMATORS[choice[0]].group_centred], ids=str
)


@st.composite
def batches(draw):
    """rewards_N, group_ids_N, valid_N with at least one row; groups interleaved, some without a valid row."""
    n = draw(st.integers(1, 24))
    reward = st.sampled_from([0.0, 1.0, 0.5, -1.0]) | st.floats(-100, 100, width=32)
    rewards = draw(st.lists(reward, min_size=n, max_size=n))
    groups = draw(st.lists(st.sampled_from("abcde"), min_size=n, max_size=n))
    valid = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return np.array(rewards), groups, np.array(valid)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "mean"}, [2 / 3, 0, -1 / 3, -1 / 3]),
        ({"baseline": "mean", "normalize_std": True}, [2 / 3**0.5, 0, -1 / 3**0.5, -1 / 3**0.5]),
        ({"baseline": "leave_one_out"}, [1, 0, -1 / 2, -1 / 2]),
        ({"baseline": "leave_one_out", "normalize_std": True}, [3**0.5, 0, -(3**0.5) / 2, -(3**0.5) / 2]),
    ],
)
def test_grpo_on_a_group_with_a_placeholder(options, expected):
    got = advantages("grpo", [1, 1, 0, 0], ["g"] * 4, [1, 0, 1, 1], **options)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert got[1] == 0.0


def test_rloo_and_dr_grpo_values():
    rewards, groups, valid = [1.0, 0.0, 0.5, 9.0], ["g"] * 4, [1, 1, 1, 0]
    np.testing.assert_allclose(advantages("rloo", rewards, groups, valid), [0.75, -0.75, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(advantages("dr_grpo", rewards, groups, valid), [0.5, -0.5, 0.0, 0.0], atol=1e-12)


def test_reinforce_plus_plus_values():
    rewards, groups, valid = [1.0, 0.0, 3.0, 2.0, 99.0], ["a", "a", "b", "b", "b"], [1, 1, 1, 1, 0]
    plain = advantages("reinforce_plus_plus", rewards, groups, valid)
    np.testing.assert_allclose(plain, np.array([-0.5, -1.5, 1.5, 0.5, 0.0]) / np.std([0, 1, 2, 3]), rtol=1e-12)
    baseline = advantages("reinforce_plus_plus-baseline", rewards, groups, valid)
    np.testing.assert_allclose(baseline, [1, -1, 1, -1, 0], rtol=1e-12)


def test_gdpo_keeps_apart_what_a_sum_would_merge():
    # The sums are 1, 1, 10, 0, so grpo sees the first two as equal; the second reward spreads ten times as far.
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 10.0], [0.0, 0.0], [np.nan, np.inf]])
    groups, valid = ["g"] * 5, [1, 1, 1, 1, 0]
    got = advantages("gdpo", rewards, groups, valid, normalize_batch=False)
    scaled = [(column - column.mean()) / column.std(ddof=1) for column in rewards[:4].T]
    np.testing.assert_allclose(got, [*(scaled[0] + scaled[1]), 0.0], rtol=1e-12)
    assert got[0] > got[1]
    normalised = advantages("gdpo", rewards, groups, valid)
    np.testing.assert_allclose(normalised, got / got[:4].std(), rtol=1e-12)
    weighted = advantages("gdpo", rewards, groups, valid, weights={"form": 1.0, "near": 0.0}, normalize_batch=False)
    np.testing.assert_allclose(weighted[:4], scaled[0], rtol=1e-12)


def test_rewards_of_gdpo_that_cancel_leave_nothing():
    rewards = [[1.0, 0.1], [0.0, 0.9], [0.3, 0.66]]
    np.testing.assert_array_equal(advantages("gdpo", rewards, ["g"] * 3, [1, 1, 1]), np.zeros(3))


def test_a_reward_of_gdpo_that_is_equal_in_a_group_contributes_nothing():
    rewards = np.array([[1.0, 0.95], [0.0, 0.95 + 1e-8]])
    both = advantages("gdpo", rewards, ["g", "g"], [1, 1], normalize_batch=False)
    np.testing.assert_array_equal(both, advantages("gdpo", rewards[:, 0], ["g", "g"], [1, 1], normalize_batch=False))


@every_estimator
@settings(deadline=None, max_examples=40)
@given(batch=batches(), other=st.sampled_from([0.0, 1000.0, -1e30, float("nan"), float("inf")]))
def test_a_placeholders_reward_changes_nothing(name, options, batch, other):
    rewards, groups, valid = batch
    plain = advantages(name, rewards, groups, valid, **options)
    changed = advantages(name, np.where(valid, rewards, other), groups, valid, **options)
    np.testing.assert_array_equal(changed, plain)
    assert (plain[~valid] == 0.0).all() and np.isfinite(plain).all()


@every_estimator
@pytest.mark.parametrize("level", [0.95, 0.0, 1.0, -3.0, 1e6])
def test_equal_rewards_give_exactly_zero(name, options, level):
    noise = np.array([0, 1e-8, -1e-8, 3e-8, 500.0]) * max(1.0, abs(level))
    got = advantages(name, level + noise, ["g"] * 5, [1, 1, 1, 1, 0], **options)
    np.testing.assert_array_equal(got, np.zeros(5))


@every_estimator
def test_rewards_that_differ_by_more_than_noise_count(name, options):
    assert advantages(name, [1.0, 1.0 + 1e-4], ["g", "g"], [1, 1], **options)[1] > 0


@group_centred
def test_groups_are_told_apart_by_id_not_by_prompt(name, options):
    got = advantages(name, [0.0, 0.0, 1.0, 1.0], ["g0", "g0", "g1", "g1"], [1, 1, 1, 1], **options)
    np.testing.assert_array_equal(got, np.zeros(4))


@every_estimator
def test_a_group_of_placeholders_or_a_single_row_has_no_advantage(name, options):
    got = advantages(name, [5.0, 7.0, 1.0, 2.0], ["g0", "g0", "g1", "g1"], [0, 0, 1, 0], **options)
    np.testing.assert_array_equal(got, np.zeros(4))


@every_estimator
@settings(deadline=None, max_examples=40)
@given(batch=batches(), seed=st.integers(0, 2**16))
def test_order_of_rows_does_not_matter(name, options, batch, seed):
    rewards, groups, valid = batch
    order = np.random.default_rng(seed).permutation(len(rewards))
    moved = advantages(name, rewards[order], [groups[i] for i in order], valid[order], **options)
    np.testing.assert_allclose(moved, advantages(name, rewards, groups, valid, **options)[order], atol=1e-9)


@every_estimator
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_a_better_rollout_has_no_smaller_advantage_and_what_is_compared_sums_to_zero(name, options, batch):
    rewards, groups, valid = batch
    got = advantages(name, rewards, groups, valid, **options)
    compared = groups if ESTIMATORS[name].group_centred else ["batch"] * len(groups)
    for group in set(compared):
        rows = np.array([g == group for g in compared]) & valid
        assert abs(got[rows].sum()) < 1e-6 * max(1.0, np.abs(got[rows]).sum())
        ranked = got[rows][np.argsort(rewards[rows])]
        assert (np.diff(ranked) >= -1e-9).all()  # ties and rewards closer than rounding may come either way


@pytest.mark.parametrize(
    ("name", "rewards", "valid", "options", "says"),
    [
        ("grpp", [0, 1], [1, 1], {}, "did you mean grpo.*dr_grpo, gdpo, grpo"),
        ("grpo", [0, 1], [1, 1], {"basline": "mean"}, "did you mean baseline.*baseline, normalize_std"),
        ("gdpo", [0, 1], [1, 1], {"weights": [1, 2]}, "2 weights for 1 rewards"),
        ("gdpo", [0, 1], [1, 1], {"weights": {"form": float("nan")}}, "finite numbers"),
        ("grpo", [[0, 1], [1, 0]], [1, 1], {}, "one length"),
        ("grpo", [0, 1], [1, 1], {"baseline": "median"}, "leave_one_out or mean"),
        ("grpo", [0, 1, 2], [1, 1], {}, "one length"),
        ("grpo", [0, float("nan")], [1, 1], {}, "must be a placeholder"),
        ("grpo", [0, 1], [1, 0.5], {}, "other values than 0 and 1"),
    ],
)
def test_mistakes_are_named(name, rewards, valid, options, says):
    with pytest.raises(TrainerError, match=says):
        advantages(name, rewards, ["g", "g"], valid, **options)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("grpo", {"normalize_std": "false"}, "grpo: normalize_std is true or false, got 'false'"),
        ("gdpo", {"normalize_batch": 0}, "gdpo: normalize_batch is true or false, got 0"),
        ("gdpo", {"weights": {}}, "one of them not 0, got {}"),
        ("gdpo", {"weights": {"form": 0.0}}, "one of them not 0, got {'form': 0.0}"),
        ("gdpo", {"weights": {"form": True}}, "weights are finite numbers"),
        ("gdpo", {"weights": 2.0}, "weights are finite numbers"),
    ],
)
def test_an_option_that_would_silently_mean_something_else_is_refused(name, options, says):
    with pytest.raises(TrainerError, match=re.escape(says)):
        estimator(name, **options)
