"""Conformance: run corpora of the wire contract against this code and say where it departs.

In: JSONL files (or directories of them), one case a line: `case`, `input`, `expect`. Out: passed and failed per kind,
and of every failure the first field that differs. The kind is told by the shape of a case, not by the file's name.
Invariant: what a case expects is taken out before its input reaches the code under test.
Not here: how a kind of case is run (`conformance_cases`), checks of a stored run (`verify`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.campaign.conformance_cases import RUNNERS
from workbench.errors import SetupError

KINDS = tuple(RUNNERS)
_KIND_OF_CASE = {
    "hash_token_ids": "digests",
    "chain_hash": "digests",
    "extras_digest": "digests",
    "staging_digest": "digests",
    "messages": "fingerprints",
    "tool_arguments": "fingerprints",
    "decode": "routes",
    "decode_bad": "routes",
    "classify": "routes",
}


@dataclass(frozen=True)
class CaseFailure:
    """One case that came out different: the first differing `field` (a path), what was expected and what came."""

    path: str
    line: int
    kind: str
    case: str
    field: str
    expected: str
    came: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line} {self.kind}/{self.case}"
        return f"{where}: {self.field or 'the result'} should be {self.expected}, came {self.came}"


@dataclass
class ConformanceReport:
    """Counts of passed and failed cases per kind, and the failures in the order they were met."""

    passed: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    failures: list[CaseFailure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when at least one case was run and none failed."""
        return not self.failures and any(self.passed.values())

    def count(self, kind: str, failure: CaseFailure | None) -> None:
        counts = self.passed if failure is None else self.failed
        counts[kind] = counts.get(kind, 0) + 1
        if failure is not None:
            self.failures.append(failure)

    def __str__(self) -> str:
        lines = [f"{'kind':<20}{'passed':>8}{'failed':>8}"]
        for kind in (*KINDS, "unknown"):
            passed, failed = self.passed.get(kind, 0), self.failed.get(kind, 0)
            if passed or failed:
                lines.append(f"{kind:<20}{passed:>8}{failed:>8}")
        lines += [str(failure) for failure in self.failures]
        return "\n".join(lines)


def run_conformance(paths: Iterable[Path | str]) -> ConformanceReport:
    """Run every case of the files (`*.jsonl` of a directory, not below it).

    Raises SetupError when a path does not exist, holds no case, or holds a line that is no JSON.
    """
    report = ConformanceReport()
    for path in _files(paths):
        cases = 0
        for number, case in _cases(path):
            cases += 1
            kind, failure = check_case(case, str(path), number)
            report.count(kind, failure)
        if not cases:
            raise SetupError(f"{path} holds no case; a corpus has one JSON object a line")
    return report


def main(paths: Sequence[Path | str]) -> int:
    """Print the report; 0 when every case passed, 1 otherwise."""
    report = run_conformance(paths)
    print(report)
    return 0 if report.ok else 1


def check_case(case: dict[str, Any], path: str = "", line: int = 0) -> tuple[str, CaseFailure | None]:
    """Run one case: its kind, and None when it came out as expected."""
    kind, name = kind_of(case), str(case.get("case"))
    if kind is None:
        return "unknown", CaseFailure(path, line, "unknown", name, "", "a case of a known kind", repr(case)[:120])
    given, expected = _split(kind, case)
    try:
        came = RUNNERS[kind](name, given)
    except Exception as error:  # a case that crashes the code under test is a failed case, not a failed run
        return kind, CaseFailure(path, line, kind, name, "", _short(expected), f"{type(error).__name__}: {error}")
    difference = first_difference(expected, came)
    if difference is None:
        return kind, None
    return kind, CaseFailure(path, line, kind, name, *difference)


def kind_of(case: dict[str, Any]) -> str | None:
    """The kind of a case by its name and shape; None when it is none of the eight."""
    given, expected, name = case.get("input"), case.get("expect"), case.get("case")
    # Shapes before names: a verifier case may be called `chain_hash` after the mutation it tries.
    if isinstance(given, dict) and {"receipt", "snapshots"} <= given.keys():
        return "verify"
    if isinstance(given, dict) and "records" in given:
        return "attribution"
    if isinstance(name, str) and name in _KIND_OF_CASE:
        return _KIND_OF_CASE[name]
    if not isinstance(given, list):
        return None
    if isinstance(expected, dict) and {"manifest", "file"} <= expected.keys():
        return "ledger"
    if isinstance(expected, dict) and {"terminal", "reason"} <= expected.keys():
        return "terminal_heuristic"
    return "capture" if isinstance(expected, list) else None


def first_difference(expected: Any, came: Any, path: str = "") -> tuple[str, str, str] | None:
    """`(path, expected, came)` of the first leaf that differs as JSON text (1 and 1.0 differ), None when none does."""
    if isinstance(expected, dict) and isinstance(came, dict):
        for key in [*expected, *(key for key in came if key not in expected)]:
            there = f"{path}.{key}" if path else str(key)
            if key not in came or key not in expected:
                return there, _short(expected.get(key, "<absent>")), _short(came.get(key, "<absent>"))
            difference = first_difference(expected[key], came[key], there)
            if difference is not None:
                return difference
        return None
    if isinstance(expected, list) and isinstance(came, list):
        for index, (one, other) in enumerate(zip(expected, came, strict=False)):
            difference = first_difference(one, other, f"{path}[{index}]")
            if difference is not None:
                return difference
        if len(expected) != len(came):
            return f"{path}.length", str(len(expected)), str(len(came))
        return None
    if json.dumps(expected) == json.dumps(came):
        return None
    if isinstance(expected, str) and isinstance(came, str):
        at = next((i for i, (a, b) in enumerate(zip(expected, came, strict=False)) if a != b), 0)
        expected, came = expected[max(0, at - 40) :], came[max(0, at - 40) :]
    return path, _short(expected), _short(came)


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 160 else shown[:157] + "..."


def _files(paths: Iterable[Path | str]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise SetupError(f"{path} holds no *.jsonl file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise SetupError(f"{path} does not exist")
    return files


def _cases(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                case = json.loads(line)
            except ValueError as error:
                raise SetupError(f"{path}:{number} is not JSON: {error}") from error
            yield number, case if isinstance(case, dict) else {"case": None, "input": case}


def _split(kind: str, case: dict[str, Any]) -> tuple[Any, Any]:
    """Input without expectations, expectations without input."""
    given: Any = case.get("input")
    expected: Any = case.get("expect")
    if kind != "ledger":
        return given, expected
    # The ids of the rollout are an address, not an expectation; a ledger of failures alone names it nowhere else.
    rollout_id = expected["manifest"]["rollout_id"]
    resolutions = [operation["expect"] for operation in given if "expect" in operation]
    operations = [{key: value for key, value in operation.items() if key != "expect"} for operation in given]
    return (rollout_id, operations), {"resolutions": resolutions, **expected}
