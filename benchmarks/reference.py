"""Reference: the implementation whose contract ours keeps (NeMo Gym's token capture), in a process of its own.

    fetch() → a folder with its wheel unpacked, for the benchmark alone, without its dependencies
    with reference() as other: other.job("verify", calls=100, tokens=1000)   → a sampler: seconds of one run over there

It is never installed and never imported here: its Python bound is above ours, and only what `reference_side` imports of
it is needed (pydantic, orjson and omegaconf, which we have). Where it cannot be fetched, `ReferenceMissing` says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Sampler, alternate, median, ratio, unmeasured
from workbench.places import home

NAME, VERSION = "nemo-gym", "0.7.0"
_ROOT = Path(__file__).resolve().parents[1]


class ReferenceMissing(Exception):
    """The reference could not be fetched or imported; the message says why."""


def fetch() -> Path:
    """The folder that has the package in it; downloaded once. Raises ReferenceMissing."""
    folder = home() / "reference" / f"{NAME}-{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--python-version", "3.14",
            "--only-binary=:all:", "--dest", scratch, f"{NAME}=={VERSION}",
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if said.returncode or not wheels:
            raise ReferenceMissing(f"{NAME} {VERSION} could not be downloaded: {said.stderr.strip()[-300:]}")
        unpacked = Path(scratch) / "unpacked"
        zipfile.ZipFile(wheels[0]).extractall(unpacked)
        unpacked.rename(folder)
    return folder


class Reference:
    """A running reference process. Made by `reference()`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def job(self, name: str, **arguments: Any) -> Sampler:
        """Prepare a job of `reference_side` over there; the sampler runs it once and returns its seconds."""
        self._ask({"prepare": name, "arguments": arguments})
        return lambda: float(self._ask({"run": name})["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ReferenceMissing(f"the reference process ended at {question}; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ReferenceMissing(f"the reference could not do {question}: {answer['error']}")
        return answer


@contextlib.contextmanager
def reference() -> Iterator[Reference]:
    """Start the reference process and end it with the block. Raises ReferenceMissing."""
    paths = os.pathsep.join((str(_ROOT), str(fetch())))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.reference_side"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Reference(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def against_reference(
    name: str,
    ours: Sampler,
    job: str,
    arguments: dict[str, Any],
    *,
    rounds: int,
    at_least: float | None = None,
    note: str = "",
) -> list[Figure]:
    """How many times faster than the reference `ours` is, and both medians; or why that is not known."""
    try:
        with reference() as other:
            samples = alternate({"reference": other.job(job, **arguments), "ours": ours}, rounds)
    except ReferenceMissing as error:
        return [unmeasured(f"{name}: times faster than the reference", "×", str(error), at_least=at_least)]
    return [
        ratio(
            f"{name}: times faster than the reference",
            samples["reference"],
            samples["ours"],
            at_least=at_least,
            note=note,
        ),
        median(f"{name}: the reference", samples["reference"], "ms", 1e3),
        median(f"{name}: ours beside it", samples["ours"], "ms", 1e3),
    ]
