"""The sandbox of file_fix: whatever the code under test does, it ends in time, alone, and touches nothing else."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from workbench.campaign.environments.file_fix import FileFix
from workbench.campaign.environments.file_fix.sandbox import SHOWN, Limits, run_tests, weaknesses
from workbench.campaign.environments.file_fix.tasks import BUGS, bugs

LIMITS = Limits(timeout_s=20.0, memory_mib=200)
TESTS = "import code_under_test as c\n\n\ndef test_it():\n    assert c.f() == 1\n"


CALLS, FILES = "other processes and the network", "reading and writing other files"


def stops(what: str) -> pytest.MarkDecorator:
    """Skips a test where the kernel cannot stop `what`, one of the `weaknesses`; what it stops is tested anywhere."""
    needs = {CALLS: "seccomp filters (x86-64 or aarch64)", FILES: "Landlock (Linux 5.13 or newer, switched on)"}[what]
    return pytest.mark.skipif(what in weaknesses(), reason=f"this kernel cannot stop {what}: it lacks {needs}")


def run(source: str, limits: Limits = LIMITS):
    return run_tests("code_under_test.py", source, "it_test.py", TESTS, limits)


def body(*lines: str) -> str:
    return "def f():\n" + "".join(f"    {line}\n" for line in lines)


def refused(line: str) -> None:
    before = children()
    ended = run(body(*line.split("; "), "return 1"))
    assert ended.results == {"test_it": False}, ended
    assert any(word in ended.output for word in ("PermissionError", "not allowed")), ended.output
    assert children() <= before
    assert not Path("/tmp/escaped").exists()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_every_bug_makes_a_test_fail_and_its_right_text_makes_all_pass():
    found = {(bug.name, bug.wrong) for bug in bugs()}
    assert len(found) == sum(map(len, BUGS.values()))
    for bug in bugs():
        assert bug.good.count(bug.right) == 1, bug
        broken = run_tests(bug.file, bug.source, bug.test_file, bug.tests, LIMITS)
        assert broken.ended == "tests" and not broken.passed and any(broken.results.values()), (bug, broken)
        assert run_tests(bug.file, bug.good, bug.test_file, bug.tests, LIMITS).passed, bug


def test_a_probe_that_does_not_end_in_time_is_what_the_machine_lacks_until_it_is_tried_again(monkeypatch):
    found = weaknesses()
    weaknesses.cache_clear()
    with monkeypatch.context() as slow:
        slow.setattr("workbench.campaign.environments.file_fix.sandbox.PROBE_TIMEOUT_S", 0.0001)
        assert "probe did not end within" in FileFix().lacking()
    assert weaknesses() == found


def test_an_endless_loop_is_killed_at_its_time_and_leaves_no_process():
    before, began = children(), time.monotonic()
    ended = run("def f():\n    while True:\n        pass\n", Limits(timeout_s=1.0))
    assert (ended.ended, ended.passed) == ("time", False)
    assert time.monotonic() - began < 15
    assert children() <= before


def test_sleeping_costs_no_processor_and_is_killed_all_the_same():
    assert run(body("import time", "time.sleep(600)"), Limits(timeout_s=1.0)).ended == "time"


def test_a_memory_bomb_fails_at_its_limit():
    ended = run(body("held = []", "while True: held.append(bytearray(1 << 20))"))
    assert not ended.passed and "MemoryError" in ended.output


def test_a_flood_of_output_is_cut_and_killed():
    ended = run(body("while True: print('x' * 1000)"), Limits(timeout_s=20.0, output_bytes=5000))
    assert ended.ended == "output" and len(ended.output) <= 5000 and len(ended.text) < SHOWN + 100


def test_a_large_file_fails_at_its_limit():
    assert "File too large" in run(body("open('big', 'wb').write(b'x' * (3 << 20))")).output


@stops(CALLS)
@pytest.mark.parametrize(
    "line",
    [
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
        "import ctypes; exec('raise PermissionError' if ctypes.CDLL(None).fork() < 0 else 'pass')",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import os; os.chmod('/', 0o755)",
        "import os; os.symlink('/etc/hostname', 'link'); open('link').read()",
        "import os; os.mkdir('/tmp/escaped')",
        "import os; os.mkdir('deeper')",
        "import os; os.link('it_test.py', 'second')",
        "import os; os.truncate('it_test.py', 0)",
    ],
)
def test_no_process_no_signal_and_no_new_name(line):
    refused(line)


@stops(FILES)
@pytest.mark.parametrize(
    "line",
    [
        "open('/etc/hostname').read()",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; open('../escaped', 'w')",
        "import os; os.listdir('/home')",
    ],
)
def test_no_other_file(line):
    refused(line)


@stops(CALLS)
def test_no_network():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        ended = run(body("import socket", f"socket.create_connection({address!r}, 5)", "return 1"))
    assert "PermissionError" in ended.output and not ended.passed


def test_no_token_of_the_campaign_is_in_its_environment(monkeypatch):
    monkeypatch.setenv("WORKBENCH_CONTROL_TOKEN", "s3cret-of-the-campaign")
    ended = run(body("import os", "print(dict(os.environ))"))
    assert "HOME" in ended.output and "s3cret" not in ended.output


@stops(CALLS)
def test_no_tree_is_made_that_is_too_deep_to_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = run(body("import os", "while True:", "    os.mkdir('d')", "    os.chdir('d')"))
    assert ended.results == {"test_it": False}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("results", ["", ', "results": [1]', ', "results": ' + "[" * 30_000])
def test_a_report_that_is_none_is_an_exit_without_results(results):
    forged = (
        "import os, sys",
        "frame = sys._getframe()",
        "while 'told' not in frame.f_locals: frame = frame.f_back",
        "told = frame.f_locals['told']",
        f"os.write(told['report'], ('{{\"nonce\": \"' + told['nonce'] + '\"{results}}}').encode())",
        "os._exit(0)",
    )
    ended = run(body(*forged))
    assert (ended.ended, ended.results, ended.passed) == ("exit 0", {}, False)


def test_an_early_exit_passes_nothing():
    for source in ("import os\nos._exit(0)\n", "import sys\nsys.exit(0)\n", body("raise SystemExit"), "f = ("):
        assert not run(source).passed
    assert run("import os\nos._exit(0)\n").ended == "exit 0"


def test_threads_and_the_standard_library_work():
    lines = (
        "import threading, json, zoneinfo, decimal",
        "out = []",
        "t = threading.Thread(target=out.append, args=(1,))",
    )
    assert run(body(*lines, "t.start()", "t.join()", "return out[0]")).passed


def test_what_is_printed_does_not_name_the_folder():
    first, second = run(body("raise ValueError('no')")), run(body("raise ValueError('no')"))
    assert first.output == second.output and os.sep + "tmp" not in first.output


def test_what_is_printed_shows_the_tests_and_no_frame_of_what_runs_them():
    for source in (body("return 2"), "import nothing_of_that_name\n"):
        assert "it_test.py" in run(source).output and "jail" not in run(source).output
