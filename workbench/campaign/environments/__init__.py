"""Environments: the tasks that agents play, each one file and one line in the registry below.

`make_environment(recipe)` gives the one that a recipe names, wrapped to misbehave where the recipe asks for it. One of
your own needs no line here: a recipe names it as `file.py:Class` or `package.module:Class`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench import own_code
from workbench.campaign.environments import base
from workbench.campaign.environments.add_up import AddUp
from workbench.campaign.environments.base import AgentResult, Environment, Message, Reward, Task
from workbench.campaign.environments.file_fix import FileFix
from workbench.campaign.environments.guess_number import GuessNumber
from workbench.campaign.environments.misbehave import Misbehaving
from workbench.campaign.environments.say_briefly import SayBriefly
from workbench.errors import RecipeError
from workbench.nearest import did_you_mean
from workbench.recipe_schema import Misbehave, Recipe

__all__ = ["ENVIRONMENTS", "AgentResult", "Environment", "Message", "Reward", "Task", "make_environment"]

ENVIRONMENTS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {
    AddUp.name: AddUp,
    FileFix.name: FileFix,
    GuessNumber.name: GuessNumber,
    SayBriefly.name: SayBriefly,
}


def make_environment(recipe: Recipe) -> Environment:
    """The environment that a recipe names. Raises RecipeError on an unknown name, option or option value."""
    settings = recipe.environment
    make = _own(settings.name) if own_code.names_own_code(settings.name) else ENVIRONMENTS.get(settings.name)
    if make is None:
        hint, names = did_you_mean(settings.name, ENVIRONMENTS), ", ".join(ENVIRONMENTS)
        raise RecipeError(
            f"environment.name: no environment {settings.name!r}{hint} Allowed: {names}, or {own_code.FORMS}"
        )
    environment = make(settings.options)
    if settings.misbehave == Misbehave():
        return environment
    return Misbehaving(environment, settings.misbehave, window_tokens=recipe.model.max_model_len)


def _own(path: str) -> Callable[[Mapping[str, Any]], Environment]:
    found = own_code.load(path, "environment.name:")
    missing = [part for part in ("name", "min_calls", "task", "run", "reward") if not hasattr(found, part)]
    if not isinstance(found, type) or missing:
        what = f"it lacks {', '.join(missing)}" if missing else "it is no class"
        raise RecipeError(f"environment.name: {path!r} is no environment: {what}; see `Environment` in {base.__name__}")
    return found
