"""The run writer: whole lines, whole files, closed cleanly."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from workbench.errors import RunStoreError
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


def test_a_run_has_one_writer_at_a_time(tmp_path):
    with RunWriter(tmp_path), pytest.raises(RunStoreError, match="another process"):
        RunWriter(tmp_path)
    RunWriter(tmp_path).close()
