"""Environments: the tasks that agents play, each one file and one line in the registry below.

`make_environment(recipe)` gives the one that a recipe names, wrapped to misbehave where the recipe asks for it. One of
your own needs no line here: a recipe names it as `file.py:Class` or `package.module:Class`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from workbench import own_code
from workbench.campaign.environments import base
from workbench.campaign.environments.add_up import AddUp
from workbench.campaign.environments.base import AgentResult, Environment, Message, Reward, Task
from workbench.campaign.environments.file_fix import FileFix
from workbench.campaign.environments.fit import task_of, unfit
from workbench.campaign.environments.guess_number import GuessNumber
from workbench.campaign.environments.misbehave import Misbehaving
from workbench.campaign.environments.say_briefly import SayBriefly
from workbench.deadline import TooLate, call_with_deadline
from workbench.errors import RecipeError, WorkbenchError
from workbench.nearest import did_you_mean
from workbench.recipe_schema import Misbehave, Recipe

__all__ = [
    "ENVIRONMENTS",
    "AgentResult",
    "Environment",
    "Message",
    "Reward",
    "Task",
    "make_environment",
    "task_seed",
]

ENVIRONMENTS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {
    AddUp.name: AddUp,
    FileFix.name: FileFix,
    GuessNumber.name: GuessNumber,
    SayBriefly.name: SayBriefly,
}


def make_environment(recipe: Recipe) -> Environment:
    """The environment that a recipe names.

    Raises RecipeError on an unknown name, option or option value, and for one of your own that does not `fit`: its
    first task is asked for, and must come within `rollouts.timeout_s`.
    """
    settings = recipe.environment
    if own_code.names_own_code(settings.name):
        return _misbehaving(_own(recipe), recipe)
    make = ENVIRONMENTS.get(settings.name)
    if make is None:
        hint, names = did_you_mean(settings.name, ENVIRONMENTS), ", ".join(ENVIRONMENTS)
        raise RecipeError(
            f"environment.name: no environment {settings.name!r}{hint} Allowed: {names}, or {own_code.FORMS}"
        )
    return _misbehaving(make(settings.options), recipe)


def task_seed(seed: int, number: int) -> int:
    """Of the task of group `number`: the same in every run with the recipe's `seed`."""
    return seed * 1_000_003 + number


def _misbehaving(environment: Environment, recipe: Recipe) -> Environment:
    shares = recipe.environment.misbehave
    if shares == Misbehave():
        return environment
    if environment.min_calls < 1:
        raise RecipeError(f"environment.misbehave: {environment.name} may make no call (min_calls 0), so no fault fits")
    if shares.edit and environment.min_calls < 2:
        raise RecipeError(
            f"environment.misbehave.edit: expected 0, because {environment.name} may make one call alone (min_calls "
            f"{environment.min_calls}), before which there is no answer to rewrite; got {shares.edit:g}"
        )
    return Misbehaving(environment, shares, window_tokens=recipe.model.max_model_len)


def _own(recipe: Recipe) -> Environment:
    path, options, timeout_s = recipe.environment.name, recipe.environment.options, recipe.rollouts.timeout_s
    found = own_code.load(path, "environment.name:")
    missing = [part for part in ("name", "min_calls", "task", "run", "reward") if not hasattr(found, part)]
    if not isinstance(found, type) or missing:
        what = f"it lacks {', '.join(missing)}" if missing else "it is no class"
        raise RecipeError(f"environment.name: {path!r} is no environment: {what}; see `Environment` in {base.__name__}")
    try:
        inspect.signature(found).bind(options)
    except TypeError as error:
        where = own_code.place_of(inspect.getattr_static(found, "__init__"))
        what = f"__init__(){where} does not take what it is given ({error}), expected def __init__(self, options)"
        raise RecipeError(f"environment.name: {path!r}: {what}") from error
    except ValueError:  # something built in, which does not say what it takes
        pass
    try:
        environment: Environment = found(options)
    except WorkbenchError:
        raise
    except (Exception, SystemExit) as error:
        what = f"cannot be made from environment.options: {own_code.raised(error)}"
        raise RecipeError(f"environment.name: {path!r} {what}") from error
    seed = task_seed(recipe.seed, 0)
    try:
        fault = unfit(environment) or call_with_deadline(lambda: task_of(environment, seed), timeout_s)
    except TooLate:
        fault = f"task({seed}) did not come within rollouts.timeout_s={timeout_s:g}"
    if isinstance(fault, str):
        raise RecipeError(f"environment.name: {path!r}: {fault}; see `Environment` in {base.__name__}")
    return environment
