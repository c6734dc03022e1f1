"""Gathered: what many parts say in one frame; each is read once, and none is believed that has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal
from stored_run import StoredRun

from workbench import runs
from workbench.errors import RunStoreError
from workbench.runs import frames, gathered


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredRun]:
    monkeypatch.setattr(gathered, "FROM_PARTS", 2)
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "retry"], ["nan", "branch"]])
    yield stored
    stored.writer.close()


@pytest.fixture
def read_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts of rows that were read."""
    read: list[str] = []
    original = frames.scan_parts

    def counting(table, paths, columns=None):
        paths = list(paths)
        read.extend(path.name for path in paths if table == "rows")
        return original(table, paths, columns)

    monkeypatch.setattr(frames, "scan_parts", counting)
    return read


def test_a_view_that_stays_open_reads_only_parts_that_are_new(stored, read_parts):
    run = runs.open(stored.run_dir)
    assert run.rollouts.height == 4 and read_parts == ["g00000.parquet", "g00001.parquet"]
    stored.step(2, [["plain", "plain"], ["plain", "nan"]])
    assert run.rollouts.height == 8 and read_parts[2:] == ["g00002.parquet", "g00003.parquet"]
    assert_frame_equal(run.rollouts, runs.open(stored.run_dir).rollouts)


def test_a_gathered_run_opens_without_its_parts_and_says_the_same(stored, read_parts):
    path = stored.finish()
    before = runs.open(path)
    rollouts, calls = before.rollouts, before.calls
    gathered.gather(path)
    read_parts.clear()
    after = runs.open(path)
    assert_frame_equal(after.rollouts, rollouts)
    assert_frame_equal(after.calls, calls)
    assert read_parts == []


def test_a_run_that_goes_on_is_gathered_again_when_it_has_grown_and_what_came_since_is_read_beside(stored, read_parts):
    def names() -> list[str]:
        read_parts.clear()
        assert runs.open(stored.run_dir).rollouts.height == 2 * len(list((stored.run_dir / "rows").iterdir()))
        return read_parts

    gathered.gather(stored.run_dir, growth=1.5)
    assert names() == []
    stored.step(2, [["plain", "plain"], ["plain", "nan"]])
    gathered.gather(stored.run_dir, growth=2.5)
    new = ["g00002.parquet", "g00003.parquet"]
    assert names() == new
    read_parts.clear()
    gathered.gather(stored.run_dir, growth=1.5)
    assert read_parts == new  # those before them were read from the file
    assert names() == []


def test_a_part_that_has_changed_since_is_read_again(stored, read_parts):
    path = stored.finish()
    gathered.gather(path)
    part = path / "rows" / "g00001.parquet"
    os.utime(part, ns=(1, 1))
    read_parts.clear()
    assert runs.open(path).rollouts.height == 4 and set(read_parts) == {"g00000.parquet", "g00001.parquet"}
    part.unlink()
    assert runs.open(path).rollouts.height == 2


@pytest.mark.parametrize("damage", ["cut", "other columns"])
def test_a_gathered_file_that_cannot_be_used_costs_nothing(stored, damage):
    path = stored.finish()
    rollouts = runs.open(path).rollouts
    gathered.gather(path)
    file = path / "gathered" / "rows.parquet"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        (path / "gathered" / "calls.parquet").replace(file)
    assert_frame_equal(runs.open(path).rollouts, rollouts)


def test_a_damaged_part_is_named_and_not_gathered(stored):
    path = stored.finish()
    part = path / "rows" / "g00001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    gathered.gather(path)
    assert not (path / "gathered" / "rows.parquet").exists()
    run = runs.open(path)
    assert run.rollouts.height == 2 and "rows/g00001.parquet is not a readable part" in repr(run)


def test_parts_read_by_several_threads_stand_in_their_order_and_a_broken_one_is_named(stored, monkeypatch):
    one_by_one = runs.open(stored.run_dir)
    monkeypatch.setattr(frames, "SIDE_BY_SIDE", 2)
    together = runs.open(stored.run_dir)
    assert_frame_equal(together.rollouts, one_by_one.rollouts)
    assert_frame_equal(together.calls, one_by_one.calls)
    whole = (stored.run_dir / "rows" / "g00001.parquet").read_bytes()
    (stored.run_dir / "rows" / "g00001.parquet").write_bytes(b"PAR1 no more PAR1")
    run = runs.open(stored.run_dir)
    assert run.rollouts["group_id"].unique().to_list() == ["g00000"]
    with pytest.raises(RunStoreError, match=r"g00001\.parquet is not a readable part of table rows"):
        frames.read_parts("rows", sorted((stored.run_dir / "rows").iterdir()))
    # Once it is there again, a run that stayed open has it.
    (stored.run_dir / "rows" / "g00001.parquet").write_bytes(whole)
    assert_frame_equal(run.rollouts, one_by_one.rollouts)
    assert run.damage == []


def test_a_part_that_goes_while_it_is_looked_at_is_no_part(tmp_path: Path) -> None:
    assert frames.signature(tmp_path / "gone.parquet") is None
