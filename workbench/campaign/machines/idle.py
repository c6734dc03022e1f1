"""Idle: settings of a recipe that change nothing, because another setting leaves them nothing to do.

In: a recipe. Out: each such key with the reason, for `recipe show`, `recipe check` and the start of a run. They are
said, not refused: a sweep over `train.loss.reduction` may well give `constant_tokens` to all of its runs.
Invariant: a key that has its default is never among them, so that a recipe that asks for nothing hears nothing.
Not here: what can never work (recipe_schema, doctor), what the environment makes of its own options.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from pydantic import BaseModel

from workbench.campaign.machines.derived import inflight_rollouts, max_lag
from workbench.recipe_schema import Recipe


def idle(recipe: Recipe) -> dict[str, str]:
    """Key -> why it has no effect, of what the recipe sets to something else than its default."""
    rules = (*_of_training(recipe), *_of_parts(recipe))
    return {key: f"no effect: {why}" for key, why in rules if _is_set(recipe, key)}


def _of_training(recipe: Recipe) -> Iterator[tuple[str, str]]:
    train = recipe.train
    if train.loss.reduction != "constant":
        yield "train.loss.constant_tokens", f"train.loss.reduction is {train.loss.reduction}"
    if train.loss.tis_cap is not None:
        for key in ("train.clip_low", "train.clip_high"):
            yield key, "under train.loss.tis_cap the ratio is against the trainer's own pass, 1 throughout"
    if train.kl.coefficient == 0.0:
        yield "train.kl.estimator", "train.kl.coefficient is 0"
    elif train.kl.estimator == "k1":
        yield "train.kl.coefficient", "as a penalty k1 averages to nothing; it measures (train.kl.estimator)"
    if train.off_policy.policy == "allow":
        yield "train.off_policy.max_lag", "train.off_policy.policy is allow"
    elif (most := _most_lag(recipe)) is not None and most <= max_lag(recipe):
        yield (
            "train.off_policy.policy",
            f"with sampler {train.sampler.name} no token lags more than {most} versions, and only what lags more than "
            f"{max_lag(recipe)} counts as old (train.off_policy.max_lag)",
        )
    if train.router_replay.mode == "none":
        yield "train.router_replay.missing", "train.router_replay.mode is none"
    if train.max_staleness == 0:
        yield "train.live_calls", "train.max_staleness is 0, so no call runs during a weight sync"


def _of_parts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.token_capture.enabled:
        for key in ("token_capture.cache_bytes", "rollouts.require_terminal_witness", "finalizer.actors"):
            yield key, "token_capture.enabled is false"
    if recipe.engine.kind != "scripted":
        yield "engine.script_path", f"engine.kind is {recipe.engine.kind}"
    if recipe.data_plane.storage_units_per_node is not None:
        yield "data_plane.storage_units", "data_plane.storage_units_per_node says how many"
    if _loopback(recipe.gateway.host):
        yield "gateway.control_open", f"no other machine reaches gateway.host {recipe.gateway.host}"
    if recipe.checkpoint.every == 0:
        yield "checkpoint.keep", "checkpoint.every is 0"
    everyone = recipe.rollouts.max_inflight_groups * recipe.train.rollouts_per_group
    if inflight_rollouts(recipe) > everyone:
        yield "rollouts.max_inflight_rollouts", f"the groups that run at once have {everyone} rollouts"


def _most_lag(recipe: Recipe) -> int | None:
    """Versions that a token may lag when it is trained; None where nothing bounds it.

    No group is begun before the weights `max_staleness` versions behind its step's, and `in_order` trains it in that
    step; `weight_fifo` may leave it lying about, which `windowed` bounds.
    """
    train = recipe.train
    if train.sampler.name == "in_order":
        return train.max_staleness
    window = train.sampler.options.get("max_staleness")
    return (train.max_staleness if window is None else window) if train.sampler.name == "windowed" else None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_set(recipe: Recipe, key: str) -> bool:
    section, *path = recipe, *key.split(".")
    for name in path[:-1]:
        section = getattr(section, name)
    assert isinstance(section, BaseModel)
    return bool(
        getattr(section, path[-1]) != type(section).model_fields[path[-1]].get_default(call_default_factory=True)
    )
