"""Start-up: what `import workbench` and `workbench --help` take, as whole processes beside an empty one.

Processor seconds of the process, user's and system's; wall seconds beside them, which are the same on a quiet machine.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from benchmarks.measure import Figure, Growth, Sampler, alternate, median, wall

ROUNDS = 15
TARGETS = {"import workbench": 150.0, "workbench --help": 300.0, "an empty Python": None}


class Process:
    """Starts an interpreter with some arguments, waits for its end, and keeps the processor seconds it took."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, *arguments]
        self.processor: list[float] = []

    def sampler(self) -> Sampler:
        """Wall seconds of one such process."""

        def run() -> float:
            began = wall()
            started = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
            if started.returncode:
                raise RuntimeError(f"{self._command} ended with {started.returncode}")
            self.processor.append(used.ru_utime + used.ru_stime)
            return wall() - began

        return run


def measure() -> list[Figure | Growth]:
    """Three whole processes, in turn."""
    processes = {
        "import workbench": Process("-c", "import workbench"),
        "workbench --help": Process("-m", "workbench.campaign.cli", "--help"),
        "an empty Python": Process("-c", "pass"),
    }
    samples = alternate({name: process.sampler() for name, process in processes.items()}, ROUNDS)
    figures: list[Figure | Growth] = []
    for name, process in processes.items():
        spent = np.array(process.processor[1:])
        figures.append(median(f"{name}, whole process", spent, "ms", 1e3, at_most=TARGETS[name]))
        figures.append(median(f"{name}, whole process: wall", samples[name], "ms", 1e3))
    return figures
