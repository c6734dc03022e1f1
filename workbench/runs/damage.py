"""Damage: what of a run's files could not be read, in sentences.

In: the scanned journals of a run, its recipe, its ledger files. Out: one sentence a line that is missing from the
frames, with its file and place, and the short form of all of them for the run's own sentence.
Not here: leaving the lines out (frames), damaged Parquet parts (they raise), digests (campaign.verify_run).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from workbench.runs.frames import has_torn_line

_TORN = "its last line is torn"


def torn_lines(files: Iterable[Path]) -> list[str]:
    """One sentence for each file whose last line has no end."""
    return [f"{path}: {_TORN}" for path in files if has_torn_line(path)]


def in_short(told: Sequence[str], base: Path) -> str:
    """ " · 1 torn line left out (steps.jsonl: its last line is torn)"; empty for no damage."""
    if not told:
        return ""
    torn = sum(words.endswith(_TORN) for words in told)
    counts = ((torn, "torn line"), (len(told) - torn, "broken line"))
    parts = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
    first = told[0].replace(f"{base}/", "").partition(" (")[0]
    more = "; all: .damage" if len(told) > 1 else ""
    return f" · {' and '.join(parts)} left out ({first}{more})"
