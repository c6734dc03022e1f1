"""Gradient: what is said of steps that taught nothing holds, and nothing is said where it is not known."""

from __future__ import annotations

import polars as pl

from workbench.runs.gradient import learned_nothing, nothing_learned, unchanged

VOTES = {"group_id": ["a", "a", "b", "b"], "reward": [0.5, 0.5, 1.0, 0.0], "trained_step": [1, 1, 2, None]}


def steps(**columns) -> pl.DataFrame:
    base = {"step": [1, 2], "grad_norm": [0.0, 0.0], "advantage_abs_mean": [0.0, 0.0], "loss_tokens": [9, 9]}
    return pl.DataFrame(base | columns)


def test_steps_that_may_have_taught_something_are_not_called_nothing_learned():
    def learned(**columns) -> bool:
        return not learned_nothing(steps(**columns), pl.DataFrame(VOTES))

    assert not learned() and not learned_nothing(steps().clear(), pl.DataFrame(VOTES).clear())
    assert learned(grad_norm=[0.0, 1e-9], advantage_abs_mean=[0.0, 1e-9])
    assert learned(grad_norm=[None, None], advantage_abs_mean=[None, None]), "not known"
    assert not learned(grad_norm=[None, None]), "a run from before the norm was stored"
    assert not learned(grad_norm=[0.1, 0.1]), "the KL penalty's gradient is no reward's"
    assert learned(loss_tokens=[0, 0]), "that nothing was trained is said elsewhere"
    assert learned(step=[1, 3]), "step 2 was taken, and its line is missing"


def test_why_nothing_was_learned_is_what_the_votes_say():
    rollouts = pl.DataFrame(VOTES)
    said = nothing_learned(steps(), rollouts, {"weight_decay": 0.5})
    assert said is not None
    assert "in 1 of 2 groups only one rollout had a vote, in 1 all rewards were equal" in said
    assert "; only weight decay (train.weight_decay = 0.5) moved the weights. Next, if not meant: " in said
    clipped = nothing_learned(steps(advantage_abs_mean=[0.3, 0.3]), rollouts, {})
    assert clipped is not None and "advantages there were" in clipped and "moved the weights" not in clipped


def test_only_steps_that_nothing_can_have_moved_left_the_weights_as_they_were():
    assert unchanged(steps(), {"weight_decay": 0.0}) == {1, 2}
    assert unchanged(steps(), {"weight_decay": 0.1}) == unchanged(steps(), {}) == set()
    assert unchanged(steps(grad_norm=[0.0, 0.3]), {"weight_decay": 0.0}) == {1}
    assert unchanged(steps(grad_norm=[0.3, 0.0]), {"weight_decay": 0.0}) == set(), "AdamW remembers"
    assert unchanged(steps(grad_norm=[None, 0.0]), {"weight_decay": 0.0}) == set()
    assert unchanged(steps(grad_norm=[0.3, 0.0], optimizer_stepped=[1, 0]), {}) == {2}
