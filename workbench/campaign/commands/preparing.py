"""Preparing: what helps before a run: recipes, the machine, notebooks, models."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from workbench.campaign.commands.given import RECIPE_HELP, checked_recipe, say
from workbench.errors import SetupError

if TYPE_CHECKING:
    from workbench.config import Recipe


@click.group()
def recipe() -> None:
    """Look at recipes and check them, without starting anything."""


@recipe.command("list")
def recipe_list() -> None:
    """The shipped recipes, each with what it is for."""
    from textwrap import fill

    from workbench.config import shipped_recipes

    for name, purpose in shipped_recipes().items():
        click.echo(fill(purpose, 80, initial_indent=f"{name:<20}", subsequent_indent=" " * 20))


@recipe.command("show", epilog=RECIPE_HELP)
@click.argument("name", metavar="RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def recipe_show(name: str, overrides: tuple[str, ...]) -> None:
    """Every value of a recipe, and where it comes from.

    Behind one that is left open, what set-up will derive; behind one that changes nothing, why.
    """
    from workbench.campaign.machines.derived import derived
    from workbench.campaign.machines.idle import idle
    from workbench.config import describe

    def notes(recipe: Recipe) -> dict[str, str]:
        return {each.key: f"derived: {each.value} ({each.how})" for each in derived(recipe)} | idle(recipe)

    click.echo(describe(name, overrides, notes))


@recipe.command("check", epilog=RECIPE_HELP)
@click.argument("name", metavar="RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def recipe_check(name: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe and its overrides.

    Keys, types, bounds, combinations, the environment's options; the window against the model and the parsers' names
    against vLLM, where these are here.
    Exit 2 when something is wrong. Whether this machine can run it: workbench doctor.
    """
    from workbench.campaign.machines.doctor import model, remarks

    checked = checked_recipe(name, overrides)
    said = list(remarks(checked))
    here = model(checked).good
    click.echo(f"{checked.name}: {'good' if here else 'nothing is wrong in it, but its model is not on this machine'}")
    for line in said:
        say(line, 2)


@click.command(epilog=RECIPE_HELP)
@click.argument("recipe", default="cpu_smollm2")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--quick", is_flag=True, help="Leave out the trial of Ray and TransferQueue (half a minute).")
def doctor(recipe: str, overrides: tuple[str, ...], quick: bool) -> None:
    """Can this machine run a recipe, and what is missing?

    Exit 2 when something is. What is marked -- is no reason for that: what only tests need, or memory that a smaller
    recipe would not want.
    """
    from workbench.campaign.machines.doctor import examine
    from workbench.config import load_recipe

    bad = 0
    for finding in examine(load_recipe(recipe, overrides), quick=quick):
        mark = "ok " if finding.good else "-- " if finding.optional else "BAD"
        say(f"{mark} {finding.what:<22} {finding.found}" + (f"; {finding.cure}" if finding.cure else ""), 27)
        bad += not (finding.good or finding.optional)
    if bad:
        raise SetupError(f"{bad} of these must be mended before {recipe} can run")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[JUPYTER OPTIONS]...")
def lab(arguments: tuple[str, ...]) -> None:
    """JupyterLab on the notebooks.

    Without a browser on this machine: --no-browser, then open the address that it prints, through an SSH tunnel.
    """
    from workbench.places import shipped

    notebooks = shipped("notebooks")
    root = notebooks.parent if (notebooks.parent / "reports").is_dir() else notebooks
    given = [f"--notebook-dir={root}", f"--LabApp.default_url=/lab/tree/{notebooks.relative_to(root)}"]
    if os.geteuid() == 0:
        given.append("--allow-root")  # as in a container; it listens on this machine alone, and asks for a token
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *given, *arguments])


@click.group()
def models() -> None:
    """The small models that the CPU recipes use."""


@models.command("build")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def models_build(names: tuple[str, ...]) -> None:
    """Build models that are missing, print where they are.

    NAME is smollm2-135m, tiny or tiny-moe.
    """
    from workbench import models as shelf

    for name in names:
        click.echo(shelf.build(name))
