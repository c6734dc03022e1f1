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
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from workbench import errors
from workbench.actors import root_cause
from workbench.campaign.environment_record import store_environment
from workbench.campaign.html_export import export_html
from workbench.campaign.kernel import KERNEL_NAME, OwnKernel
from workbench.campaign.notebook_file import MAX_BYTES, Outcome, check_parameters, set_outcome
from workbench.campaign.processes import signal_words, stop_signals
from workbench.campaign.progress import ProgressLine
from workbench.campaign.run_place import alone_in, new_run_dir
from workbench.campaign.summary import Summary, summarise
from workbench.campaign.terminal import tell
from workbench.errors import RecipeError, RunStoreError, SetupError
from workbench.places import as_word, refuse_shipped, shipped
from workbench.recipe_schema import Recipe
from workbench.runs.condition import ENDED, read_status
from workbench.runs.frames import scan_lines
from workbench.runs.gathered import gather
from workbench.runs.writer import RunWriter, atomic_file, refuse_taken, store_recipe

#: How long a campaign may take to close its actors and its store after an interrupt before it is killed.
STOP_GRACE_S = 45.0
_AUTOSAVE_S = 20


@dataclass(frozen=True)
class NotebookResult:
    """What is left of an execution. `exit_code` is 0 only when `outcome.status` is done and something was trained."""

    notebook: Path
    html: Path
    outcome: Outcome
    exit_code: int
    summary: Summary | None


@dataclass
class _Execution:
    """State shared by the thread that runs papermill and the one that watches."""

    kernel: OwnKernel
    error: BaseException | None = None
    stop_signal: int | None = None
    interrupted_at: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


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
        store_recipe(run_dir, recipe.model_dump(mode="json"))
        return conclude(_execute(run_dir, given, live=True))


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
        tell(f"workbench: the run {how}; see {result.notebook}{_further(result.outcome, run_dir)}", sys.stderr)
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
    with alone_in(run_dir):
        result = _execute(run_dir, {"run_dir": str(run_dir.resolve())}, live=False)
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
        return _execute(run_dir, given, live=True, notebook=notebook)


def execute_over(source: Path, target: Path, parameters: dict[str, Any]) -> NotebookResult:
    """Execute a notebook that only reads records, into `target` and its page beside it."""
    return _execute(target.parent, parameters, live=False, notebook=source, name=target.name)


def _execute(
    run_dir: Path,
    parameters: dict[str, Any],
    *,
    live: bool,
    notebook: Path | None = None,
    name: str = "campaign.ipynb",
) -> NotebookResult:
    source = notebook or shipped("notebooks") / "10_campaign.ipynb"
    check_parameters(source, parameters)
    run_dir.mkdir(parents=True, exist_ok=True)
    if live:
        # Until this ends there is none: the one that is there tells of the time before the run was gone on with.
        (run_dir / "summary.json").unlink(missing_ok=True)
        store_environment(run_dir)
    target = run_dir / name
    began = time.monotonic()
    execution = _Execution(OwnKernel())
    thread = threading.Thread(
        target=_papermill, args=(execution, source, target, parameters), name="papermill", daemon=True
    )
    progress = ProgressLine(run_dir, sys.stderr) if live else None
    if live:
        tell(f"Run {run_dir} (Ctrl-C stops it; workbench resume goes on)", sys.stderr)
    with _signals_to(execution):
        thread.start()
        while not execution.done.wait(0.5):
            _watch(execution, progress)
        thread.join()
        execution.kernel.end()
        # Still inside: a second Ctrl-C is for the campaign, not for the file that says how it ended.
        if progress is not None:
            progress.close()
        outcome = _outcome(execution)
        if not target.exists():
            shutil.copyfile(source, target)  # it ended before the first cell; the notebook still says so
        if live and outcome.status != "done":
            _close_store(run_dir, outcome)
        executed = set_outcome(target, outcome)
        html = target.with_suffix(".html")
        export_html(executed, html, title=f"{run_dir.name}: {outcome.status}")
        if target.stat().st_size > MAX_BYTES:
            tell(f"workbench: {target} has {target.stat().st_size:,} bytes, more than {MAX_BYTES:,}", sys.stderr)
        seconds = time.monotonic() - began
        if live:
            _keep_vocabulary(run_dir)
            gather(run_dir)
        summary = _write_summary(run_dir, target, outcome, seconds) if live else None
    code = _exit_code(outcome, execution.stop_signal) or int(summary is not None and summary.nothing_trained)
    return NotebookResult(target, html, outcome, code, summary)


def _papermill(execution: _Execution, source: Path, target: Path, parameters: dict[str, Any]) -> None:
    """Body of the thread: runs the notebook to its end, or to what ends it."""
    import papermill

    # A dead kernel is logged as an error, too; it is ours to say, once and in our words.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters=parameters,
            kernel_name=KERNEL_NAME,
            language="python",
            progress_bar=False,
            autosave_cell_every=_AUTOSAVE_S,
            km=execution.kernel.manager,
            store_widget_state=False,
            coalesce_streams=True,
        )
    except BaseException as error:  # whatever it is, the main thread turns it into an outcome
        execution.error = error
    finally:
        execution.done.set()


def _watch(execution: _Execution, progress: ProgressLine | None) -> None:
    """One look: show progress; pass a stop on to the kernel once, and lose patience after the grace."""
    note, detail = None, ""
    if execution.stop_signal is not None:
        now = time.monotonic()
        if execution.interrupted_at is None:
            execution.interrupted_at = now
            if not execution.kernel.interrupt():
                execution.interrupted_at = now - STOP_GRACE_S
        left_s = STOP_GRACE_S - (now - execution.interrupted_at)
        note = f"stopping on {signal_words(execution.stop_signal)}"
        detail = f"; killed in {max(0.0, left_s):.0f} s unless it ends before"
        if left_s <= 0:
            execution.kernel.end(grace_s=0.5)
    if progress is not None:
        progress.tick(note, detail)


@contextlib.contextmanager
def _signals_to(execution: _Execution) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal become a stop; a second one ends the patience."""

    def stop(number: int, frame: FrameType | None) -> None:
        if execution.stop_signal is not None and execution.interrupted_at is not None:
            execution.interrupted_at -= STOP_GRACE_S
        execution.stop_signal = execution.stop_signal or number

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(execution: _Execution) -> Outcome:
    error = execution.error
    if execution.stop_signal is not None and error is not None:
        name = signal.Signals(execution.stop_signal).name
        return Outcome("stopped", name, f"stopped by {signal_words(execution.stop_signal)}")
    if error is None:
        return Outcome("done")
    name, text = getattr(error, "ename", type(error).__name__), str(getattr(error, "evalue", error))
    if type(error).__name__ == "DeadKernelError":
        text = "the kernel process is gone (killed from outside, or out of memory); what it had not written is lost"
    return Outcome("failed", name, text)


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
            small = run.vocabulary().only(used)
            with atomic_file(run_dir / "vocabulary.json") as handle:
                handle.write(small.dump())
    except RunStoreError:
        return  # nothing was published or stored; ids are shown then


def _write_summary(run_dir: Path, notebook: Path, outcome: Outcome, seconds: float) -> Summary | None:
    try:
        summary = summarise(run_dir, notebook=notebook, outcome=outcome, seconds=seconds)
    except RunStoreError:
        return None
    with atomic_file(run_dir / "summary.json") as handle:
        handle.write(orjson.dumps(summary.as_dict(), option=orjson.OPT_INDENT_2) + os.linesep.encode())
    return summary
