"""Sweep: one recipe, several values of some keys, one run after the other, one index notebook over them.

    RECIPE key=a,b,c other=x ─► every point checked ─► runs in order, each as `workbench run` ─► index.ipynb, index.html

Invariants: no run begins before every point has been checked; a run that fails is a row of the index and the next one
begins; one that was stopped (Ctrl-C, SIGTERM) ends the sweep. The index is written again after every run, so it is
there whatever happens. Not here: what is shown (inspect.sweep_view), how one run is executed (runner).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.campaign.report import runner
from workbench.campaign.report.runner import NotebookResult
from workbench.campaign.run_place import new_run_dir
from workbench.campaign.terminal import tell
from workbench.config import Recipe
from workbench.errors import RecipeError, SetupError
from workbench.models import resolve
from workbench.places import shipped
from workbench.runs.sweeps import Point, Sweep

INDEX = "40_sweep.ipynb"
MOST_RUNS = 200


def split_axes(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides for every run, and the swept keys with their values, in the order they were given.

    `key=a,b` is swept, commas in brackets, braces or quotes are the value's own. Raises RecipeError for what is no
    `key=value`, an empty or doubled value, a key that comes twice, or when nothing is swept.
    """
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"command line: expected key=value or key=a,b,c; got {argument!r}")
        values = _split(value)
        if len(values) == 1:
            fixed.append(argument)
            continue
        if key in axes:
            raise RecipeError(f"command line: {key}: given twice; expected all its values in one: {key}=a,b,c")
        if not all(values) or len(set(values)) != len(values):
            raise RecipeError(f"command line: {key}: expected different values between the commas, got {value!r}")
        axes[key] = values
    if not axes:
        raise RecipeError(
            "command line: nothing to sweep; expected a key with several values: train.learning_rate=1e-5,3e-5"
        )
    return fixed, axes


def _split(value: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def plan_sweep(
    recipe_name: str, arguments: Sequence[str], check: Callable[[str, tuple[str, ...]], Recipe]
) -> tuple[Sweep, list[Recipe]]:
    """The sweep and the recipe of each of its points, every one checked by `check(name, overrides)`; starts nothing.

    Raises RecipeError naming the first point that cannot run.
    """
    fixed, axes = split_axes(arguments)
    chosen = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(chosen) > MOST_RUNS:
        raise RecipeError(f"command line: {len(chosen)} runs; expected at most {MOST_RUNS} in one sweep")
    recipes = []
    for settings in chosen:
        recipes.append(check(recipe_name, (*fixed, *(f"{key}={value}" for key, value in settings.items()))))
    first = recipes[0]
    if any(recipe.reports.dir != first.reports.dir or recipe.name != first.name for recipe in recipes):
        raise RecipeError("command line: name and reports.dir cannot be swept: they say where the sweep lies")
    folder = new_run_dir(first.reports.dir, f"{first.name}-sweep", claim=True)
    digits = len(str(len(chosen)))
    points = [Point(f"{first.name}-{number:0{digits}d}", settings) for number, settings in enumerate(chosen, 1)]
    return Sweep(folder, recipe_name, axes, points), recipes


def run_sweep(
    sweep: Sweep, recipes: Sequence[Recipe], execute: Callable[[Recipe, Path], NotebookResult] = runner.run_notebook
) -> int:
    """Run the points in order and write the index after each; returns 0 only when every run is done.

    Raises SetupError before anything starts where a model is missing.
    """
    for recipe in recipes:
        resolve(recipe.model.path)
    sweep.store()
    worst = 0
    for point, recipe in zip(sweep.points, recipes, strict=True):
        settings = " ".join(f"{key}={value}" for key, value in point.settings.items())
        tell(f"sweep: {point.run}, {settings}", sys.stdout)
        result = execute(recipe, sweep.folder / point.run)
        code = runner.conclude(result)
        worst = worst or code
        index = write_index(sweep.folder)
        if result.outcome.status == "stopped":
            worst = code
            break
    tell(f"sweep: {index}", sys.stdout)
    return worst


def write_index(folder: Path) -> Path:
    """Execute the index notebook over a sweep as far as it has come; returns it. Raises SetupError where that fails."""
    result = runner.execute_over(
        shipped("notebooks") / INDEX, folder / "index.ipynb", {"folder": str(folder.resolve())}
    )
    if result.exit_code:
        raise SetupError(f"{folder}: the index failed, {result.outcome.error_name}: {result.outcome.error}")
    return result.notebook
