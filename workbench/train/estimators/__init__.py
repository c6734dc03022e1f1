"""Advantage estimators by name: `advantages("grpo", rewards, group_ids, valid_mask, baseline="mean")`.

One file a choice, all over `base`. Adding one adds a file and a line in `ESTIMATORS`; the tests then hold it to the
rules of `base` without being told.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np

from workbench.errors import TrainerError
from workbench.nearest import did_you_mean
from workbench.train.estimators.base import Estimator, GroupCentred, checked
from workbench.train.estimators.dr_grpo import DrGrpo
from workbench.train.estimators.gdpo import Gdpo
from workbench.train.estimators.grpo import Grpo
from workbench.train.estimators.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from workbench.train.estimators.rloo import Rloo

ESTIMATORS: dict[str, type[Estimator]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "dr_grpo": DrGrpo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus-baseline": ReinforcePlusPlusBaseline,
    "gdpo": Gdpo,
}

__all__ = ["ESTIMATORS", "Estimator", "GroupCentred", "advantages", "estimator"]


def estimator(name: str, **options: object) -> Estimator:
    """The estimator `name` with its options. Raises TrainerError with what there is, and what is nearest, otherwise."""
    if name not in ESTIMATORS:
        names = ", ".join(sorted(ESTIMATORS))
        raise TrainerError(f"No advantage estimator {name!r}{did_you_mean(name, ESTIMATORS)} There are {names}.")
    chosen = ESTIMATORS[name]
    known = [field.name for field in fields(chosen)]
    for option in sorted(set(options) - set(known)):
        has = ", ".join(known) or "none"
        raise TrainerError(f"{name} has no option {option}{did_you_mean(option, known)} It has: {has}.")
    for field in fields(chosen):
        given = options.get(field.name, field.default)
        # A text such as "false" would be true, silently.
        if isinstance(field.default, bool) and not isinstance(given, bool):
            raise TrainerError(f"{name}: {field.name} is true or false, got {given!r}.")
    return chosen(**options)


def advantages(
    name: str,
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Hashable],
    valid_mask: Sequence[float] | np.ndarray,
    **options: object,
) -> np.ndarray:
    """One advantage a row, float64 (N,).

    `rewards` (N,), or (N, K) for an estimator of several rewards (gdpo); `group_ids` (N,) any hashable; `valid_mask`
    (N,) of 0 and 1; `options` are the estimator's fields.
    Rows with valid_mask 0 (placeholders) get exactly 0 and have no influence on the others, whatever their reward.
    Raises TrainerError for an unknown name or option, unequal lengths, or a voting row without a finite reward.
    """
    chosen = estimator(name, **options)
    return chosen(*checked(rewards, group_ids, valid_mask, many_rewards=chosen.many_rewards))
