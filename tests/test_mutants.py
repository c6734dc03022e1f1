"""The mutants that tests must notice (`python tools/mutants.py`) still change a line each."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_mutant_changes_exactly_one_place(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import mutants

    for mutant in mutants.MUTANTS:
        text = (ROOT / "workbench" / mutant.file).read_text()
        assert text.count(mutant.was) == 1, f"{mutant.file}: {mutant.was!r}"
        assert mutant.becomes != mutant.was
