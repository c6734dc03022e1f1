"""Damage: what of a run's files could not be read, in sentences.

In: the scanned journals of a run, its ledger files, its Parquet parts. Out: one sentence a line, part or log
that is missing from the frames, with its file and place, and the short form of all for the run's own sentence.
Not here: leaving lines and parts out (frames), digests (campaign.verify).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import polars as pl

from workbench.errors import RunStoreError
from workbench.runs.frames import Parts, Signature, has_torn_line, signature

_TORN = "its last line is torn"
_PART = " part of table "
_LOG = " were trained and the run is done"


class DamagedParts:
    """The parts of a run that could not be read when somebody read them, each until it is another file."""

    def __init__(self) -> None:
        self._errors: dict[Path, tuple[Signature | None, RunStoreError]] = {}

    def note(self, damaged: Mapping[Path, RunStoreError]) -> None:
        self._errors |= {path: (signature(path), error) for path, error in damaged.items()}

    def noted(self, parts: Parts) -> pl.DataFrame:
        """The rows of `parts`; those of them that are damaged are noted."""
        self.note(parts.damaged)
        return parts.frame

    def there(self) -> dict[Path, RunStoreError]:
        """By path, those that are as they were."""
        self._errors = {path: told for path, told in self._errors.items() if told[0] == signature(path)}
        return {path: error for path, (_, error) in sorted(self._errors.items())}


def torn_lines(files: Iterable[Path]) -> list[str]:
    """One sentence for each file whose last line has no end."""
    return [f"{path}: {_TORN}" for path in files if has_torn_line(path)]


def lost_log(path: Path, noun: str, trained: int) -> str:
    """What is wrong with a log without one line of the `trained` steps or groups that its run has parts of."""
    what = f"holds no {noun}" if path.exists() else "this file is missing"
    return f"{what}, {trained:,} {noun}{'' if trained == 1 else 's'}{_LOG}"


def in_short(told: Sequence[str], base: Path) -> str:
    """ " · 1 torn line left out (steps.jsonl: its last line is torn)"; empty for no damage."""
    if not told:
        return ""
    kinds = ((_TORN, "torn line"), (", line ", "broken line"), (_PART, "damaged part"), (_LOG, "lost log"))
    counts = [(sum(mark in words for words in told), what) for mark, what in kinds]
    counts.append((len(told) - sum(count for count, _ in counts), "unreadable file"))
    parts = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
    first = told[0].replace(f"{base}/", "").partition(": " if _PART in told[0] else " (")[0]
    more = "; all: .damage" if len(told) > 1 else ""
    return f" · {' and '.join(parts)} left out ({first}{more})"
