"""Execution: one notebook in a kernel of its own, and what ends it.

    main thread: signals, progress line ─► kernel ◄─ papermill (in a thread)

In: a source notebook, a target, parameters. Out: the executed target, and how that ended (`Outcome`). Invariants: a
first signal is passed on to the kernel, which then has `STOP_GRACE_S` to end by itself, a further one ends that
patience; whatever ends an execution, no process of its kernel is left.
Not here: what the outcome means for a run (runner), what is written into the notebook afterwards (notebook_file).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from workbench.campaign.processes import signal_words, stop_signals
from workbench.campaign.report.kernel import KERNEL_NAME, OwnKernel
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.progress import ProgressLine

#: How long a campaign may take to close its actors and its store after an interrupt before it is killed.
STOP_GRACE_S = 45.0
_AUTOSAVE_S = 20


class Execution:
    """One execution, not begun. `stop_signal` is the first signal that came, `signals` how many came.

    `logs_to`: the directory of the run that it executes, for the logs of parts that it leaves behind.
    """

    def __init__(self, logs_to: Path | None = None) -> None:
        self.stop_signal: int | None = None
        self.signals = 0
        self._kernel = OwnKernel(logs_to)
        self._error: BaseException | None = None
        self._interrupted_at: float | None = None
        self._passed_on = False
        self._done = threading.Event()

    def run(self, source: Path, target: Path, parameters: Mapping[str, Any], progress: ProgressLine | None) -> None:
        """Execute `source` into `target` and wait for its end, however it ends; `outcome` says how."""
        thread = self._start(source, target, parameters)
        while not self._done.wait(0.5):
            self._watch(progress)
        thread.join()
        self._kernel.end()

    def run_while(self, source: Path, target: Path, parameters: Mapping[str, Any], patient: Callable[[], bool]) -> bool:
        """Execute `source` into `target` as long as `patient()` is true. Returns whether that was to its end."""
        thread = self._start(source, target, parameters)
        while not (ended := self._done.wait(0.2)) and patient():
            pass
        self._kernel.end(grace_s=0.5)
        thread.join()
        return ended

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        error = self._error
        if self.stop_signal is not None and error is not None:
            name = signal.Signals(self.stop_signal).name
            return Outcome("stopped", name, f"stopped by {signal_words(self.stop_signal)}")
        if error is None:
            return Outcome("done")
        name, text = getattr(error, "ename", type(error).__name__), str(getattr(error, "evalue", error))
        if type(error).__name__ == "DeadKernelError":
            text = "the kernel process is gone (killed from outside, or out of memory); what it had not written is lost"
        return Outcome("failed", name, text)

    @contextlib.contextmanager
    def signals_taken(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal become a stop; a second one ends the patience."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.signals += 1
            if self.stop_signal is not None and self._interrupted_at is not None:
                self._interrupted_at -= STOP_GRACE_S
            self.stop_signal = self.stop_signal or number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, stop) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, source: Path, target: Path, parameters: Mapping[str, Any]) -> threading.Thread:
        thread = threading.Thread(
            target=self._papermill, args=(source, target, parameters), name="papermill", daemon=True
        )
        thread.start()
        return thread

    def _papermill(self, source: Path, target: Path, parameters: Mapping[str, Any]) -> None:
        """Body of the thread: runs the notebook to its end, or to what ends it."""
        import papermill

        # A dead kernel is logged as an error, too; it is ours to say, once and in our words.
        logging.getLogger("papermill").setLevel(logging.CRITICAL)
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters=dict(parameters),
                kernel_name=KERNEL_NAME,
                language="python",
                progress_bar=False,
                autosave_cell_every=_AUTOSAVE_S,
                km=self._kernel.manager,
                store_widget_state=False,
                coalesce_streams=True,
            )
        except BaseException as error:  # whatever it is, the main thread turns it into an outcome
            self._error = error
        finally:
            self._done.set()

    def _watch(self, progress: ProgressLine | None) -> None:
        """One look: show progress; pass a stop on once, when the kernel hears it, and lose patience after the grace."""
        note, detail = None, ""
        if self.stop_signal is not None:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            if not self._passed_on and self._kernel.hears():
                self._passed_on = True
                if not self._kernel.interrupt():
                    self._interrupted_at = now - STOP_GRACE_S
            left_s = STOP_GRACE_S - (now - self._interrupted_at)
            note = f"stopping on {signal_words(self.stop_signal)}"
            detail = f"; killed in {max(0.0, left_s):.0f} s unless it ends before"
            if left_s <= 0:
                self._kernel.end(grace_s=0.5)
        if progress is not None:
            progress.tick(note, detail)
