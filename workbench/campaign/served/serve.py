"""Serve: engine and gateway for an agent of one's own, without training.

    recipe ─► Fleet without a trainer ─► base URL ─► a line a call ─► receipts (desk) ─► Ctrl-C: everything stopped

Invariants: nothing heavy starts before the recipe was checked; whatever ends it, no process of it is left, the run
store is closed and says truly how it ended; being stopped while it serves is its normal end and exit code 0.
Not here: starting the parts (fleet), custody (gateway), closing a rollout (desk).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import dataplane, part_logs, runs
from workbench.actors import root_cause
from workbench.campaign.fleet import Fleet
from workbench.campaign.processes import end_marked, signal_words, stop_signals
from workbench.campaign.served import desk_socket
from workbench.campaign.served.call_lines import CallLines, Facts
from workbench.campaign.served.desk import ReceiptDesk
from workbench.campaign.served.refusal_lines import RefusalLines
from workbench.campaign.terminal import tell
from workbench.config import Recipe
from workbench.errors import RunStoreError, WorkbenchError, first_cause
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup
from workbench.places import MARK, as_word
from workbench.runs.vocabulary import load_vocabulary
from workbench.runs.writer import RunWriter, atomic_file, recipe_digest, store_recipe

CHECK_EVERY_S = 2.0
CHECK_TIMEOUT_S = 30.0
_SHOWN = 5
_STOPPING = "stopping"  # the first thing that a fleet says when it ends


def serve(recipe: Recipe, run_dir: Path) -> int:
    """Serve `recipe` into the new run directory `run_dir` until SIGINT, SIGTERM or SIGHUP; returns the exit code, 0.

    A signal that comes before it serves ends this process with 128 + its number. Raises SetupError before anything
    heavy starts, DeadlineExceeded or ComponentDied naming the part at fault later.
    """
    mark = os.environ[MARK] = uuid.uuid4().hex
    runner, began_at = asyncio.Runner(), time.time()
    try:
        code = runner.run(_until_stopped(recipe, run_dir))
    except BaseException:
        end_marked(mark, logs_to=run_dir)
        if logs := part_logs.kept(run_dir, began_at):
            tell(f"what its parts wrote: {logs}", sys.stderr)
        raise
    end_marked(mark)
    if code:
        # A start that was cut short has a thread in it (`ray.init`, a data plane's start) that can be neither cancelled
        # nor waited for, and Python would wait for it. The store is closed, and nothing of the run is left.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    runner.close()
    return code


async def _until_stopped(recipe: Recipe, run_dir: Path) -> int:
    with RunWriter(run_dir) as writer:
        values = recipe.model_dump(mode="json")
        store_recipe(run_dir, values)
        writer.event("set_up", recipe_digest=recipe_digest(values))  # it is `serving` minutes later
        writer.status(status="running", phase="set-up", run=run_dir.name, command="serve")
        session = _Session(recipe, run_dir, writer)
        task = asyncio.ensure_future(session.run())
        try:
            with _signals_stop(session, task):
                await task
        except BaseException as error:
            if session.stopped_by is not None:
                if not isinstance(error, asyncio.CancelledError):
                    writer.event("failed_while_stopping", error=type(error).__name__, message=str(error))
                return _stopped(session.stopped_by, session, writer)
            writer.event("failed", error=type(error).__name__, message=str(error))
            writer.status(status="failed", phase="failed", error=root_cause(f"{type(error).__name__}: {error}"))
            raise
    raise AssertionError("a session ends by a signal or by an error")


@contextlib.contextmanager
def _signals_stop(session: _Session, task: asyncio.Task[None]) -> Iterator[None]:
    """Inside, the first signal ends the session in `task`. Stopping has deadlines of its own, so one that comes while
    it ends, whatever ended it, hurries nothing."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if session.stop(number):
            task.cancel()
            tell(f"stopping on {signal_words(number)}", sys.stderr)

    signals = stop_signals()
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _stopped(number: int, session: _Session, writer: RunWriter) -> int:
    """Close the store of a session that a signal ended, and say what it has; returns the exit code."""
    served = session.served
    left_open = served.desk.open_rollouts() if served else []
    calls = served.lines.calls if served else 0
    writer.event("stopped", reason=signal.Signals(number).name, calls=calls, open_rollouts=left_open)
    if served is None:
        tell(f"{session.stopped_while()}: nothing was served, and no call captured", sys.stderr)
        return 128 + number
    tell(last_words(session.run_dir, served.lines, len(served.desk.finalised), left_open), sys.stderr)
    return 0


def last_words(run_dir: Path, lines: CallLines, receipts: int, left_open: Sequence[str]) -> str:
    """What a served run leaves, for whoever stopped it."""
    if not lines.calls:
        return f"stopped after it served; no call came. The run: workbench inspect {as_word(run_dir)}"
    said = [
        f"stopped after it served {_count(len(lines.rollouts), 'rollout')} with {_count(lines.calls, 'call')}: "
        f"{lines.captured:,} captured, {_count(receipts, 'rollout')} with a receipt",
        f"  look      workbench inspect {as_word(run_dir)}",
    ]
    if left_open:
        names = ", ".join(left_open[:_SHOWN]) + (", …" if len(left_open) > _SHOWN else "")
        said.append(f"  without a receipt, and so without tokens now: {names}")
    return "\n".join(said)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class _Served:
    """What there is from the moment that a session serves."""

    desk: ReceiptDesk
    lines: CallLines


class _Session:
    """One served run, from its first part to its last."""

    def __init__(self, recipe: Recipe, run_dir: Path, writer: RunWriter) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.writer = writer
        self.phase = "being set up"
        self.served: _Served | None = None
        self.stopped_by: int | None = None
        """The signal that ended it; None as long as none did, and where an error did."""
        self._ending = False

    def stop(self, number: int) -> bool:
        """Give the run its last status before anything is stopped, and let nothing else replace it: where Ray's
        processes got the signal too, they take this process along when they end. False where it ends already."""
        if self.stopped_by is not None or self._ending:
            return False
        self.stopped_by = number
        if self.served:
            self.writer.status(status="done", phase="stopped")
        else:
            self.writer.status(status="stopped", phase="stopped", error=self.stopped_while())
        return True

    def stopped_while(self) -> str:
        """What a signal did to a session that did not serve yet."""
        assert self.stopped_by is not None
        return f"stopped by {signal_words(self.stopped_by)} while it was still {self.phase}"

    async def run(self) -> None:
        try:
            await self._serve()
        finally:
            # Calls that were under way ended with the gateway, behind the last look at a live ledger.
            if self.served:
                self.served.lines.last_look()

    async def _serve(self) -> None:
        async with Fleet(self.recipe, self.run_dir, on_phase=self._phase, training=False) as fleet:
            desk = ReceiptDesk(
                self.run_dir,
                fleet.control,
                self._finalize_with(fleet),
                self.writer,
                named_only=self.recipe.rollouts.require_terminal_witness,
            )
            lines = CallLines(self.run_dir / "ledger", self._facts_from(fleet), _say)
            refusals = RefusalLines(self.run_dir, _say)
            async with desk_socket.listening(desk.receipt) as path:
                self.writer.event("serving", url=fleet.gateway_url, timings_s=fleet.timings_s, probe=fleet.probe)
                self.writer.status(phase="serving", url=fleet.gateway_url, desk=str(path))
                _say(greeting(self.recipe, self.run_dir, fleet.gateway_url, fleet.probe))
                self.served = _Served(desk, lines)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(lines.follow())
                        tasks.create_task(refusals.follow())
                        tasks.create_task(self._watch(fleet))
                except BaseExceptionGroup as group:
                    raise first_cause(group) from None
                finally:
                    with contextlib.suppress(Exception):
                        refusals.look()
                        await lines.look()

    def _phase(self, phase: str) -> None:
        if self.stopped_by is None:
            self.phase = phase
            self._ending |= phase == _STOPPING
            self.writer.status_soon(phase=phase)
        if self.stopped_by is None or phase != _STOPPING:  # of a signal it was said on what
            tell(phase, sys.stderr)

    async def _watch(self, fleet: Fleet) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            fleet.gateway.check()
            await fleet.policy.check_alive(CHECK_TIMEOUT_S)

    def _facts_from(self, fleet: Fleet) -> Callable[[Sequence[str]], Any]:
        async def facts(call_ids: Sequence[str]) -> Facts:
            return await fleet.policy.facts(call_ids, CHECK_TIMEOUT_S)

        return facts

    def _finalize_with(self, fleet: Fleet) -> Callable[[FinalizationRequest], Any]:
        async def finalize(request: FinalizationRequest) -> FinalizedGroup:
            group = await fleet.finalizers.finalize(request)
            # Nobody trains here, so the published rows would only fill the data plane; they are on disk.
            try:
                await dataplane.clear(dataplane.TRAIN, group.train_keys, deadline_s=self.recipe.finalizer.timeout_s)
            except WorkbenchError as error:
                self.writer.event("train_rows_left", group_id=group.group_id, message=str(error))
            await asyncio.to_thread(_keep_vocabulary, self.run_dir, fleet.model_path)
            return group

        return finalize


def greeting(recipe: Recipe, run_dir: Path, url: str, probe: Mapping[str, Any]) -> str:
    """What an agent and its author need to know; `probe` is what the start-up probe found."""
    blind = "  tools      left out by the chat template: the model sees no tool of an agent"
    return "\n".join(
        [
            f'Serving {recipe.model.path} as model="policy", run {run_dir}',
            f"  base URL   {url}/ng-rollout/<rollout>/v1",
            "             <rollout>: a new name a conversation, of letters, digits and . _ -",
            "  client     of a conversation called my-1, one of",
            f'  OpenAI(base_url="{url}/ng-rollout/my-1/v1", api_key="unused")',
            f'  Anthropic(base_url="{url}/ng-rollout/my-1", api_key="unused")',
            f"  receipt    workbench receipt {as_word(run_dir)} my-1 --reward 1",
            *([blind] if probe.get("renders_tools") is False else []),
            "Ctrl-C ends it. A line a call, and one for a request that is refused:",
            "rollout, call, mode, parent, prompt tokens added + sampled, end.",
        ]
    )


def _say(text: str) -> None:
    tell(text, sys.stdout)


def _keep_vocabulary(run_dir: Path, model_path: Path) -> None:
    """Store the bytes behind the ids that occur, so that the run's tokens can be read without the model."""
    try:
        small = load_vocabulary(model_path / "tokenizer.json").only(runs.open(run_dir).token_ids())
    except (RunStoreError, OSError):
        return  # ids are shown then
    with atomic_file(run_dir / "vocabulary.json") as handle:
        handle.write(small.dump())
