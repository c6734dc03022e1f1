"""Environments: the tasks that agents play, each one file and one line in the registry below.

`make_environment(recipe)` gives the one that a recipe names, wrapped to misbehave where the recipe asks for it. To add
one: a file with a class that satisfies `Environment`, and its line in `ENVIRONMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.campaign.environments.add_up import AddUp
from workbench.campaign.environments.base import AgentResult, Environment, Message, Reward, Task
from workbench.campaign.environments.guess_number import GuessNumber
from workbench.campaign.environments.misbehave import Misbehaving
from workbench.campaign.environments.say_briefly import SayBriefly
from workbench.errors import RecipeError
from workbench.nearest import did_you_mean
from workbench.recipe_schema import Misbehave, Recipe

__all__ = ["ENVIRONMENTS", "AgentResult", "Environment", "Message", "Reward", "Task", "make_environment"]

ENVIRONMENTS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {
    AddUp.name: AddUp,
    GuessNumber.name: GuessNumber,
    SayBriefly.name: SayBriefly,
}


def make_environment(recipe: Recipe) -> Environment:
    """The environment that a recipe names. Raises RecipeError on an unknown name, option or option value."""
    settings = recipe.environment
    if settings.name not in ENVIRONMENTS:
        hint, names = did_you_mean(settings.name, ENVIRONMENTS), ", ".join(ENVIRONMENTS)
        raise RecipeError(f"environment.name: no environment {settings.name!r}{hint} Allowed: {names}")
    environment = ENVIRONMENTS[settings.name](settings.options)
    if settings.misbehave == Misbehave():
        return environment
    return Misbehaving(environment, settings.misbehave, window_tokens=recipe.model.max_model_len)
