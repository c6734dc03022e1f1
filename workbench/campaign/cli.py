"""Command line: `workbench`, one function a command, each importing only what it needs.

`--help` answers in a fraction of a second because torch, Ray and plotly are imported inside the commands. Every
deliberate error of the package is one line on stderr, `workbench: …`, and its `exit_code`; WORKBENCH_DEBUG=1 shows the
traceback instead. Results go to stdout, so that they can be piped.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from workbench import __version__
from workbench.errors import RecipeError, SetupError, TrainerError, WorkbenchError

if TYPE_CHECKING:
    from workbench.config import Recipe

_SHOWN = 20
NOT_OURS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
RECIPE_HELP = "RECIPE is a YAML file or the name of a shipped recipe; KEY=VALUE overrides its settings."


def _say(line: str, indent: int, *, err: bool = False) -> None:
    """A line: broken between words where a person reads it on a terminal, whole where a program does."""
    from shutil import get_terminal_size
    from textwrap import fill

    if (sys.stderr if err else sys.stdout).isatty():
        width = max(indent + 20, get_terminal_size().columns)
        line = fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    click.echo(line, err=err)


def _takes_overrides(command: click.Command) -> bool:
    return any(parameter.name == "overrides" for parameter in command.params)


class _Workbench(click.Group):
    """The command group, with the one place where errors become a line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except WorkbenchError as error:
            if os.environ.get("WORKBENCH_DEBUG") == "1":
                raise
            _say(f"workbench: {' '.join(str(error).split())}", 2, err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            # The machine's word about a file of the user's; anything else would be a fault of ours.
            if error.errno not in NOT_OURS or os.environ.get("WORKBENCH_DEBUG") == "1":
                raise
            click.echo(f"workbench: {error.filename or 'a file'}: {error.strerror}", err=True)
            sys.exit(1)
        except click.ClickException as error:
            error.show()
            if isinstance(error, click.NoSuchOption) and error.ctx and _takes_overrides(error.ctx.command):
                click.echo("A recipe's values are given without dashes, as in train.steps=2.", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("workbench: interrupted", err=True)
            sys.exit(128 + signal.SIGINT)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a day's work, not of the alphabet


def checked_recipe(name: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, checked as far as that goes without starting anything."""
    from workbench.campaign.environments import make_environment
    from workbench.config import load_recipe
    from workbench.train.buffer import ReplayBuffer
    from workbench.train.estimators import estimator

    recipe = load_recipe(name, overrides)
    make_environment(recipe)
    ReplayBuffer.of(recipe.train)
    advantage = recipe.train.advantage
    try:
        estimator(advantage.name, **advantage.options)
    except TrainerError as error:
        raise RecipeError(f"train.advantage: {error}") from error
    return recipe


def _run_path(ctx: click.Context, parameter: click.Parameter, value: str) -> Path:
    """RUN as a path: a run or sweep that is there, else one of that path or name from here upwards."""
    from workbench.runs.finding import find, is_run
    from workbench.runs.sweeps import SWEEP_FILE

    return find(value, lambda directory: is_run(directory) or (directory / SWEEP_FILE).is_file())


RUN = click.argument("run_dir", metavar="RUN", callback=_run_path)
RUN_HELP = "RUN is the path of a run, or the name of one in reports/."


@click.group(cls=_Workbench, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="workbench")
def main() -> None:
    """Token-exact GRPO on language-model agents: run campaigns, look into them, check them."""


@main.command(epilog=RECIPE_HELP)
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
    from workbench.campaign.doctor import refuse_unable

    checked = checked_recipe(recipe, overrides)
    if dry_run:
        from workbench.campaign.plan import lacking, plan

        lacks = lacking(checked)
        for line in plan(checked, recipe, overrides, run_name, lacks=lacks).splitlines():
            _say(line, 13)
        if lacks:
            raise SetupError(f"{recipe} cannot run here: {len(lacks)} lacking, see the end of the plan")
        return
    refuse_unable(checked)
    from workbench.campaign import runner

    sys.exit(runner.run_recipe(recipe, overrides, run_name))


@main.command("serve", epilog=RECIPE_HELP)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run_name", help="Name of the run's directory; default: serve- and the recipe's name, numbered.")
def serve_recipe(recipe: str, overrides: tuple[str, ...], run_name: str | None) -> None:
    """Serve the policy to an agent of your own, captured."""
    from workbench.campaign.doctor import refuse_unable
    from workbench.campaign.runner import new_run_dir

    checked = checked_recipe(recipe, overrides)
    refuse_unable(checked, training=False)
    name = f"serve-{checked.name}" if run_name is None else run_name
    run_dir = new_run_dir(checked.reports.dir, name, named=run_name is not None)
    from workbench.campaign.serve import serve

    sys.exit(serve(checked, run_dir))


@main.command(epilog=RUN_HELP)
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
    from workbench.campaign.ask_receipt import ask_receipt, verdict_text

    verdicts = ask_receipt(run_dir, rollouts, terminals=terminals, rewards=rewards, group=group)
    for verdict in verdicts:
        click.echo(verdict_text(verdict, run_dir))
    sys.exit(0 if all(verdict.verified for verdict in verdicts) else 1)


@main.command(epilog=RUN_HELP)
@RUN
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def resume(run_dir: Path, overrides: tuple[str, ...]) -> None:
    """Go on with a stopped or killed run, from its records.

    KEY=VALUE may change how far it goes (train.steps), deadlines, and what the machine offers.
    """
    from workbench.campaign.doctor import refuse_unable
    from workbench.campaign.resume import resumable

    recipe = resumable(run_dir, overrides)
    refuse_unable(recipe)
    from workbench.campaign import runner

    sys.exit(runner.resume_run(recipe, run_dir))


@main.command(epilog=RECIPE_HELP)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, required=True, metavar="KEY=A,B,C [KEY=VALUE]...")
def sweep(recipe: str, overrides: tuple[str, ...]) -> None:
    """Run a recipe once for each value, or combination of values.

    Runs go one after the other; a failed one does not stop the next. Leaves them and one index notebook over all in
    reports/NAME-sweep-N/. Exit 0 when every run is done and trained something.
    """
    from workbench.campaign.doctor import refuse_unable
    from workbench.campaign.sweep import plan_sweep, run_sweep

    planned, recipes = plan_sweep(recipe, overrides, checked_recipe)
    for each in recipes:
        refuse_unable(each)
    sys.exit(run_sweep(planned, recipes))


@main.command("ls")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_runs(folder: Path | None, as_json: bool) -> None:
    """List runs: status, step, reward, token_in, rejected rollouts.

    FOLDER is where they lie; default: reports/, here or in a folder above. Runs of a sweep are listed too. token_in is
    the share of the calls after a rollout's first that went on from its exact tokens; --json has more columns.
    """
    from workbench.campaign.listing import list_lines, listing
    from workbench.recipe_schema import Reports
    from workbench.runs.finding import find
    from workbench.runs.shelf import run_directories

    table = listing(folder or find(Reports().dir, lambda place: bool(run_directories(place))))
    for line in table.iter_rows(named=True) if as_json else ():
        click.echo(orjson.dumps(line))
    for text in [] if as_json else list_lines(table):
        _say(text, 2)


@main.command(epilog=RUN_HELP)
@RUN
def report(run_dir: Path) -> None:
    """Execute the notebook of a stored run or sweep again."""
    from workbench.campaign import runner
    from workbench.campaign.sweep import write_index
    from workbench.runs.sweeps import SWEEP_FILE

    click.echo(write_index(run_dir) if (run_dir / SWEEP_FILE).is_file() else runner.report(run_dir))


@main.command(epilog=RUN_HELP)
@RUN
@click.argument("rollout", required=False)
def inspect(run_dir: Path, rollout: str | None) -> None:
    """Describe a run, or one rollout of it: calls, chain, custody.

    RUN may also be a directory of ledgers, as a NeMo Gym run leaves one.
    """
    from workbench import runs
    from workbench.runs.damage import in_short

    stored = runs.open_any(run_dir)
    if rollout is None:
        damage = stored.damage
        click.echo(repr(stored).removesuffix(in_short(damage, stored.path)))
        for words in damage[:_SHOWN]:
            _say(f"  left out: {words}", 4)
        return
    from workbench.inspect import PrefixChain
    from workbench.runs.drift import drift_frame, sentences

    click.echo(PrefixChain(stored, rollout).to_text())
    for sentence in sentences(drift_frame(stored, rollout)):
        click.echo(sentence)


@main.command(epilog=RUN_HELP)
@RUN
def verify(run_dir: Path) -> None:
    """Recompute every digest and row of a stored run.

    Exit 1 when one does not hold, or when there is nothing to verify yet.
    """
    from workbench.campaign import verify_run

    result = verify_run.verify_run(run_dir)
    click.echo(result)
    sys.exit(0 if result.ok and not result.empty else 1)


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
def conformance(paths: tuple[Path, ...]) -> None:
    """Run conformance corpora: JSONL files, or directories of them.

    Exit 1 when a case fails.
    """
    from workbench.campaign import conformance as corpora

    sys.exit(corpora.main(list(paths)))


@main.group()
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

    Behind one that is left open, what set-up will derive.
    """
    from workbench.campaign.derived import derived
    from workbench.config import describe

    def notes(recipe: Recipe) -> dict[str, str]:
        return {each.key: f"derived: {each.value} ({each.how})" for each in derived(recipe)}

    click.echo(describe(name, overrides, notes))


@recipe.command("check", epilog=RECIPE_HELP)
@click.argument("name", metavar="RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def recipe_check(name: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe and its overrides.

    Keys, types, bounds, combinations, the environment's options, and the window against the model where that is here.
    Exit 2 when something is wrong. Whether this machine can run it: workbench doctor.
    """
    from workbench.campaign.doctor import remarks

    checked = checked_recipe(name, overrides)
    said = list(remarks(checked))
    click.echo(f"{checked.name}: good")
    for line in said:
        _say(line, 2)


@main.command(epilog=RECIPE_HELP)
@click.argument("recipe", default="cpu_smollm2")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--quick", is_flag=True, help="Leave out the trial of Ray and TransferQueue (half a minute).")
def doctor(recipe: str, overrides: tuple[str, ...], quick: bool) -> None:
    """Can this machine run a recipe, and what is missing?

    Exit 2 when something is. What only tests need is marked, and no reason for that.
    """
    from workbench.campaign.doctor import examine
    from workbench.config import load_recipe

    bad = 0
    for finding in examine(load_recipe(recipe, overrides), quick=quick):
        mark = "ok " if finding.good else "-- " if finding.optional else "BAD"
        _say(f"{mark} {finding.what:<22} {finding.found}" + (f"; {finding.cure}" if finding.cure else ""), 27)
        bad += not (finding.good or finding.optional)
    if bad:
        raise SetupError(f"{bad} of these must be mended before {recipe} can run")


@main.command(context_settings={"ignore_unknown_options": True})
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


@main.group()
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


if __name__ == "__main__":
    main(prog_name="workbench")
