"""Runner: a recipe becomes an executed notebook, and the file says truly how that ended.

    recipe ─► parameters checked ─► papermill (own kernel, in a thread) ─► campaign.ipynb ─► .html, summary.json
                                        ▲ main thread: signals, progress line

Invariants: nothing heavy starts before names and values have been checked; whatever ends the run (a cell's error, a
dead kernel, Ctrl-C, SIGTERM), there is a notebook with its true status and a banner, a closed run store, an exit code
that is 0 only for `done` with something trained, and no process of the run left.
Not here: the campaign itself (controller), what the notebook shows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from nbformat import NotebookNode

from workbench import errors, part_logs
from workbench.actors import root_cause
from workbench.campaign.machines.environment_record import store_environment
from workbench.campaign.report.execution import Execution
from workbench.campaign.report.html_export import export_html
from workbench.campaign.report.notebook_file import (
    MAX_BYTES,
    Outcome,
    check_parameters,
    in_a_word,
    read_executed,
    set_outcome,
)
from workbench.campaign.report.progress import ProgressLine
from workbench.campaign.report.summary import Summary, summarise
from workbench.campaign.run_place import alone_in, new_run_dir
from workbench.campaign.terminal import tell
from workbench.errors import RecipeError, RunStoreError, SetupError
from workbench.places import as_word, refuse_shipped, shipped
from workbench.recipe_schema import Recipe
from workbench.runs.condition import ENDED, read_status
from workbench.runs.frames import scan_lines
from workbench.runs.gathered import gather
from workbench.runs.vocabulary import load_vocabulary, vocabulary_file
from workbench.runs.writer import RunWriter, atomic_file, recipe_digest, refuse_taken, store_recipe

# For what a report shows of the records of a run that did not come to its end; whoever stops one has less time, as a
# scheduler before a walltime.
_RECORDS_S = {"failed": 300.0, "stopped": 60.0}
_DRAFT = ".report-"
"""What a folder in a run's is called in which a page is being made."""


@dataclass(frozen=True)
class NotebookResult:
    """What is left of an execution. `exit_code` is 0 only when `outcome.status` is done and something was trained."""

    notebook: Path
    html: Path
    outcome: Outcome
    exit_code: int
    summary: Summary | None
    shown: bool = True
    """False where a run has records and its notebook ends before the cells that show them."""
    logs: Path | None = None
    """What the parts of a run that failed wrote, where it was kept."""


def run_recipe(recipe_name: str, overrides: Sequence[str] = (), run_name: str | None = None) -> int:
    """Run a campaign in a new directory under the recipe's `reports.dir`, print its summary, return the exit code.

    Raises RecipeError or SetupError, and has then started nothing.
    """
    from workbench.config import load_recipe
    from workbench.models import resolve

    recipe = load_recipe(recipe_name, list(overrides))
    resolve(recipe.model.path)
    name = recipe.name if run_name is None else run_name
    run_dir = new_run_dir(recipe.reports.dir, name, named=run_name is not None, claim=True)
    return conclude(run_notebook(recipe, run_dir, recipe_name=recipe_name, overrides=overrides))


def resume_run(recipe: Recipe, run_dir: Path) -> int:
    """Go on with the stopped run in `run_dir` (see `resume.resumable`); its notebook then shows the whole run.

    Prints its summary and returns the exit code.
    """
    _refuse_read_only(run_dir, "a run is gone on with in its own directory", "resume")
    stored = run_dir / "recipe.yaml"
    given = {"recipe": str(stored.resolve()), "overrides": [], "run_dir": str(run_dir.resolve()), "resume": True}
    with alone_in(run_dir):
        values = recipe.model_dump(mode="json")
        with RunWriter(run_dir) as writer:  # first, so that no kill leaves a recipe that the events do not know
            writer.event("recipe", recipe_digest=recipe_digest(values))
        store_recipe(run_dir, values)
        return conclude(_execute_live(run_dir, given))


def conclude(result: NotebookResult) -> int:
    """Print the summary, and on stderr what ended the run where something did; returns the exit code."""
    if result.summary is not None:
        tell(result.summary.text(), sys.stdout)
    if result.exit_code:
        what = result.outcome.told or ""
        if result.outcome.status == "done":
            how = "trained nothing"
        elif result.outcome.status == "stopped":
            how = f"was {what}"  # … stopped by Ctrl-C (SIGINT)
        else:
            # Of an exception in another process the notebook has the whole traceback; a line has what it was about.
            how = f"failed: {' '.join(root_cause(what).split()).rstrip('.')}"
        run_dir = result.notebook.parent
        show = "" if result.shown else f"; to show its records: workbench report {as_word(run_dir)}"
        logs = f"; what its parts wrote: {result.logs}" if result.logs else ""
        further = _further(result.outcome, run_dir)
        tell(f"workbench: the run {how}; see {result.notebook}{logs}{show}{further}", sys.stderr)
    return result.exit_code


def _further(outcome: Outcome, run_dir: Path) -> str:
    """How to go on after what ended a run; nothing where there is nothing to go on with."""
    begun = (run_dir / "steps.jsonl").exists()
    sampled = any(event.get("kind") == "group_started" for event in scan_lines(run_dir / "events.jsonl").rows)
    # A run keeps its recipe, so going on would end as this did where the recipe is at fault.
    recipe = outcome.error_name == RecipeError.__name__
    if recipe or (outcome.error_name == SetupError.__name__ and not sampled):
        return "" if sampled else "; mend the recipe and run again"
    return f"; to go on with it: workbench resume {as_word(run_dir)}" if begun and outcome.status != "done" else ""


def _refuse_read_only(run_dir: Path, why: str, command: str) -> None:
    if not os.access(run_dir, os.W_OK):
        raise SetupError(f"{run_dir} cannot be written, and {why}. Next: copy the run, {command} the copy.")


def report(run_dir: Path) -> Path:
    """Execute the campaign notebook again over a stored run, from its records alone; returns the notebook.

    Raises RunStoreError when there is no run or the notebook fails on it, SetupError where it cannot be written.
    """
    from workbench import runs

    runs.open(run_dir)
    copied = f"cp -r {as_word(run_dir)} recorded && workbench report recorded"
    refuse_shipped(run_dir, f"make the report of a copy: {copied}")
    _refuse_read_only(run_dir, "its report lies in it", "report")
    earlier = (run_dir / "campaign.ipynb").exists()
    with alone_in(run_dir):
        for draft in run_dir.glob(f"{_DRAFT}*"):  # of one that was killed
            shutil.rmtree(draft, ignore_errors=True)
        source = shipped("notebooks") / "10_campaign.ipynb"
        result = execute_over(source, run_dir / "campaign.ipynb", {"run_dir": str(run_dir.resolve())})
    if result.outcome.status == "stopped":
        kept = "; the one before it is still there" if earlier else ""
        stopped = RunStoreError(f"{run_dir}: the report was {result.outcome.error}{kept}")
        stopped.exit_code = result.exit_code
        raise stopped
    if result.exit_code:
        raise RunStoreError(f"{run_dir}: the report failed, {result.outcome.error_name}: {result.outcome.error}")
    return result.notebook


def run_notebook(
    recipe: Recipe,
    run_dir: Path,
    *,
    recipe_name: str | None = None,
    overrides: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    notebook: Path | None = None,
) -> NotebookResult:
    """Execute the campaign notebook for `recipe` into `run_dir/campaign.ipynb` and `.html`.

    The resolved recipe is stored as `run_dir/recipe.yaml`, and that file is what the notebook runs unless
    `recipe_name` (then with `overrides`) names the one it came from. `parameters` are further ones of the notebook.
    Raises RecipeError (unknown parameter) or SetupError (a run is already there) before anything starts.
    """
    refuse_taken(run_dir)
    given = {
        "recipe": recipe_name or str((run_dir / "recipe.yaml").resolve()),
        "overrides": list(overrides) if recipe_name else [],
        "run_dir": str(run_dir.resolve()),
        **(parameters or {}),
    }
    check_parameters(notebook or shipped("notebooks") / "10_campaign.ipynb", given)
    run_dir.mkdir(parents=True, exist_ok=True)
    with alone_in(run_dir):
        store_recipe(run_dir, recipe.model_dump(mode="json"))
        return _execute_live(run_dir, given, notebook)


def execute_over(source: Path, target: Path, parameters: dict[str, Any]) -> NotebookResult:
    """Execute a notebook that only reads records, into `target` and its page beside it; what was there before stands
    until both are whole, and where the execution is stopped."""
    run_dir = target.parent
    check_parameters(source, parameters)
    run_dir.mkdir(parents=True, exist_ok=True)
    began_at = time.time()
    execution = Execution()
    with execution.signals_taken(), tempfile.TemporaryDirectory(prefix=_DRAFT, dir=run_dir) as folder:
        draft = Path(folder) / target.name
        outcome = _run_into(draft, execution, source, parameters)
        of_run = Outcome.of_run(run_dir) if (run_dir / "status.json").exists() else None
        executed = set_outcome(draft, outcome, of_run=of_run, stands_at=target)
        export_html(executed, draft.with_suffix(".html"), title=_title(run_dir, in_a_word(outcome, of_run)))
        if outcome.status != "stopped":
            for page in (draft.with_suffix(".html"), draft):
                page.replace(run_dir / page.name)
            _tell_if_large(target)
    code = _exit_code(outcome, execution.stop_signal)
    return NotebookResult(
        target, target.with_suffix(".html"), outcome, code, None, True, part_logs.kept(run_dir, began_at)
    )


def _execute_live(run_dir: Path, parameters: dict[str, Any], notebook: Path | None = None) -> NotebookResult:
    """Execute the notebook that is the campaign: its run is closed, summed up and shown however it ends."""
    source, target = notebook or shipped("notebooks") / "10_campaign.ipynb", run_dir / "campaign.ipynb"
    check_parameters(source, parameters)
    run_dir.mkdir(parents=True, exist_ok=True)
    # Until this ends there is none: what is there tells of the time before the run was gone on with.
    (run_dir / "summary.json").unlink(missing_ok=True)
    _drop_kept_vocabulary(run_dir)
    store_environment(run_dir)
    began, began_at = time.monotonic(), time.time()
    execution = Execution(run_dir)
    progress = ProgressLine(run_dir, sys.stderr)
    tell(f"Run {run_dir} (Ctrl-C stops it; workbench resume goes on)", sys.stderr)
    shown = True
    with execution.signals_taken():
        # All of it inside: a second Ctrl-C is for the campaign, not for the file that says how it ended.
        outcome = _run_into(target, execution, source, parameters, progress)
        done, of_run = outcome.status == "done", None
        if not done:
            _close_store(run_dir, outcome)
        elif (run_dir / "status.json").exists():
            of_run = Outcome.of_run(run_dir)
        _write_pages(run_dir, target, set_outcome(target, outcome, of_run=of_run), in_a_word(outcome, of_run))
        seconds = time.monotonic() - began
        _keep_vocabulary(run_dir)
        gather(run_dir)
        summary = _write_summary(run_dir, target, outcome, seconds)
        if not done and notebook is None and scan_lines(run_dir / "groups.jsonl").rows:
            shown = _show_records(execution, outcome, source, run_dir, target)
        _tell_if_large(target)
    code = _exit_code(outcome, execution.stop_signal) or int(summary is not None and summary.nothing_trained)
    html = target.with_suffix(".html")
    return NotebookResult(target, html, outcome, code, summary, shown, part_logs.kept(run_dir, began_at))


def _run_into(
    target: Path, execution: Execution, source: Path, parameters: dict[str, Any], progress: ProgressLine | None = None
) -> Outcome:
    execution.run(source, target, parameters, progress)
    if progress is not None:
        progress.close()
    if not target.exists():
        shutil.copyfile(source, target)  # it ended before the first cell; the notebook still says so
    return execution.outcome


def _tell_if_large(target: Path) -> None:
    if target.stat().st_size > MAX_BYTES:
        tell(f"workbench: {target} has {target.stat().st_size:,} bytes, more than {MAX_BYTES:,}", sys.stderr)


def _write_pages(run_dir: Path, target: Path, executed: NotebookNode, state: str) -> None:
    export_html(executed, target.with_suffix(".html"), title=_title(run_dir, state))


def _title(run_dir: Path, state: str) -> str:
    return f"{run_dir.name}: {state}"


def _show_records(execution: Execution, outcome: Outcome, source: Path, run_dir: Path, target: Path) -> bool:
    """Put what a report shows of the run's records in place of the cells of `target` that were not run.

    Returns whether that is there. A signal ends it, because whoever stops a run may be in a hurry; what became of the
    run, its `outcome`, stays.
    """
    signals, until = execution.signals, time.monotonic() + _RECORDS_S[outcome.status]
    key = "another Ctrl-C" if signals else "Ctrl-C"
    tell(f"workbench: what was recorded is being put into its notebook ({key} leaves that out)", sys.stderr)
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=run_dir) as folder:
        over = Path(folder) / target.name
        again = Execution()
        ended = again.run_while(
            source,
            over,
            {"run_dir": str(run_dir.resolve())},
            lambda: execution.signals == signals and time.monotonic() < until,
        )
        whole = ended and again.outcome.status == "done"
        rest = read_executed(over) if whole else None
    if ended and not whole:
        tell(f"workbench: what was recorded could not be shown: {again.outcome.told}", sys.stderr)
    next_step = "" if rest is not None else f"Next: workbench report {as_word(run_dir)}"
    executed = set_outcome(target, outcome, rest=rest, further=next_step)
    _write_pages(run_dir, target, executed, outcome.status)
    return rest is not None


def _exit_code(outcome: Outcome, stop_signal: int | None) -> int:
    if outcome.status == "done":
        return 0
    if outcome.status == "stopped" and stop_signal is not None:
        return 128 + stop_signal
    known = getattr(errors, outcome.error_name or "", None)
    return int(getattr(known, "exit_code", 1)) or 1


def _close_store(run_dir: Path, outcome: Outcome) -> None:
    """Give the run store its last status where the kernel could not: it died, or never came that far."""
    status = read_status(run_dir) or {"run": run_dir.name}
    error = outcome.told
    if status.get("status") in ENDED:
        # The kernel saw an interrupt, whatever the signal was that the runner passed on.
        if status["status"] == outcome.status == "stopped" and status.get("error") != error:
            with contextlib.suppress(RunStoreError), RunWriter(run_dir) as writer:
                writer.status({**status, "error": error})
        return
    with contextlib.suppress(RunStoreError), RunWriter(run_dir) as writer:
        writer.event("ended_by_runner", status=outcome.status, error=error)
        writer.status({**status, "status": outcome.status, "phase": "ended by the runner", "error": error})


def _keep_vocabulary(run_dir: Path) -> None:
    """Store the bytes behind the ids that occur, so that the run stays readable when its weights are gone."""
    from workbench import runs

    try:
        run = runs.open(run_dir)
        used = run.token_ids()
        if used:
            small = load_vocabulary(vocabulary_file(run_dir, whole=True)).only(used)
            with atomic_file(run_dir / "vocabulary.json") as handle:
                handle.write(small.dump())
    except RunStoreError:
        return  # nothing was published or stored; ids are shown then


def _drop_kept_vocabulary(run_dir: Path) -> None:
    """Where a tokenizer was published, let it be read from there: what was kept has no ids but those that occurred."""
    if any(run_dir.glob("weights/*/tokenizer.json")):
        (run_dir / "vocabulary.json").unlink(missing_ok=True)


def _write_summary(run_dir: Path, notebook: Path, outcome: Outcome, seconds: float) -> Summary | None:
    try:
        summary = summarise(run_dir, notebook=notebook, outcome=outcome, seconds=seconds)
    except RunStoreError:
        return None
    with atomic_file(run_dir / "summary.json") as handle:
        handle.write(orjson.dumps(summary.as_dict(), option=orjson.OPT_INDENT_2) + os.linesep.encode())
    return summary
