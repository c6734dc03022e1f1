"""Looking: what shows runs that are there, and checks them."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import orjson

from workbench.campaign.commands.given import RUN, RUN_HELP, say

_SHOWN = 20


@click.command("ls")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_runs(folder: Path | None, as_json: bool) -> None:
    """List runs: status, step, reward, token_in, rejected rollouts.

    FOLDER is where they lie; default: reports/, here or in a folder above. Runs of a sweep are listed too. token_in is
    the share of the calls after a rollout's first that went on from its exact tokens; --json has more columns.
    """
    from workbench.campaign.report.listing import list_lines, listing
    from workbench.recipe_schema import Reports
    from workbench.runs.finding import find
    from workbench.runs.shelf import run_directories

    table = listing(folder or find(Reports().dir, lambda place: bool(run_directories(place))))
    for line in table.iter_rows(named=True) if as_json else ():
        click.echo(orjson.dumps(line))
    for text in [] if as_json else list_lines(table):
        say(text, 2)


@click.command(epilog=RUN_HELP)
@RUN
def report(run_dir: Path) -> None:
    """Execute the notebook of a stored run or sweep again."""
    from workbench.campaign.report import runner
    from workbench.campaign.report.sweep import write_index
    from workbench.runs.sweeps import SWEEP_FILE

    click.echo(write_index(run_dir) if (run_dir / SWEEP_FILE).is_file() else runner.report(run_dir))


@click.command(epilog=RUN_HELP)
@RUN
@click.argument("rollout", required=False)
def inspect(run_dir: Path, rollout: str | None) -> None:
    """List a run's rollouts, or show one: calls, chain, custody.

    RUN may also be a directory of ledgers, as a NeMo Gym run leaves one.
    """
    import polars as pl

    from workbench import runs
    from workbench.campaign.report.listing import rollout_lines
    from workbench.places import as_word
    from workbench.runs.damage import in_short
    from workbench.runs.refused import refused_words

    stored = runs.open_any(run_dir)
    if rollout is None:
        damage = stored.damage
        click.echo(repr(stored).removesuffix(in_short(damage, stored.path)))
        for words in damage[:_SHOWN]:
            say(f"  left out: {words}", 4)
        cut = getattr(stored, "refused_cut", False)
        refused = refused_words(getattr(stored, "refused", pl.DataFrame()), cut=cut)
        if refused is not None:
            say(f"  refused requests: {refused}", 4)
        lines = rollout_lines(stored, _SHOWN)
        for line in lines:
            say(line, 4)
        if lines:
            click.echo(f"Next: workbench inspect {as_word(run_dir)} {lines[1].split()[0]}")
        return
    from workbench.inspect import PrefixChain
    from workbench.runs.drift import drift_frame, sentences

    # First, for a rollout of which everything was refused has no calls to show.
    for row in stored.refused.filter(rollout_id=rollout).to_dicts() if hasattr(stored, "refused") else ():
        said = f": {row['message']}" if row["message"] else ""
        click.echo(f"refused by the {row['by']}, {row['requests']:,} ×: {row['status']} {row['code']}{said}")
    click.echo(PrefixChain(stored, rollout).to_text())
    for sentence in sentences(drift_frame(stored, rollout)):
        click.echo(sentence)


@click.command(epilog=RUN_HELP)
@RUN
def verify(run_dir: Path) -> None:
    """Recompute every digest, row and step of a stored run.

    What needs the model is left out, and said to be. Exit 1 when something does not hold, or when there is nothing to
    verify yet.
    """
    from workbench.campaign.verify import verify_run

    result = verify_run(run_dir)
    click.echo(result)
    sys.exit(0 if result.ok and not result.empty else 1)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
def conformance(paths: tuple[Path, ...]) -> None:
    """Run conformance corpora: JSONL files, or directories of them.

    Exit 1 when a case fails.
    """
    from workbench.campaign import conformance as corpora

    sys.exit(corpora.main(list(paths)))
