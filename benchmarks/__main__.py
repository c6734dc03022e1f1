"""Run the benchmarks: `python -m benchmarks [question …] [--out DIRECTORY]`.

Each question is measured in a process of its own, one after another, into `<out>/<question>.json`; then the table and
the notebook are made of every question that has a file there. A question that fails says so, and the others
still run. Exit status 0, whatever was measured: a benchmark is no test; 1 where a question could not be measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.machine import describe
from workbench.nearest import did_you_mean

QUESTIONS = {
    "verifier": 120,
    "capture_core": 240,
    "parent_resolution": 240,
    "ledger_append": 120,
    "start_up": 60,
    "frames": 120,
    "agent_wire": 120,
    "data_plane": 240,
    "added_latency": 240,
    "throughput": 900,
    "campaign": 600,
}
"""Each question and how many seconds it may take."""

QUIET_PERCENT = 10.0
OUT = Path("reports/benchmarks")


def main() -> None:
    """Measure what is asked for, then report."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure, and write JSON, a table and a notebook."
    )
    options.add_argument("questions", nargs="*", metavar="question", help=f"of {', '.join(QUESTIONS)}; all by default")
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--here", action="store_true", help="measure in this process and report nothing")
    asked = options.parse_args()
    for unknown in [name for name in asked.questions if name not in QUESTIONS]:
        options.error(f"no question {unknown!r}{did_you_mean(unknown, QUESTIONS)} There are {', '.join(QUESTIONS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.here:
        for name in asked.questions:
            _measure(name, asked.out / f"{name}.json")
        return
    failed = [name for name in asked.questions or QUESTIONS if not _measured(name, asked.out)]
    from benchmarks.report import report

    report(asked.out)
    sys.exit(1 if failed else 0)


def _measure(name: str, path: Path) -> None:
    machine, began = describe(), time.time()
    results = [asdict(result) for result in importlib.import_module(f"benchmarks.{name}").measure()]
    found = {"question": name, "machine": machine, "took_s": round(time.time() - began, 1), "results": results}
    path.write_text(json.dumps(found, indent=1) + "\n")


def settle(within_s: float = 60.0) -> None:
    """Wait until the machine is quiet: what the question before has started may still be ending. Then begin anyway."""
    deadline = time.monotonic() + within_s
    while psutil.cpu_percent(interval=2.0) > QUIET_PERCENT and time.monotonic() < deadline:
        pass


def _measured(name: str, out: Path) -> bool:
    print(f"{name}: waits for a quiet machine,", end=" ", flush=True)
    waited = time.monotonic()
    settle()
    began = time.monotonic()
    print(f"{began - waited:.0f} s; measures,", end=" ", flush=True)
    command = [sys.executable, "-m", "benchmarks", name, "--here", "--out", str(out)]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=QUESTIONS[name], check=False, env=dict(os.environ)
        )
        why = "" if said.returncode == 0 else (said.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        why = f"not done within {QUESTIONS[name]} s"
    print(f"{time.monotonic() - began:.0f} s{f', not measured: {why}' if why else ''}", flush=True)
    if why:
        failure = {"question": name, "machine": describe(), "failed": why, "results": []}
        (out / f"{name}.json").write_text(json.dumps(failure, indent=1) + "\n")
    return not why


if __name__ == "__main__":
    main()
