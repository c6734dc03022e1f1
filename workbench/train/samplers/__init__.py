"""Samplers by name: which of the finished groups the next optimiser step takes.

    sampler("windowed", max_staleness=2)      one of SAMPLERS
    sampler("mine.samplers:Best", share=0.5)  a `Sampler` of one's own, found on the Python path

One file a choice, all over `base`. Not here: what lies in the buffer (`workbench.train.buffer`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from workbench import own_code
from workbench.errors import RecipeError
from workbench.nearest import did_you_mean
from workbench.train.samplers.base import Entry, Sampler, Selection
from workbench.train.samplers.in_order import InOrder
from workbench.train.samplers.weight_fifo import WeightFifo
from workbench.train.samplers.windowed import Windowed

SAMPLERS: dict[str, type[Sampler]] = {
    "in_order": InOrder,
    "weight_fifo": WeightFifo,
    "windowed": Windowed,
}

__all__ = ["SAMPLERS", "Entry", "Sampler", "Selection", "sampler"]


def sampler(name: str, staleness: int | None = None, **options: Any) -> Sampler:
    """The sampler `name`, or the class at `package.module:Class` or `file.py:Class`, with its options.

    `staleness` is `max_staleness` for a sampler that has this option and was not given it.
    Raises RecipeError with what there is otherwise: an unknown name or option, a path that leads to no `Sampler`.
    """
    chosen = _imported(name) if own_code.names_own_code(name) else SAMPLERS.get(name)
    if chosen is None:
        hint, names = did_you_mean(name, SAMPLERS), ", ".join(SAMPLERS)
        raise RecipeError(f"no sampler {name!r}{hint} Allowed: {names}, or {own_code.FORMS}")
    known = [field.name for field in fields(chosen)]
    for option in options:
        if option not in known:
            raise RecipeError(f"sampler {name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
    if "max_staleness" in known and options.get("max_staleness") is None:
        options["max_staleness"] = staleness
    try:
        return chosen(**options)
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"sampler {name} does not take {options}: {own_code.raised(error)}") from error


def _imported(path: str) -> type[Sampler]:
    found = own_code.load(path, "sampler")
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise RecipeError(f"sampler {path}: expected a subclass of workbench.train.samplers.Sampler, got {found!r}")
    return found
