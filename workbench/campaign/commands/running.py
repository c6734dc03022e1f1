"""Running: what starts a run, goes on with one, or closes a part of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from workbench.campaign.commands.given import RECIPE_HELP, RUN, RUN_HELP, checked_recipe, say
from workbench.errors import SetupError

if TYPE_CHECKING:
    from workbench.config import Recipe


@click.command(epilog=RECIPE_HELP)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run_name", help="Name of the run's directory; default: the recipe's name and a number.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print places, processes, paths, commands; start nothing. Exit 2 when something is lacking.",
)
def run(recipe: str, overrides: tuple[str, ...], run_name: str | None, dry_run: bool) -> None:
    """Run a campaign; leaves notebook and records in reports/RUN/.

    Exit 0 when it is done and something was trained.
    """
    from workbench.campaign.machines.doctor import refuse_unable

    checked = checked_recipe(recipe, overrides)
    _remark(checked)
    if dry_run:
        from workbench.campaign.machines.plan import lacking, plan

        lacks = lacking(checked)
        for line in plan(checked, recipe, overrides, run_name, lacks=lacks).splitlines():
            say(line, 13)
        if lacks:
            raise SetupError(f"{recipe} cannot run here: {len(lacks)} lacking, see the end of the plan")
        return
    refuse_unable(checked)
    from workbench.campaign.report import runner

    sys.exit(runner.run_recipe(recipe, overrides, run_name))


@click.command("serve", epilog=RECIPE_HELP)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run_name", help="Name of the run's directory; default: serve- and the recipe's name, numbered.")
def serve_recipe(recipe: str, overrides: tuple[str, ...], run_name: str | None) -> None:
    """Serve the policy to an agent of your own, captured."""
    from workbench.campaign.machines.doctor import refuse_unable
    from workbench.campaign.run_place import new_run_dir

    checked = checked_recipe(recipe, overrides)
    refuse_unable(checked, training=False)
    name = f"serve-{checked.name}" if run_name is None else run_name
    run_dir = new_run_dir(checked.reports.dir, name, named=run_name is not None, claim=True)
    from workbench.campaign.served.serve import serve

    sys.exit(serve(checked, run_dir))


@click.command(epilog=RUN_HELP)
@RUN
@click.argument("rollouts", nargs=-1, required=True, metavar="ROLLOUT...")
@click.option("--terminal", "terminals", multiple=True, metavar="ID", help="Response or call id that ends the rollout.")
@click.option("--reward", "rewards", multiple=True, type=float, metavar="R", help="The rollout's reward.")
@click.option("--group", metavar="NAME", help="Name of the group that is stored; default: the first rollout's.")
def receipt(
    run_dir: Path, rollouts: tuple[str, ...], terminals: tuple[str, ...], rewards: tuple[float, ...], group: str | None
) -> None:
    """Close rollouts of a served run, verify and store them.

    While its server runs. Several rollouts make one group; --terminal and --reward are then repeated in their order.
    Exit 1 when one was rejected.
    """
    from workbench.campaign.served.ask_receipt import ask_receipt, verdict_text

    verdicts = ask_receipt(run_dir, rollouts, terminals=terminals, rewards=rewards, group=group)
    for verdict in verdicts:
        click.echo(verdict_text(verdict, run_dir))
    sys.exit(0 if all(verdict.verified for verdict in verdicts) else 1)


@click.command(epilog=RUN_HELP)
@RUN
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def resume(run_dir: Path, overrides: tuple[str, ...]) -> None:
    """Go on with a stopped or failed run, from its records.

    KEY=VALUE may change how far it goes (train.steps), deadlines, and what the machine offers.
    """
    from workbench.campaign.machines.doctor import refuse_unable
    from workbench.campaign.resume import resumable
    from workbench.runs.condition import broken_status

    recipe = resumable(run_dir, overrides)
    for broken in broken_status(run_dir):
        say(f"workbench: {broken}, so how the run ended is not known; it goes on from its records", 2, err=True)
    refuse_unable(recipe)
    _remark(recipe)
    from workbench.campaign.report import runner

    sys.exit(runner.resume_run(recipe, run_dir))


@click.command(epilog=RECIPE_HELP)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, required=True, metavar="KEY=A,B,C [KEY=VALUE]...")
def sweep(recipe: str, overrides: tuple[str, ...]) -> None:
    """Run a recipe once for each value, or combination of values.

    Runs go one after the other; a failed one does not stop the next. Leaves them and one index notebook over all in
    reports/NAME-sweep-N/. Exit 0 when every run is done and trained something.
    """
    from workbench.campaign.machines.doctor import refuse_unable
    from workbench.campaign.report.sweep import plan_sweep, run_sweep

    def able(name: str, settings: tuple[str, ...]) -> Recipe:
        checked = checked_recipe(name, settings)
        refuse_unable(checked)
        return checked

    planned, recipes = plan_sweep(recipe, overrides, able)
    _remark(*recipes)
    sys.exit(run_sweep(planned, recipes))


def _remark(*recipes: Recipe) -> None:
    """A line where the machine's memory may not suffice (a campaign that outgrows it is killed, minutes later), and one
    for each setting that has no effect."""
    from workbench.campaign.machines.doctor import idle_remarks, memory_remark

    remarks = [line for recipe in recipes for line in (memory_remark(recipe), *idle_remarks(recipe)) if line]
    for remark in dict.fromkeys(remarks):
        say(f"workbench: {remark}", 2, err=True)
