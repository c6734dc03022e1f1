"""Custody: ledger files as rows of the calls table.

In: a directory of `<rollout_id>.lineage.jsonl` files, ours or a NeMo Gym run's. Out: one dict a call, in ledger order,
custody rows and failure rows alike, with the names that the calls table uses. Token-free, as ledgers are.
Invariants: a torn last line was never acknowledged and is not a call; a damaged ledger is named, and costs its own
rollout's rows and never the sight of the others. Not here: resolving and writing (the ledger room).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import LedgerCorrupt, RunStoreError
from workbench.ledger.resolve import CustodyRow, FailureRow
from workbench.ledger.rows import parse_row
from workbench.runs.finding import is_run
from workbench.runs.frames import Signature, read_lines, scan_lines, signature
from workbench.runs.relations import relate

SUFFIX = ".lineage.jsonl"
EVENTS_SUFFIX = ".events.jsonl"

_SAME = (
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
    "staging_key",
    "response_id",
    "admitted_at",
    "output_fingerprint",
    "continuation_fingerprint",
    "fingerprint_version",
    "context_digest",
    "context_len",
)


def ledger_files(directory: Path) -> list[Path]:
    """The ledger files of a directory, by rollout id; hidden files and directories are no ledgers."""
    found = (path for path in directory.glob(f"*{SUFFIX}") if not path.name.startswith("."))
    return sorted(path for path in found if not path.is_dir())


def is_ledger(directory: Path) -> bool:
    """Whether a directory holds ledgers and is no run."""
    return directory.is_dir() and not is_run(directory) and bool(ledger_files(directory))


def holds_records(directory: Path) -> bool:
    """Whether a directory holds a run or ledgers."""
    return is_run(directory) or is_ledger(directory)


def event_files(directory: Path) -> list[Path]:
    """The files beside the ledgers that hold diagnoses; not every ledger has one."""
    return [path.with_name(f"{rollout_of(path)}{EVENTS_SUFFIX}") for path in ledger_files(directory)]


def broken_events(directory: Path) -> list[str]:
    """One sentence for each diagnosis that cannot be read; it costs itself and not the calls."""
    return [words for path in event_files(directory) for words in scan_lines(path).broken]


def rollout_of(path: Path) -> str:
    """The rollout a ledger file belongs to."""
    return path.name.removesuffix(SUFFIX)


def ledger_rows(path: Path) -> list[dict[str, Any]]:
    """The calls of one ledger file, in the order they were recorded, `order` from 1.

    Raises RunStoreError, naming file and line, for what is no row.
    """
    rollout_id = rollout_of(path)
    calls = []
    for order, row in enumerate(read_lines(path), start=1):
        try:
            parsed = parse_row(path, order, row)
        except LedgerCorrupt as error:
            raise RunStoreError(str(error)) from error
        calls.append(_call(rollout_id, row, parsed, order))
    _add_drift(path, calls)
    staged = [call for call in calls if call["disposition"] == "staged"]
    for index, call in enumerate([*staged, *(call for call in calls if call["disposition"] == "failed")]):
        call["manifest_index"] = index
    return calls


class Ledgers:
    """The ledgers of a directory with the diagnoses beside them. What of a file cannot be read is found out once, until
    it is another file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._broken: dict[Path, tuple[Signature | None, list[str]]] = {}

    def files(self) -> list[Path]:
        """Ledgers, then diagnoses, each by rollout."""
        return [*ledger_files(self._directory), *event_files(self._directory)]

    def calls(self) -> dict[str, list[dict[str, Any]]]:
        """The calls of every ledger that can be read, by rollout."""
        recorded: dict[str, list[dict[str, Any]]] = {}
        for path in ledger_files(self._directory):
            before = signature(path)
            try:
                recorded[rollout_of(path)] = ledger_rows(path)
                self._broken[path] = (before, [])
            except (RunStoreError, OSError) as error:
                self._broken[path] = (before, scan_lines(path).broken or [str(error)])
        return recorded

    def broken(self, rollout_id: str | None = None) -> list[str]:
        """One sentence for each line that cannot be read (of a ledger whose lines are no rows: for the first), of all
        ledgers and diagnoses or those of one rollout. What is wrong behind a row's call id is found with the calls: to
        look for it in every row takes as long as to read them."""
        told = []
        for path in self.files():
            if rollout_id is not None and path.name not in (f"{rollout_id}{SUFFIX}", f"{rollout_id}{EVENTS_SUFFIX}"):
                continue
            now = signature(path)
            if path not in self._broken or self._broken[path][0] != now:
                self._broken[path] = (now, _broken_lines(path))
            told += self._broken[path][1]
        return told


def _broken_lines(path: Path) -> list[str]:
    try:
        lines = scan_lines(path)
        is_ledger = not lines.broken and path.name.endswith(SUFFIX)
        if is_ledger and not all(isinstance(row.get("model_call_id"), str) for row in lines.rows):
            ledger_rows(path)
    except (RunStoreError, OSError) as error:
        return [str(error)]
    return lines.broken


def known_calls(recorded: list[dict[str, Any]], stored: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of one rollout: ledger rows with what the finalizer stored about them (`stored`, by call id), and what
    each call is to the trajectory; stored calls that no ledger row names come last."""
    calls = [{**row, **_known(stored.get(row["model_call_id"], {}))} for row in recorded]
    named = {row["model_call_id"] for row in recorded}
    late = sorted((row for call_id, row in stored.items() if call_id not in named), key=_manifest_order)
    calls += [{**row, "order": len(calls) + i} for i, row in enumerate(late, start=1)]
    on_chain = {call["model_call_id"] for call in calls if call.get("on_chain")}
    for call, word in zip(calls, relate(calls, on_chain), strict=True):
        call["relation"] = word
    return calls


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _manifest_order(row: dict[str, Any]) -> int:
    return row["manifest_index"] if row["manifest_index"] is not None else 2**31


def _add_drift(path: Path, calls: list[dict[str, Any]]) -> None:
    """What the gateway noted about unresolved calls, from the events beside the ledger, where there are any."""
    noted = {
        event.get("model_call_id"): event
        for event in scan_lines(path.with_name(f"{rollout_of(path)}{EVENTS_SUFFIX}")).rows
        if event.get("kind") == "drift" and isinstance(event.get("model_call_id"), str)
    }
    for call in calls:
        event = noted.get(call["model_call_id"])
        if event is not None and call["disposition"] == "failed":
            call["near_call_id"] = event.get("nearest_call")
            call["near_item"] = event.get("position")
            call["near_path"], call["near_was"], call["near_came"] = (event.get(n) for n in ("path", "was", "came"))
            call["drift"] = event.get("detail")


def _call(rollout_id: str, row: dict[str, Any], parsed: CustodyRow | FailureRow, order: int) -> dict[str, Any]:
    call: dict[str, Any] = {"rollout_id": rollout_id, "model_call_id": row["model_call_id"], "order": order}
    if isinstance(parsed, FailureRow):
        return call | {"disposition": "failed", "failure_reason": parsed.reason, "detail": parsed.detail}
    call |= {name: row.get(name) for name in _SAME}
    return call | {"disposition": "staged", "digest": row.get("staging_digest")}
