"""Components: whether the parts of an environment's rewards are those that a recipe's estimator takes one by one.

Before a run for an environment that names its `components`; a rollout whose reward then lacks one has no vote. What an
environment does not name shows at the first step alone (train.votes). Not here: values (fit).
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.campaign.environments.base import Environment
from workbench.errors import RecipeError, TrainerError
from workbench.nearest import did_you_mean
from workbench.recipe_schema import Recipe
from workbench.train.estimators import estimator


def components_needed(recipe: Recipe, environment: Environment) -> frozenset[str]:
    """What every reward must have, as far as it is known before the first; empty where the total alone counts.

    Raises RecipeError where the environment says that its rewards do not have them, or the estimator is none.
    """
    advantage = recipe.train.advantage
    try:
        chosen = estimator(advantage.name, **advantage.options)
    except TrainerError as error:
        raise RecipeError(f"train.advantage: {error}") from error
    named: tuple[str, ...] | None = getattr(environment, "components", None)
    if not chosen.many_rewards or named is None:
        return frozenset()
    if not named:
        raise RecipeError(
            f"train.advantage.name: {advantage.name} needs the parts of each reward, and those of {environment.name} "
            "have none. Next: another estimator, such as grpo, or another environment"
        )
    weights = getattr(chosen, "weights", None)
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in named:
                raise RecipeError(
                    f"train.advantage.options.weights.{name}: the rewards of {environment.name} have no such "
                    f"component{did_you_mean(name, named)} Allowed: {', '.join(named)}"
                )
        return frozenset(weights)
    if weights is not None and len(weights) != len(named):
        raise RecipeError(
            f"train.advantage.options.weights: expected {len(named)}, for {', '.join(sorted(named))} of "
            f"{environment.name}; got {len(weights)}"
        )
    return frozenset(named)
