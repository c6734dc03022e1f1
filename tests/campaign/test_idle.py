"""Idle settings: what a recipe sets to no effect is said, and nothing else is."""

from __future__ import annotations

import pytest

from workbench.campaign.machines.idle import idle
from workbench.config import load_recipe, shipped_recipes


def of(*overrides: str) -> dict[str, str]:
    return idle(load_recipe("cpu_smoke", overrides))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_no_shipped_recipe_sets_anything_to_no_effect(name):
    assert idle(load_recipe(name)) == {}


@pytest.mark.parametrize(
    ("setting", "off", "on"),
    [
        ("train.loss.constant_tokens=256", "train.loss.reduction=token", "train.loss.reduction=constant"),
        ("train.kl.estimator=k2", "train.kl.coefficient=0.0", "train.kl.coefficient=0.1"),
        ("train.off_policy.max_lag=0", "train.off_policy.policy=allow", "train.off_policy.policy=mask_old"),
        ("train.clip_low=0.1", "train.loss.tis_cap=2.0", "train.loss.tis_cap=null"),
        ("train.clip_high=0.4", "train.loss.tis_cap=2.0", "train.loss.tis_cap=null"),
        ("train.live_calls=straddle", "train.max_staleness=0", "train.max_staleness=1"),
        ("train.router_replay.missing=reject", "train.router_replay.mode=none", "train.router_replay.mode=direct"),
        ("token_capture.cache_bytes=0", "token_capture.enabled=false", "token_capture.enabled=true"),
        ("rollouts.require_terminal_witness=true", "token_capture.enabled=false", "token_capture.enabled=true"),
        ("finalizer.actors=2", "token_capture.enabled=false", "token_capture.enabled=true"),
        ("rollouts.max_inflight_rollouts=9", "rollouts.max_inflight_groups=2", "rollouts.max_inflight_groups=3"),
        ("data_plane.storage_units=3", "data_plane.storage_units_per_node=1", "data_plane.storage_units_per_node=null"),
        ("gateway.control_open=true", "gateway.host=localhost", "gateway.host=0.0.0.0"),
        ("checkpoint.keep=4", "checkpoint.every=0", "checkpoint.every=2"),
        ("engine.script_path=answers.jsonl", "engine.kind=vllm", "engine.kind=scripted"),
    ],
)
def test_a_setting_is_idle_only_under_another_and_where_it_is_set(setting, off, on):
    said, key = of(setting, off), setting.partition("=")[0]
    assert list(said) == [key]
    needed = ["token_capture.routes=true"] if "replay" in on else []
    assert of(setting, on, *needed) == {}
    if "script" not in on:  # a scripted engine needs its script
        assert key not in of(off) | of(on, *needed)


@pytest.mark.parametrize(
    ("sampler", "max_lag", "acts"),
    [
        ("in_order", "null", False),
        ("in_order", "2", False),
        ("in_order", "1", True),
        ("weight_fifo", "null", True),
        ("windowed", "null", False),
        ("windowed, options: {max_staleness: 3}", "2", True),
        ("windowed, options: {max_staleness: 1}", "1", False),
    ],
)
def test_old_tokens_are_looked_for_only_where_the_sampler_lets_there_be_any(sampler, max_lag, acts):
    said = of(
        "train.max_staleness=2",
        f"train.sampler={{name: {sampler}}}",
        f"train.off_policy={{policy: mask_old, max_lag: {max_lag}}}",
    )
    assert list(said) == ([] if acts else ["train.off_policy.policy"])


def test_a_penalty_of_k1_is_said_to_pull_nowhere():
    said = of("train.kl={coefficient: 0.1, estimator: k1}")
    assert said == {
        "train.kl.coefficient": "no effect: as a penalty k1 averages to nothing; it measures (train.kl.estimator)"
    }
