"""Derived: what a campaign fills in at its set-up, computed from the recipe and this machine, and said to be derived.

A recipe leaves some values open (null, 0): a capacity, a port, a number of threads. Others are no setting at all:
tokens made for one run, directories below it. `derived(recipe)` lists them all with what decides them, for
`recipe show` and the run's `environment.json`; the parts take the same numbers from the same functions.
Invariant: a secret is named here with the environment variable that holds it, never with its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.campaign.machines import machine
from workbench.campaign.machines.placement import bundles
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN
from workbench.recipe_schema import Recipe
from workbench.train.buffer import ReplayBuffer

SECRET = "made for this run alone, kept in the environment, stored nowhere"


@dataclass(frozen=True)
class Derived:
    """One value. `key` is a recipe key that was left open, or a name of its own; `how` says what decides it."""

    key: str
    value: int | str
    how: str


def derived(recipe: Recipe) -> list[Derived]:
    """Everything that set-up fills in, recipe keys first. Raises RecipeError where a capacity cannot work."""
    open_keys: list[tuple[bool, str, int | str, str]] = [
        (recipe.train.buffer_groups is None, "train.buffer_groups", ReplayBuffer.of(recipe.train).capacity,
         "places the sampler needs for a step, the next one, and each that may run ahead"),
        (recipe.rollouts.max_inflight_rollouts is None, "rollouts.max_inflight_rollouts", inflight_rollouts(recipe),
         "all rollouts of the groups that run"),
        (recipe.train.loss.constant_tokens is None, "train.loss.constant_tokens", constant_tokens(recipe),
         "model.max_model_len; used with reduction: constant"),
        (recipe.train.off_policy.max_lag is None, "train.off_policy.max_lag", max_lag(recipe), "train.max_staleness"),
        (recipe.engine.threads == 0, "engine.threads", machine.processors(), "processors that the engine may use"),
        (recipe.train.threads == 0, "train.threads", machine.processors(), "processors that the trainer may use"),
        (recipe.gateway.port == 0, "gateway.port", "free", "chosen by the system at the start"),
        (recipe.engine.port == 0, "engine.port", "free", "chosen by the system at the start"),
    ]  # fmt: skip
    values = [Derived(key, value, how) for is_open, key, value, how in open_keys if is_open]
    values.append(Derived("logical CPUs", logical_cpus(recipe), "one for each actor; ray.num_cpus must be as many"))
    if recipe.token_capture.enabled:
        values.append(Derived("ledger", "RUN/ledger", "custody records of every call"))
        values.append(Derived("staged calls", "RUN/calls", "every captured delta, written when its group is finalised"))
    return [
        *values,
        Derived("control token", f"${CONTROL_TOKEN}", SECRET),
        Derived("worker token", f"${WORKER_TOKEN}", SECRET),
    ]


def inflight_rollouts(recipe: Recipe) -> int:
    """Rollouts whose agents run at once."""
    everyone = recipe.rollouts.max_inflight_groups * recipe.train.rollouts_per_group
    return recipe.rollouts.max_inflight_rollouts or everyone


def constant_tokens(recipe: Recipe) -> int:
    """What a rollout's sum is divided by with `reduction: constant`."""
    return recipe.train.loss.constant_tokens or recipe.model.max_model_len


def max_lag(recipe: Recipe) -> int:
    """Versions that a token may lag before it counts as old."""
    given = recipe.train.off_policy.max_lag
    return recipe.train.max_staleness if given is None else given


def logical_cpus(recipe: Recipe, *, training: bool = True) -> int:
    """Slots of Ray that the actors of a campaign take: storage units and their controller, finalizers, engine,
    trainer."""
    return storage_units(recipe) + 1 + sum(bundle.count for bundle in bundles(recipe, training=training))


def storage_units(recipe: Recipe, nodes: int = 1) -> int:
    """Storage actors of the data plane on so many nodes."""
    each = recipe.data_plane.storage_units_per_node
    return recipe.data_plane.storage_units if each is None else each * nodes
