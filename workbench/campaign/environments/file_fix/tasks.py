"""Tasks: one bug in one good file. A bug is a text of the file and what stands there instead.

Invariants: a bug's right text occurs once in its file; with the wrong one at least one test fails, and putting the
right one back makes all pass (a test goes through all of them).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib import resources

BUGS: dict[str, tuple[tuple[str, str], ...]] = {
    "intervals": (
        ("merged[-1][1] + 1:", "merged[-1][1]:"),
        ("max(merged[-1][1], high))", "high)"),
        ("high - low + 1", "high - low"),
        ("in sorted(intervals)", "in intervals"),
    ),
    "words": (
        ("text.lower().split()", "text.split()"),
        ("found.get(word, 0) + 1", "1"),
        ("(-found[word], word)", "(found[word], word)"),
        ("text[: limit - 1]", "text[:limit]"),
        ("len(text) <= limit", "len(text) < limit"),
    ),
    "bank": (
        ("cents > self.balance", "cents >= self.balance"),
        ("cents <= 0", "cents < 0"),
        ("self.history.append(-cents)", "self.history.append(cents)"),
        ("    target.deposit(cents)", "    source.deposit(cents)"),
    ),
    "matrix": (
        ("[list(column) for column in zip(*rows, strict=True)]", "[list(row) for row in rows]"),
        ("sum(a * b for", "sum(a + b for"),
        ("range(len(rows))", "range(1, len(rows))"),
    ),
    "roman": (
        ("number >= value", "number > value"),
        ('(9, "IX")', '(9, "XI")'),
        ("if not 1 <= number", "if not 0 <= number"),
        ("text = text[len(letters) :]", "text = text[1:]"),
    ),
}


@dataclass(frozen=True)
class Bug:
    """`name`.py with a bug (`source`) and without (`good`), and its tests. `wrong` stands where `right` should."""

    name: str
    good: str
    source: str
    tests: str
    right: str
    wrong: str

    @property
    def file(self) -> str:
        """Name of the file to mend."""
        return f"{self.name}.py"

    @property
    def test_file(self) -> str:
        """Name of its tests."""
        return f"{self.name}_test.py"


@cache
def bugs() -> tuple[Bug, ...]:
    """All of them."""
    folder = resources.files(__package__) / "files"
    made = []
    for name, changes in BUGS.items():
        good, tests = (folder / f"{name}.py").read_text(), (folder / f"{name}_test.py").read_text()
        made += [Bug(name, good, good.replace(right, wrong), tests, right, wrong) for right, wrong in changes]
    return tuple(made)


def choose(seed: int) -> int:
    """Number of the bug that a seed stands for."""
    return random.Random(f"file_fix:{seed}").randrange(len(bugs()))
