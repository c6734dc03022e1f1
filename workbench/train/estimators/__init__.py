"""Advantage estimators by name: `advantages("grpo", rewards, group_ids, valid_mask, baseline="mean")`.

One file a choice, all over `base`. Adding one adds a file and a line in `ESTIMATORS`; the tests then hold it to the
rules of `base` without being told.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np

from workbench.errors import TrainerError
from workbench.train.estimators.base import Estimator, GroupCentred, checked
from workbench.train.estimators.dr_grpo import DrGrpo
from workbench.train.estimators.grpo import Grpo
from workbench.train.estimators.rloo import Rloo

ESTIMATORS: dict[str, type[Estimator]] = {"grpo": Grpo, "rloo": Rloo, "dr_grpo": DrGrpo}

__all__ = ["ESTIMATORS", "Estimator", "GroupCentred", "advantages", "estimator"]


def estimator(name: str, **options: object) -> Estimator:
    """The estimator `name` with its options. Raises TrainerError naming what there is otherwise."""
    if name not in ESTIMATORS:
        raise TrainerError(f"No advantage estimator {name!r}; there are {', '.join(sorted(ESTIMATORS))}.")
    chosen = ESTIMATORS[name]
    known = [field.name for field in fields(chosen)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TrainerError(f"{name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}.")
    return chosen(**options)


def advantages(
    name: str,
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Hashable],
    valid_mask: Sequence[float] | np.ndarray,
    **options: object,
) -> np.ndarray:
    """One advantage a row, float64 (N,).

    `rewards` (N,), `group_ids` (N,) any hashable, `valid_mask` (N,) of 0 and 1; `options` are the estimator's fields.
    Rows with valid_mask 0 (placeholders) get exactly 0 and have no influence on the others, whatever their reward.
    Raises TrainerError for an unknown name or option, unequal lengths, or a voting row without a finite reward.
    """
    return estimator(name, **options)(*checked(rewards, group_ids, valid_mask))
