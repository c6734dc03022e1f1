"""Start-up: what `import workbench` and `workbench --help` take, as whole processes beside an empty one."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Figure, Growth, Sampler, alternate, median, wall

ROUNDS = 15


def process(*arguments: str) -> Sampler:
    """Start an interpreter with these arguments and wait for its end."""
    command = [sys.executable, *arguments]

    def run() -> float:
        began = wall()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return wall() - began

    return run


def measure() -> list[Figure | Growth]:
    """Three whole processes, in turn."""
    samples = alternate(
        {
            "empty": process("-c", "pass"),
            "import": process("-c", "import workbench"),
            "help": process("-m", "workbench.campaign.cli", "--help"),
        },
        ROUNDS,
    )
    return [
        median("import workbench, whole process", samples["import"], "ms", 1e3, at_most=150.0),
        median("workbench --help, whole process", samples["help"], "ms", 1e3, at_most=300.0),
        median("an empty Python, whole process", samples["empty"], "ms", 1e3),
    ]
