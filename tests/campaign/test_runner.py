"""The runner: whatever ends a run, the notebook says so truly, the exit code is right, and nothing is left running.

Long because each way in which a run can end is played through a runner in a process of its own, or over stored records.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import orjson
import psutil
import pytest
from stored_run import make_run

from workbench import runs
from workbench.campaign.report import runner
from workbench.campaign.report.execution import Execution
from workbench.campaign.report.kernel import OwnKernel
from workbench.campaign.report.notebook_file import Outcome, check_parameters, parameter_names, set_outcome
from workbench.campaign.report.runner import report, resume_run, run_notebook
from workbench.campaign.report.sweep import INDEX, write_index
from workbench.campaign.run_place import new_run_dir
from workbench.config import load_recipe
from workbench.errors import RecipeError, RunStoreError, SetupError
from workbench.places import MARK, make_ray_directory, shipped
from workbench.runs.vocabulary import Vocabulary
from workbench.runs.writer import RunWriter

CASE = Path(__file__).with_name("runner_case.py")

START = """
import asyncio, os, pathlib, signal, subprocess, sys
here = pathlib.Path(run_dir)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(here / "pids").write_text(f"{os.getpid()} {child.pid}")
"""
WAIT = """
try:
    (here / "waiting").touch()
    await asyncio.sleep(600)
except asyncio.CancelledError:
    (here / "closed").touch()
    raise
"""
STUBBORN = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
(here / "waiting").touch()
import time
time.sleep(600)
"""


def notebook(path: Path, *cells: str, parameters: str = "run_dir = None") -> Path:
    parameters = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[parameters, *(nbformat.v4.new_code_cell(source) for source in cells)])
    nbformat.write(book, path)
    return path


class Case:
    """A runner in a process of its own, with the pids its kernel reported."""

    def __init__(self, run_dir: Path, *cells: str, grace_s: float = 30.0, terminal: int | None = None) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        path = notebook(run_dir.parent / f"{run_dir.name}.ipynb", *cells)
        self.process = subprocess.Popen(
            [sys.executable, str(CASE), str(run_dir), str(path), str(grace_s)],
            stdout=subprocess.PIPE if terminal is None else None,
            stderr=subprocess.PIPE if terminal is None else None,
            preexec_fn=None if terminal is None else lambda: os.login_tty(terminal),
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def until(self, name: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not (self.run_dir / name).exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.05)

    def end(self, timeout_s: float = 40.0) -> int:
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.run_dir / "pids").read_text().split()]

    @property
    def executed(self) -> nbformat.NotebookNode:
        return nbformat.read(self.run_dir / "campaign.ipynb", as_version=4)

    def statuses(self) -> list[str]:
        return [c.metadata["papermill"]["status"] for c in self.executed.cells if c.cell_type == "code"]


def assert_gone(pids: list[int]) -> None:
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert alive == []


@pytest.mark.kernel
def test_a_notebook_that_ends_well_is_done_and_leaves_no_child(tmp_path):
    case = Case(tmp_path / "run", START, "print('hello')")
    assert case.end() == 0, case.err
    assert case.executed.metadata.papermill.status == "done"
    assert set(case.statuses()) == {"completed"}
    assert "widgets" not in case.executed.metadata
    page = (tmp_path / "run" / "campaign.html").read_text()
    assert "hello" in page and "<script" not in page and "http" not in page.split("<body>")[1]
    assert_gone(case.pids)


@pytest.mark.kernel
def test_a_failing_cell_is_a_failed_run_with_the_exit_code_of_its_error(tmp_path):
    failing = "from workbench.errors import SetupError\nraise SetupError('port 8000 is in use')"
    case = Case(tmp_path / "run", START, failing, "print('never')")
    assert case.end() == SetupError.exit_code
    assert case.executed.metadata.papermill.status == "failed"
    assert case.statuses()[-2:] == ["failed", "not run"]
    banner = case.executed.cells[0].source
    assert "failed" in banner and "SetupError: port 8000 is in use" in banner
    assert "papermill-error-cell" not in str(case.executed)
    assert_gone(case.pids)


def test_rays_directory_goes_with_its_run_however_that_ended(monkeypatch):
    kernel, other = OwnKernel(), OwnKernel()
    monkeypatch.setenv(MARK, kernel.mark)
    mine = make_ray_directory()
    monkeypatch.setenv(MARK, other.mark)
    not_mine = make_ray_directory()
    kernel.end()
    assert not mine.exists() and not_mine.exists()
    other.end()
    assert not not_mine.exists()


def test_what_the_parts_of_a_killed_kernel_wrote_stays_in_the_run_without_their_tokens(tmp_path, monkeypatch):
    kernel = OwnKernel(logs_to=tmp_path)
    monkeypatch.setenv(MARK, kernel.mark)
    logs = make_ray_directory() / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-ab-01-77.err").write_text(":actor_name:Trainer\nout of memory at of-a-part-alone-123\n")
    # Only a part still has them: the kernel that made them is gone.
    part = subprocess.Popen(["sleep", "60"], env={**os.environ, "WORKBENCH_CONTROL_TOKEN": "of-a-part-alone-123"})
    kernel.end()
    assert part.wait(10) and not logs.exists()
    assert (tmp_path / "logs" / "Trainer-77.err").read_text() == "out of memory at ***\n"


@pytest.mark.kernel
def test_a_killed_kernel_is_a_failed_run_in_seconds(tmp_path):
    case = Case(tmp_path / "run", START, WAIT, "print('never')")
    case.until("waiting")
    began = time.monotonic()
    os.kill(case.pids[0], signal.SIGKILL)
    assert case.end() == 1
    assert time.monotonic() - began < 20
    assert case.executed.metadata.papermill.status == "failed"
    assert case.executed.metadata.papermill.exception == "DeadKernelError"
    assert case.statuses()[-2:] == ["failed", "not run"]
    assert "the kernel process is gone" in case.executed.cells[0].source
    status = orjson.loads((tmp_path / "run" / "status.json").read_bytes())
    assert status["status"] == "failed" and "DeadKernelError" in status["error"]
    assert_gone(case.pids)


@pytest.mark.kernel
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_closes_itself_first_and_is_told_as_stopped(tmp_path, number):
    case = Case(tmp_path / "run", START, WAIT, "print('never')")
    case.until("waiting")
    case.process.send_signal(number)
    assert case.end() == 128 + number
    assert (tmp_path / "run" / "closed").exists()
    assert case.executed.metadata.papermill.status == "stopped"
    assert case.statuses()[-2:] == ["stopped", "not run"]
    said = {signal.SIGINT: "stopped by Ctrl-C (SIGINT)", signal.SIGTERM: "stopped by SIGTERM"}[number]
    assert case.executed.cells[0].source.endswith(f"> {said}")
    assert orjson.loads((tmp_path / "run" / "status.json").read_bytes())["error"] == said
    assert orjson.loads((tmp_path / "run" / "status.json").read_bytes())["status"] == "stopped"
    assert_gone(case.pids)


@pytest.mark.kernel
def test_a_closed_terminal_stops_a_run_as_a_signal_does_though_nothing_can_be_said_there(tmp_path):
    own, terminal = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started with: nohup, it may be
    try:
        case = Case(tmp_path / "run", START, WAIT, terminal=terminal)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(terminal)
    case.until("waiting")
    os.close(own)  # the kernel sends SIGHUP, and every write to the terminal fails from now on
    assert case.process.wait(40) == 128 + signal.SIGHUP
    assert (tmp_path / "run" / "closed").exists()
    assert case.executed.metadata.papermill.status == "stopped"
    assert orjson.loads((tmp_path / "run" / "status.json").read_bytes())["error"] == "stopped by SIGHUP"
    assert (tmp_path / "run" / "campaign.html").exists()
    assert_gone(case.pids)


@pytest.mark.kernel
def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    go_on = "import time\nwhile not (here / 'go on').exists(): time.sleep(0.05)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it, for its child
    try:
        case = Case(tmp_path / "run", START, "(here / 'waiting').touch()", go_on)
    finally:
        signal.signal(signal.SIGHUP, before)
    case.until("waiting")
    case.process.send_signal(signal.SIGHUP)
    (tmp_path / "run" / "go on").touch()
    assert case.end() == 0, case.err
    assert case.executed.metadata.papermill.status == "done"


@pytest.mark.kernel
def test_more_signals_while_a_stopped_run_writes_its_notebook_change_nothing(tmp_path):
    case = Case(tmp_path / "run", START, WAIT)
    case.until("waiting")
    case.process.send_signal(signal.SIGINT)
    case.until("closed")
    deadline = time.monotonic() + 40
    while not (tmp_path / "run" / "campaign.html").exists() and time.monotonic() < deadline:
        if case.process.poll() is None:
            case.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert case.end() == 128 + signal.SIGINT, case.err
    assert case.executed.metadata.papermill.status == "stopped" and "Traceback" not in case.err
    assert orjson.loads((tmp_path / "run" / "status.json").read_bytes())["error"] == "stopped by Ctrl-C (SIGINT)"
    assert_gone(case.pids)


@pytest.mark.kernel
def test_a_cell_that_ignores_the_interrupt_is_killed_after_the_grace(tmp_path):
    case = Case(tmp_path / "run", START, STUBBORN, grace_s=1.0)
    case.until("waiting")
    case.process.send_signal(signal.SIGINT)
    assert case.end() == 128 + signal.SIGINT
    assert case.executed.metadata.papermill.status == "stopped"
    assert_gone(case.pids)


@pytest.mark.kernel
def test_the_summary_of_the_time_before_is_gone_while_a_run_goes_on(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "done"}')
    case = Case(tmp_path / "run", START, "assert not (here / 'summary.json').exists()")
    assert case.end() == 0, case.err


@pytest.mark.kernel
def test_a_run_that_is_gone_on_with_executes_its_notebook_over_its_own_recipe(tmp_path, monkeypatch, capfd):
    parameters = "recipe = overrides = run_dir = None\nresume = False"
    notebook(tmp_path / "10_campaign.ipynb", "print(resume, recipe, overrides, run_dir)", parameters=parameters)
    monkeypatch.setattr("workbench.campaign.report.runner.shipped", lambda name: tmp_path)
    run_dir = tmp_path / "run"
    RunWriter(run_dir).close()
    recipe = load_recipe("cpu_smoke", ["train.steps=9"])
    assert resume_run(recipe, run_dir) == 0
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text.strip() == f"True {run_dir}/recipe.yaml [] {run_dir}"
    assert load_recipe(run_dir / "recipe.yaml") == recipe
    said = capfd.readouterr()
    assert said.out.startswith("Run run: done") and f"Run {run_dir} (Ctrl-C stops it" in said.err


@pytest.mark.kernel
def test_a_run_that_is_gone_on_with_shows_the_text_of_tokens_that_it_had_not_seen_before(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run", steps=1)
    whole = Vocabulary({7: b"seen", 8: b"new"}, {})
    (run_dir / "weights" / "00000000").mkdir(parents=True)
    tokenizer = {"model": {"vocab": {"seen": 7, "new": 8}}}
    (run_dir / "weights" / "00000000" / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    (run_dir / "vocabulary.json").write_bytes(whole.only([7]).dump())
    campaign_notebook(tmp_path, monkeypatch, "from workbench import runs", "print(runs.open(run_dir).vocabulary())")
    resume_run(load_recipe("cpu_smoke"), run_dir)
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == f"{whole}\n"


def campaign_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch, *cells: str) -> None:
    """Put a short notebook in the place of the one that campaigns run."""
    notebook(folder / "10_campaign.ipynb", *cells, parameters="recipe = overrides = run_dir = None\nresume = False")
    monkeypatch.setattr("workbench.campaign.report.runner.shipped", lambda name: folder)


FAILS_LIVE = "if resume:\n    raise ValueError('the engine is gone')"


@pytest.mark.kernel
def test_the_notebook_of_a_run_that_failed_shows_what_was_recorded_below_the_cell_that_failed(
    tmp_path, monkeypatch, capfd
):
    run_dir = make_run(tmp_path / "run", steps=1)
    (run_dir / "status.json").write_text('{"status": "running"}')
    campaign_notebook(tmp_path, monkeypatch, FAILS_LIVE, "from workbench import runs", "print(runs.open(run_dir))")
    assert resume_run(load_recipe("cpu_smoke"), run_dir) == 1
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    banner, *cells = executed.cells
    assert "**This run failed** in code cell 3 of 5; the cells after it show what it had recorded." in banner.source
    assert banner.source.endswith("> ValueError: the engine is gone")
    assert [cell.metadata["papermill"]["status"] for cell in cells] == [
        "completed",
        "completed",
        "failed",
        "from records",
        "from records",
    ]
    assert cells[2].outputs[-1].ename == "ValueError" and "1 step" in cells[4].outputs[0].text
    assert executed.metadata.papermill.status == "failed"
    assert "<title>run: failed</title>" in (run_dir / "campaign.html").read_text()
    assert not list(run_dir.glob(".report-*"))
    assert "workbench report" not in capfd.readouterr().err


@pytest.mark.kernel
def test_where_the_records_are_not_shown_banner_and_terminal_name_the_command_that_shows_them(
    tmp_path, monkeypatch, capfd
):
    run_dir = make_run(tmp_path / "run", steps=1)
    (run_dir / "status.json").write_text('{"status": "running"}')
    campaign_notebook(tmp_path, monkeypatch, FAILS_LIVE, "print('shown')")
    monkeypatch.setitem(runner._RECORDS_S, "failed", 0.0)
    assert resume_run(load_recipe("cpu_smoke"), run_dir) == 1
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    assert "the cells after it were not run" in executed.cells[0].source
    assert executed.cells[0].source.endswith(f"> Next: workbench report {run_dir}")
    assert executed.cells[-1].metadata["papermill"]["status"] == "not run"
    assert f"; to show its records: workbench report {run_dir}; to go on with it" in capfd.readouterr().err
    before = (run_dir / "status.json").read_bytes()
    report(run_dir)
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    assert executed.cells[0].source == "> **This run failed**: ValueError: the engine is gone"
    assert executed.cells[-1].outputs[0].text == "shown\n"
    assert "<title>run: failed</title>" in (run_dir / "campaign.html").read_text()
    assert (run_dir / "status.json").read_bytes() == before


@pytest.mark.kernel
def test_records_that_cannot_be_shown_leave_the_notebook_as_it_was_and_are_told_of(tmp_path, monkeypatch, capfd):
    run_dir = make_run(tmp_path / "run", steps=1)
    (run_dir / "status.json").write_text('{"status": "running"}')
    campaign_notebook(tmp_path, monkeypatch, FAILS_LIVE, "print('half')", "raise KeyError('no such column')")
    assert resume_run(load_recipe("cpu_smoke"), run_dir) == 1
    banner, *cells = nbformat.read(run_dir / "campaign.ipynb", as_version=4).cells
    assert banner.source.endswith(f"ValueError: the engine is gone\n>\n> Next: workbench report {run_dir}")
    assert [cell.metadata["papermill"]["status"] for cell in cells[-2:]] == ["not run", "not run"]
    said = capfd.readouterr().err
    assert "what was recorded could not be shown: KeyError: 'no such column'" in said
    assert f"; to show its records: workbench report {run_dir}" in said


@pytest.mark.kernel
def test_a_signal_while_the_records_of_a_failed_run_are_shown_does_not_make_it_a_stopped_one(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run", steps=1)
    (run_dir / "status.json").write_text('{"status": "running"}')
    in_a_hurry = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)"
    campaign_notebook(tmp_path, monkeypatch, FAILS_LIVE, in_a_hurry)
    assert resume_run(load_recipe("cpu_smoke"), run_dir) == 1
    executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
    assert "**This run failed**" in executed.cells[0].source and executed.metadata.papermill.status == "failed"
    assert "<title>run: failed</title>" in (run_dir / "campaign.html").read_text()
    assert orjson.loads((run_dir / "status.json").read_bytes())["status"] == "failed"


@pytest.mark.kernel
def test_a_report_says_of_a_run_how_that_ended(tmp_path, monkeypatch):
    campaign_notebook(tmp_path, monkeypatch, "print('shown')")
    for status, title, banner in [
        ({"status": "done"}, "done", None),
        (
            {"status": "done", "error": "nothing was trained: 6 of 6"},
            "done, nothing trained",
            "**This run came to its end**: nothing was trained: 6 of 6",
        ),
        ({"status": "stopped", "error": "stopped by SIGTERM"}, "stopped", "**This run was stopped** by SIGTERM"),
    ]:
        run_dir = tmp_path / "run"
        with RunWriter(run_dir) as writer:
            writer.status(**{"error": None, **status})
        report(run_dir)
        first = nbformat.read(run_dir / "campaign.ipynb", as_version=4).cells[0]
        assert f"<title>run: {title}</title>" in (run_dir / "campaign.html").read_text()
        assert ("workbench-banner" in first.metadata.get("tags", [])) is (banner is not None)
        if banner is not None:
            assert first.source == f"> {banner}"


@pytest.mark.kernel
def test_a_report_or_an_index_that_fails_is_an_error_with_what_its_cell_said(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    RunWriter(run_dir).close()
    monkeypatch.setattr("workbench.campaign.report.runner.shipped", lambda name: tmp_path)
    monkeypatch.setattr("workbench.campaign.report.sweep.shipped", lambda name: tmp_path)
    notebook(tmp_path / "10_campaign.ipynb", "print('seen')")
    assert report(run_dir) == run_dir / "campaign.ipynb"
    notebook(tmp_path / "10_campaign.ipynb", "raise ValueError('no steps')")
    with pytest.raises(RunStoreError, match="the report failed, ValueError: no steps"):
        report(run_dir)
    notebook(tmp_path / INDEX, "print(folder)", parameters="folder = None")
    assert write_index(run_dir) == run_dir / "index.ipynb"
    notebook(tmp_path / INDEX, "raise ValueError('no runs')", parameters="folder = None")
    with pytest.raises(SetupError, match="the index failed, ValueError: no runs"):
        write_index(run_dir)


@pytest.mark.kernel
def test_a_report_that_is_stopped_leaves_the_one_before_it(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run", steps=1)
    campaign_notebook(tmp_path, monkeypatch, "print('shown')")
    assert report(run_dir) == run_dir / "campaign.ipynb"
    before = {page: page.read_bytes() for page in run_dir.glob("campaign.*")}
    assert nbformat.read(run_dir / "campaign.ipynb", as_version=4).metadata.papermill.output_path == str(
        run_dir / "campaign.ipynb"
    )
    (run_dir / ".report-killed").mkdir()
    in_a_hurry = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)"
    campaign_notebook(tmp_path, monkeypatch, "print('half')", in_a_hurry)
    with pytest.raises(
        RunStoreError, match=r"the report was stopped by Ctrl-C \(SIGINT\); the one before it"
    ) as raised:
        report(run_dir)
    assert raised.value.exit_code == 130
    assert len(before) == 2 and {page: page.read_bytes() for page in run_dir.glob("campaign.*")} == before
    assert not list(run_dir.glob(".report-*"))


def test_a_kernel_that_never_was_or_has_ended_is_not_interrupted(monkeypatch):
    kernel = OwnKernel()
    assert not kernel.interrupt()
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(OwnKernel, "pid", ended.pid)
    assert not kernel.interrupt()
    kernel.end()


def test_a_stop_waits_until_the_kernel_hears_it_and_is_passed_on_once(monkeypatch):
    execution, passed_on = Execution(), []
    monkeypatch.setattr(kernel := execution._kernel, "interrupt", lambda: passed_on.append(True) or True)
    execution.stop_signal = signal.SIGINT
    # As ipykernel between cells, and in one; what was inherited may be either.
    takes = "import signal; signal.signal(signal.SIGINT, signal.{}); print(1, flush=True); input()"
    for code, expected in ((takes.format("SIG_IGN"), 0), (takes.format("default_int_handler"), 1)):
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            monkeypatch.setattr(OwnKernel, "pid", process.pid)
            execution._watch(None)
            execution._watch(None)
            assert len(passed_on) == expected
            process.stdin.write(b"\n")
    kernel.end()


def test_a_second_runner_at_a_run_is_refused_and_changes_nothing_of_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("of the first")
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    for begin in (run_notebook, resume_run):
        with pytest.raises(SetupError, match="another workbench is at this run"):
            begin(load_recipe("cpu_smoke"), tmp_path)
    os.close(holder)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert (tmp_path / "recipe.yaml").read_text() == "of the first"


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_status_that_cannot_be_read_gets_the_true_one_when_the_run_ends(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    runner._close_store(tmp_path, Outcome("stopped", "SIGINT", "stopped by Ctrl-C (SIGINT)"))
    assert runs.open(tmp_path).campaign.select("state", "error").row(0) == ("stopped", "stopped by Ctrl-C (SIGINT)")


def test_a_stopped_run_is_told_by_the_signal_that_the_runner_got_and_not_by_the_kernels_interrupt(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.status(status="stopped", phase="stopped", error="stopped by an interrupt", step=2)
    runner._close_store(tmp_path, Outcome("stopped", "SIGTERM", "stopped by SIGTERM"))
    status = orjson.loads((tmp_path / "status.json").read_bytes())
    assert (status["status"], status["error"], status["step"]) == ("stopped", "stopped by SIGTERM", 2)


def test_the_notebook_of_a_run_under_way_is_not_written_over_by_its_report(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "running"}')
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(SetupError, match="another workbench is at this run"):
        report(tmp_path)
    os.close(holder)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_run_that_cannot_be_written_gets_no_report_and_a_line(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text('{"status": "done"}')
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SetupError, match="cannot be written, and its report lies in it"):
        report(tmp_path)


def test_an_unknown_parameter_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(RecipeError, match=r"no parameter 'recipee', did you mean recipe\?"):
        check_parameters(shipped("notebooks") / "10_campaign.ipynb", {"recipee": "x"})


def test_a_notebook_without_parameters_or_that_was_never_executed_is_named(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "n.ipynb")
    with pytest.raises(SetupError, match="has no cell tagged 'parameters'"):
        parameter_names(tmp_path / "n.ipynb")
    with pytest.raises(SetupError, match="No executed notebook at"):
        set_outcome(tmp_path / "gone.ipynb", Outcome("done"))


def test_annotated_parameters_are_seen(tmp_path):
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("a: int | None = None\nb = 1", metadata={"tags": ["parameters"]})]
    )
    nbformat.write(book, tmp_path / "n.ipynb")
    assert parameter_names(tmp_path / "n.ipynb") == ["a", "b"]


def test_a_run_name_that_is_taken_is_refused_and_a_default_one_counts_up(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "steps.jsonl").touch()
    with pytest.raises(SetupError, match="already holds a run"):
        new_run_dir(tmp_path, "first", named=True)
    (tmp_path / "notes").touch()
    with pytest.raises(SetupError, match="is a file"):
        new_run_dir(tmp_path, "notes", named=True)
    with pytest.raises(SetupError, match="expected a name of 1 to 80"):
        new_run_dir(tmp_path, "", named=True)
    (tmp_path / "first-1").mkdir()
    assert new_run_dir(tmp_path, "first", named=False).name == "first-2"


def test_two_that_ask_for_a_new_run_at_once_get_two(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: new_run_dir(tmp_path / "reports", "mine", claim=True), range(40)))
    assert sorted(path.name for path in got) == sorted(f"mine-{number}" for number in range(1, 41))


def test_the_vocabulary_of_a_run_that_was_gone_on_with_has_the_ids_that_came_since(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    whole = (run_dir / "vocabulary.json").read_bytes()
    (run_dir / "weights" / "v1").mkdir(parents=True)
    (run_dir / "weights" / "v1" / "tokenizer.json").write_bytes(whole)
    (run_dir / "vocabulary.json").write_bytes(orjson.dumps({"pieces": {"65": "41"}, "special": {}}))
    runner._keep_vocabulary(run_dir)
    used = runs.open(run_dir).token_ids()
    kept = runs.open(run_dir).vocabulary()
    assert len(used) > 20 and kept.pieces.keys() | kept.special.keys() == used
