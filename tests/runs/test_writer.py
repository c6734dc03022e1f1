"""The run writer: whole lines, whole files, closed cleanly."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from workbench.errors import RunStoreError
from workbench.runs import writer
from workbench.runs.writer import RunWriter, atomic_file, write_lines


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_steps_groups_and_status_are_readable_while_the_run_is_open(tmp_path):
    with RunWriter(tmp_path / "run") as run:
        run.event("started", seed=np.int64(3))
        run.step({"step": 1, "loss": np.float32(0.5), "reward_mean": float("nan")})
        run.group({"group_id": "r.0", "rejections": {"corrupt_digest": 1}})
        run.status({"state": "running"})
        run.status(step=1)
        assert [e["kind"] for e in lines(run.run_dir / "events.jsonl")] == ["started"]
        assert lines(run.run_dir / "steps.jsonl") == [{"step": 1, "loss": 0.5, "reward_mean": None}]
        status = json.loads((run.run_dir / "status.json").read_text())
        assert (status["state"], status["step"]) == ("running", 1)


def test_nothing_is_written_after_close_and_closing_twice_is_harmless(tmp_path):
    run = RunWriter(tmp_path)
    run.close()
    run.close()
    with pytest.raises(RunStoreError, match="closed"):
        run.event("late")
    with pytest.raises(RunStoreError, match="closed"):
        run.status({})
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_status_that_is_said_from_an_event_loop_does_not_wait_for_the_disk_and_is_there_in_the_end(
    tmp_path, monkeypatch
):
    written, disk_is_back = [], threading.Event()
    atomic = writer.atomic_file

    @contextlib.contextmanager
    def slow(path):
        assert disk_is_back.wait(60)
        with atomic(path) as handle:
            yield handle
        written.append(json.loads(path.read_bytes())["step"])

    monkeypatch.setattr(writer, "atomic_file", slow)
    run = RunWriter(tmp_path)
    for step in range(1, 101):
        run.status_soon(step=step, **{f"said_{step}": True})
    assert written == []
    disk_is_back.set()
    # Said later and waited for: what was said before it is there too, and nothing earlier comes after it.
    run.status(step=101)
    assert written[-1] == 101 and len(written) <= 3
    run.status_soon(step=102)
    run.close()
    status = json.loads((tmp_path / "status.json").read_bytes())
    assert status["step"] == 102 and all(status[f"said_{step}"] for step in range(1, 101))
    assert written == sorted(written)
    with pytest.raises(RunStoreError, match="closed"):
        run.status_soon(step=103)


def test_a_disk_that_does_not_take_the_status_is_said_at_the_next_one(tmp_path, monkeypatch):
    failed = threading.Event()

    @contextlib.contextmanager
    def full(path):
        failed.set()
        raise OSError(28, "No space left on device")
        yield

    run = RunWriter(tmp_path)
    monkeypatch.setattr(writer, "atomic_file", full)
    run.status_soon(step=1)
    assert failed.wait(60)
    with pytest.raises(OSError, match="No space left"):
        for step in range(2, 10_000):
            run.status_soon(step=step)
            time.sleep(0.001)
    run.close()


FULL_DISK = """
import resource, signal, sys
from workbench.errors import DiskFull
from workbench.runs.writer import RunWriter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunWriter(sys.argv[1])
run.event("started")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    run.event("group_started", group_id="g" * 200)
except DiskFull as error:
    print(error)
    run.event("failed")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_line_that_a_full_disk_takes_half_of_is_an_error_at_once_and_not_there(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"the disk is full: {tmp_path / 'events.jsonl'} could not be written, and ")
    assert [event["kind"] for event in lines(tmp_path / "events.jsonl")] == ["started", "failed"]


def test_a_torn_last_line_is_cut_off_when_a_run_is_continued(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"kind":"a"}\n{"kind":"tor')
    with RunWriter(tmp_path) as run:
        run.event("b")
    assert [e["kind"] for e in lines(tmp_path / "events.jsonl")] == ["a", "b"]


def test_lines_of_many_threads_stay_whole(tmp_path):
    with RunWriter(tmp_path) as run:
        threads = [
            threading.Thread(target=lambda n=n: [run.event("tick", n=n, text="x" * 5000) for _ in range(20)])
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(tmp_path / "events.jsonl")) == 160


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "part.jsonl"
    write_lines(path, [{"a": 1}])
    with pytest.raises(ZeroDivisionError), atomic_file(path) as handle:
        handle.write(b"half")
        1 / 0
    assert lines(path) == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["part.jsonl"]


def test_who_looks_whether_a_run_is_written_does_not_keep_it_from_being_written(tmp_path):
    RunWriter(tmp_path).close()
    with (tmp_path / "events.jsonl").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        opened = []
        thread = threading.Thread(target=lambda: opened.append(RunWriter(tmp_path)))
        thread.start()
        thread.join(0.05)
        assert not opened
    thread.join(10.0)
    opened[0].close()


def test_a_run_has_one_writer_at_a_time(tmp_path):
    with RunWriter(tmp_path), pytest.raises(RunStoreError, match="another process"):
        RunWriter(tmp_path)
    RunWriter(tmp_path).close()
