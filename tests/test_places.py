"""Temporary directories of runs: those of living processes stay, those of killed ones go."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workbench import places

MAKES_TWO_AND_IS_KILLED = """
import os, signal, sys
from pathlib import Path
from workbench import places
places._SHORT = Path(sys.argv[1])
print(places.make_ray_directory(), places.make_serve_directory(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def an_hour_old(directory: Path) -> None:
    os.utime(directory / "owner", (0, 0))


def test_what_a_killed_process_left_is_removed_by_the_next_that_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_SHORT", tmp_path)
    alive = places.make_ray_directory()
    arguments = [sys.executable, "-c", MAKES_TWO_AND_IS_KILLED, str(tmp_path)]
    killed = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = [Path(name) for name in killed.stdout.split()]
    (left[0] / "session").mkdir()
    foreign = tmp_path / "wb-ray-by-hand"
    foreign.mkdir()
    assert places.remove_orphans() == [], "a new one may be about to be locked"
    for directory in (alive, *left):
        an_hour_old(directory)
    another = places.make_serve_directory()
    assert not any(directory.exists() for directory in left)
    assert alive.exists() and another.exists() and foreign.exists()


def test_a_path_in_a_proposed_command_is_one_word_of_it():
    assert shlex.split(f"workbench inspect {places.as_word(Path('/a b/lauf ü'))} x")[2:] == ["/a b/lauf ü", "x"]
    assert places.as_word(Path("reports/run-1")) == "reports/run-1"
