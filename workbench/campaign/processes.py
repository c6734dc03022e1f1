"""Processes: all that a run started, found by the mark in their environment, and the certainty that none is left.

Invariant: every process that a run starts, directly or not, inherits its mark (`workbench.places.MARK`), so all of them
can be found and ended, the ones that have detached themselves too, and nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from workbench import part_logs
from workbench.places import MARK, ray_directories


def marked(mark: str) -> list[psutil.Process]:
    """Everything alive that carries the mark, except this process."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != "zombie":
                found.append(process)
    return found


def _environment(process: psutil.Process) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return []


def stop_signals() -> list[signal.Signals]:
    """What stops a run: Ctrl-C, SIGTERM, and a closed terminal, unless whoever started it said by `nohup` that this is
    no reason."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def signal_words(number: int) -> str:
    """A signal as a person knows it."""
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT else name


@contextlib.contextmanager
def sigterm_given_back() -> Iterator[None]:
    """What takes SIGTERM for itself inside has it no longer afterwards. `ray.init` does, in C where Python does not see
    it, and its handler writes a stack on the terminal of a run that is only stopped."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def end_marked(mark: str, grace_s: float = 5.0, logs_to: Path | None = None) -> int:
    """End everything that carries the mark: SIGTERM, `grace_s` to comply, SIGKILL. Returns how many there were.

    A Ray that the run left behind goes too, its parts' logs into the run directory `logs_to` where one is given.
    """
    found = marked(mark)
    # Its tokens are known to nobody else any more.
    secrets = part_logs.secrets_in(variable for process in found for variable in _environment(process))
    ended = {process.pid for process in found}
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + grace_s
    while (alive := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # A process may have started another between the look and the kill, so look again until none is found.
    while alive and time.monotonic() < deadline + 10:
        for process in alive:
            ended.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
        alive = marked(mark)
    for left in ray_directories(mark):
        if logs_to is not None:
            part_logs.keep(left, logs_to, secrets)
        shutil.rmtree(left, ignore_errors=True)
    return len(ended)
