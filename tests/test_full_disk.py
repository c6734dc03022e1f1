"""Full disk: whatever was being written, the sentence is the same, with the file and the next step."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from workbench.errors import DiskFull, WorkbenchError
from workbench.full_disk import told_when_full
from workbench.gateway.answers import AnswerFile
from workbench.ledger import journal
from workbench.runs.writer import RunWriter, write_lines


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def append_row(folder: Path) -> None:
    file = journal.Journal(folder / "file", lambda number, row: None, lambda: None)
    with file.exclusive() as append:
        append({"a": 1})


def keep_answer(folder: Path) -> None:
    with AnswerFile(folder / "file").keep(b"answer"):
        pass


def write_status(folder: Path) -> None:
    with RunWriter(folder / "run") as run:
        run.status(step=1)


@pytest.mark.parametrize(
    ("write", "broken", "file"),
    [
        (append_row, "pwrite", "file"),
        (lambda folder: journal.append_beside(folder / "file", b"{}"), "write", "file"),
        (keep_answer, "write", "file"),
        (lambda folder: write_lines(folder / "part.jsonl", [{}]), "fsync", "part.jsonl"),
        (write_status, "fsync", "run/status.json"),
    ],
)
def test_rows_ledger_and_status_tell_of_a_full_disk_in_our_words(tmp_path, monkeypatch, write, broken, file):
    monkeypatch.setattr(os, broken, no_room)
    with pytest.raises(DiskFull) as full:
        write(tmp_path)
    said = str(full.value)
    assert said.startswith(f"the disk is full: {tmp_path / file} could not be written, and ")
    assert said.endswith("MB are free there. Next: make room there, then go on with the run: workbench resume.")


def test_what_is_told_crosses_from_an_actor_and_is_still_an_error_of_the_system(tmp_path):
    with pytest.raises(DiskFull) as full, told_when_full(tmp_path, 2_000_000):
        no_room()
    back = pickle.loads(pickle.dumps(full.value))
    assert str(back) == str(full.value) and f"{tmp_path} takes 2.0 MB, and" in str(back)
    assert isinstance(back, WorkbenchError) and isinstance(back, OSError)


def test_other_faults_keep_their_words(tmp_path):
    with pytest.raises(PermissionError), told_when_full(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
