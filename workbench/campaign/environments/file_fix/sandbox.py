"""Sandbox: run a file's tests in a process of its own that can do nothing else.

    source, tests ─► fresh folder ─► python jail.py (limits, Landlock, seccomp) ─► results by a pipe of their own

What holds it: wall time (killed), CPU time, address space, output and file size, open files; a new folder, gone
afterwards; an empty environment, so no token of the campaign is in it; and in the kernel (see `jail`) no other process,
no network, no file outside the folder but Python's own library. Invariant: `run_tests` always returns within the time
limit and a few seconds, and leaves no process.
Limits: the code under test shares its process with what runs the tests, so it could forge a result if it went looking
for how; it may read Python's library, and may fill its folder with many small files until its time is over. On a kernel
without Landlock (5.13) or seccomp, `weaknesses` says what is not stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from workbench.errors import DeadlineExceeded

JAIL = Path(__file__).with_name("jail.py")
PROBE_TIMEOUT_S = 30.0
MAX_OUTPUT = 16_384
MAX_REPORT = 65_536
SHOWN = 700
"""Characters of output that the agent sees: the end, where the assertion is."""


@dataclass(frozen=True)
class Limits:
    """Of one run."""

    timeout_s: float = 5.0
    memory_mib: int = 256
    output_bytes: int = MAX_OUTPUT
    file_bytes: int = 1 << 20


@dataclass(frozen=True)
class TestRun:
    """`results`: test name to passed. `ended`: `tests` ran to their end, or what stopped them: `time`, `output`,
    `signal N`, `exit N`. `output`: what was printed, cut at the limit."""

    __test__ = False  # pytest collects by name

    results: dict[str, bool] = field(default_factory=dict)
    ended: str = "tests"
    output: str = ""

    @property
    def passed(self) -> bool:
        """Every test passed, and nothing stopped them."""
        return self.ended == "tests" and bool(self.results) and all(self.results.values())

    @property
    def text(self) -> str:
        """What the agent is told."""
        failing = [name for name, passed in self.results.items() if not passed]
        head = (
            f"{len(self.results) - len(failing)} of {len(self.results)} tests pass" if self.results else "no test ran"
        )
        if self.ended != "tests":
            head += f"; stopped: {self.ended}"
        if self.passed:
            return head
        return "\n".join(part for part in (head, self.output.strip()[-SHOWN:]) if part)


def run_tests(file: str, source: str, test_file: str, tests: str, limits: Limits) -> TestRun:
    """Write both files into a new folder and run the tests there. Blocks, at most the time limit and a few seconds."""
    with tempfile.TemporaryDirectory(prefix="file-fix-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / file).write_text(source, encoding="utf-8")
        (Path(folder) / test_file).write_text(tests, encoding="utf-8")
        return _run(Path(folder), test_file, limits)


@functools.cache
def weaknesses() -> list[str]:
    """What this machine's kernel cannot stop: `other processes and the network`, `reading and writing other files`.

    Raises DeadlineExceeded where it did not come out in time, which the next call tries again.
    """
    command = [sys.executable, "-I", "-S", str(JAIL), "--probe"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"the sandbox's probe did not end within {PROBE_TIMEOUT_S:g} s") from None
    held = probe.stdout.split()
    wanted = {"seccomp": "other processes and the network", "landlock": "reading and writing other files"}
    return [what for name, what in wanted.items() if name not in held]


def _run(folder: Path, test_file: str, limits: Limits) -> TestRun:
    report_read, report_write = os.pipe()
    nonce = secrets.token_hex(16)
    told = {
        "folder": str(folder),
        "tests": test_file,
        "report": report_write,
        "nonce": nonce,
        "cpu_s": int(limits.timeout_s) + 1,
        "memory_bytes": limits.memory_mib << 20,
        "file_bytes": limits.file_bytes,
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(JAIL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONHASHSEED": "0"},
            pass_fds=(report_write,),
            start_new_session=True,
        )
    finally:
        os.close(report_write)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        output, report, stopped = _read(process, report_read, limits)
    finally:
        _end(process)
        os.close(report_read)
    # The folder's name is new each time, and the agent's model reads what is printed.
    output = output.replace(f"{folder}/".encode(), b"")
    results = _results(report, nonce)
    if stopped is None and results is None:
        code = process.returncode
        stopped = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return TestRun(results or {}, stopped or "tests", output.decode("utf-8", "replace"))


def _read(process: subprocess.Popen[bytes], report: int, limits: Limits) -> tuple[bytes, bytes, str | None]:
    """(output, report, what stopped it) until both pipes are closed, the time is over or there is too much."""
    assert process.stdout is not None
    came: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), report: bytearray()}
    most = {process.stdout.fileno(): limits.output_bytes, report: MAX_REPORT}
    deadline = time.monotonic() + limits.timeout_s
    stopped = None
    with selectors.DefaultSelector() as selector:
        for descriptor in came:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and stopped is None:
            left = deadline - time.monotonic()
            if left <= 0:
                stopped = "time"
                break
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 65_536)
                came[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                elif len(came[key.fd]) > most[key.fd]:
                    stopped = "output"
    return bytes(came[process.stdout.fileno()][: limits.output_bytes]), bytes(came[report]), stopped


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and whatever is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _results(report: bytes, nonce: str) -> dict[str, bool] | None:
    """What the jail reported, once and with its word; None where it did not come to that."""
    lines = report.splitlines()
    try:
        said = json.loads(lines[0]) if len(lines) == 1 else {}
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("nonce") != nonce or not isinstance(said.get("results"), dict):
        return None
    return {str(name): passed is True for name, passed in said["results"].items()}
