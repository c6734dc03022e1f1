"""Votes: who votes, which tokens enter the loss, and with what advantage, decided before any pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from train.samples import row

from workbench.errors import RecipeError, TrainerError
from workbench.train.votes import NO_COMPONENTS, cast_votes

GRPO = {"name": "grpo", "options": {"baseline": "mean"}}


def straddling(**changes):
    """A row of one call whose 128 generated tokens straddle versions 7 [0, 57) and 8 [57, 128), after a carry of 4."""
    made = row(0, 132, sampled=slice(4, 132), reward=1.0)
    spans = [["c0", 0, 61, 7], ["c0", 61, 132, 8]]
    return replace(made, meta={"weight_version_spans": spans, "link_spans": [["c0", 4, 128]], **changes})


def fresh(place, reward=0.0):
    meta = {"weight_version_spans": [["c", 0, 10, 8]], "link_spans": [["c", 4, 6]]}
    return replace(row(place, 10, sampled=slice(4, 10), reward=reward), meta=meta)


@pytest.mark.parametrize(
    ("policy", "max_lag", "trained", "votes", "why"),
    [
        ("allow", 0, 128, True, None),
        ("mask_old", 0, 71, True, "off_policy"),
        ("mask_old", 1, 128, True, None),
        ("reject", 0, 0, False, "off_policy"),
        ("reject", 1, 128, True, None),
    ],
)
def test_a_call_that_straddles_a_weight_update(policy, max_lag, trained, votes, why):
    rows = [straddling(), fresh(1), fresh(2)]
    ballot = cast_votes(rows, version=8, advantage=GRPO, off_policy=policy, max_lag=max_lag)
    assert int(ballot.masks[0].sum()) == trained and ballot.left_out[0] == why
    assert (bool(ballot.valid[0]), ballot.left_out[1:]) == (votes, [None, None])
    if policy == "mask_old" and not max_lag:
        assert not ballot.masks[0][:61].any() and ballot.masks[0][61:].all()
    # What a row's reward does to its siblings: nothing once its vote is taken, all of it while only tokens are masked.
    expected = [2 / 3, -1 / 3, -1 / 3] if votes else [0, 0, 0]
    np.testing.assert_allclose(ballot.advantages, expected, atol=1e-12)
    metrics = ballot.metrics(rows)
    assert metrics["off_policy_rows"] == int(why is not None)
    assert metrics["token_lag_max"] == 1 and metrics["token_lag_mean"] == pytest.approx(57 / 140)
    assert metrics["valid_row_rate"] == (1.0 if votes else 2 / 3)


def test_a_token_of_unknown_version_is_never_old():
    rows = [row(0, 10, sampled=slice(4, 10), reward=1.0), row(1, 10, sampled=slice(4, 10))]
    ballot = cast_votes(rows, version=9, advantage=GRPO, off_policy="reject")
    assert ballot.valid.all() and ballot.left_out == [None, None]


def test_shuffled_advantages_stay_in_their_group_and_are_the_same_for_one_seed():
    rewards = [0.0, 1.0, 2.0, 3.0, 0.5, 0.5, 0.0, 1.0]
    rows = [row(i, 10, sampled=slice(4, 10), reward=reward, valid=i != 5) for i, reward in enumerate(rewards)]
    plain = cast_votes(rows, version=0, advantage=GRPO).advantages
    shuffled = [
        cast_votes(rows, version=version, advantage=GRPO | {"shuffle": True}, shuffle_seed=3).advantages
        for version in range(20)
    ]
    for got in shuffled:
        np.testing.assert_allclose(np.sort(got[:4]), np.sort(plain[:4]))
        np.testing.assert_allclose(np.sort(got[4:]), np.sort(plain[4:]))
        assert got[5] == 0.0
    assert len({tuple(got) for got in shuffled}) > 5
    # No row is favoured: over many steps what a row gets averages to nothing.
    assert np.abs(np.mean(shuffled, axis=0)).max() < 0.8
    again = cast_votes(rows, version=3, advantage=GRPO | {"shuffle": True}, shuffle_seed=3).advantages
    np.testing.assert_array_equal(again, shuffled[3])


def parts(place, reward=0.0, valid=True, **components):
    made = row(place, 10, sampled=slice(4, 10), reward=reward, valid=valid)
    return replace(made, meta={"reward_components": components})


def test_gdpo_takes_the_components_that_the_recipe_names():
    rows = [parts(0, form=1.0, near=0.0), parts(1, form=0.0, near=9.0), parts(2, valid=False)]
    by_form = cast_votes(rows, version=0, advantage={"name": "gdpo", "options": {"weights": {"form": 1.0}}})
    np.testing.assert_allclose(by_form.advantages, [1, -1, 0])
    both = cast_votes(rows, version=0, advantage={"name": "gdpo"})
    np.testing.assert_allclose(both.advantages, [0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], {"form": 1.0, "near": 2.0}])
def test_gdpo_has_nothing_to_say_of_placeholders_alone(weights):
    rows = [parts(0, valid=False), parts(1, form=1.0, valid=False)]
    ballot = cast_votes(rows, version=0, advantage={"name": "gdpo", "options": {"weights": weights}})
    assert ballot.advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([parts(0), parts(1)], {}, "needs the parts of each reward"),
        ([parts(0, form=1.0), parts(1, form=0.0)], {"weights": {"from": 1.0}}, "no reward component from"),
    ],
)
def test_components_that_no_row_of_the_first_step_has_are_the_recipes_fault(rows, options, says):
    # Of the recipe, not of the trainer: going on with the run would end alike.
    with pytest.raises(RecipeError, match=f"^train.advantage.*{says}"):
        cast_votes(rows, version=0, advantage={"name": "gdpo", "options": options})


LIKE = [parts(0, form=1.0, near=1.0), parts(1, form=0.0, near=0.0), parts(2, form=0.0, near=1.0)]


@pytest.mark.parametrize("odd", [parts(3, form=9.0), parts(3, form=9.0, near=9.0, far=9.0), parts(3, reward=9.0)])
@pytest.mark.parametrize("place", [0, 3])
def test_a_row_with_other_components_has_no_vote_wherever_it_stands_and_the_others_learn_without_it(odd, place):
    gdpo = {"name": "gdpo"}
    rows = [*LIKE[:place], odd, *LIKE[place:]]
    ballot = cast_votes(rows, version=0, advantage=gdpo)
    assert ballot.left_out == [NO_COMPONENTS if row is odd else None for row in rows]
    assert ballot.advantages[place] == 0.0 and not ballot.masks[place].any() and not ballot.valid[place]
    alone = cast_votes(LIKE, version=0, advantage=gdpo)
    np.testing.assert_array_equal(np.delete(ballot.advantages, place), alone.advantages)
    had = ", ".join(sorted(odd.reward_components)) or "none"
    assert ballot.metrics(rows)["other_components"] == {odd.rollout_id: had}
    assert ballot.metrics(rows)["other_component_rows"] == 1 and alone.metrics(LIKE)["other_component_rows"] == 0
    assert "other_components" not in alone.metrics(LIKE)


def test_named_weights_ask_for_their_components_alone():
    rows = [parts(0, form=1.0), parts(1, form=0.0, near=1.0), parts(2, near=1.0)]
    ballot = cast_votes(rows, version=0, advantage={"name": "gdpo", "options": {"weights": {"form": 1.0}}})
    assert ballot.left_out == [None, None, NO_COMPONENTS]


def test_a_later_step_without_any_components_is_a_step_without_votes_and_not_the_end():
    ballot = cast_votes([parts(0), parts(1)], version=3, advantage={"name": "gdpo"})
    assert ballot.left_out == [NO_COMPONENTS] * 2 and not ballot.valid.any()


def test_logits_are_divided_as_each_call_was_sampled():
    made = row(0, 20, sampled=slice(4, 20))
    spans = [["a", 4, 6], ["b", 2, 4], ["c", 1, 3]]
    sampling = [
        {"temperature": 0.6, "logprobs_mode": "processed_logprobs"},
        {"temperature": 0.6, "logprobs_mode": "raw_logprobs"},
        {},
    ]
    said = replace(made, meta={"link_spans": spans, "sampling": sampling})
    assert said.temperatures(0.9).tolist() == pytest.approx([0.6] * 10 + [1.0] * 6 + [0.9] * 4)
    assert made.temperatures(0.9).tolist() == pytest.approx([0.9] * 20)
    with pytest.raises(TrainerError, match="temperature 0"):
        replace(made, meta={"link_spans": spans[:1], "sampling": [{"temperature": 0.0}]}).temperatures(1.0)
