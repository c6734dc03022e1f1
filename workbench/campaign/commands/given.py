"""Given: what a command line brings to a command, a recipe or a run, and how the command's lines are shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from workbench.config import Recipe

RECIPE_HELP = "RECIPE is a YAML file or the name of a shipped recipe; KEY=VALUE overrides its settings."
RUN_HELP = "RUN is the path of a run, or the name of one in reports/."


def checked_recipe(name: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, checked as far as that goes without starting anything."""
    from workbench.campaign.environments import make_environment
    from workbench.campaign.environments.components import components_needed
    from workbench.config import load_recipe
    from workbench.train.buffer import ReplayBuffer

    recipe = load_recipe(name, overrides)
    environment = make_environment(recipe)
    ReplayBuffer.of(recipe.train)
    components_needed(recipe, environment)
    return recipe


def _run_path(ctx: click.Context, parameter: click.Parameter, value: str) -> Path:
    """RUN as a path: a run or sweep that is there, else one of that path or name from here upwards."""
    from workbench.runs.finding import find, is_run
    from workbench.runs.sweeps import SWEEP_FILE

    return find(value, lambda directory: is_run(directory) or (directory / SWEEP_FILE).is_file())


RUN = click.argument("run_dir", metavar="RUN", callback=_run_path)


def say(line: str, indent: int, *, err: bool = False) -> None:
    """A line: broken between words where a person reads it on a terminal, whole where a program does."""
    from shutil import get_terminal_size
    from textwrap import fill

    if (sys.stderr if err else sys.stdout).isatty():
        width = max(indent + 20, get_terminal_size().columns)
        line = fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    click.echo(line, err=err)
