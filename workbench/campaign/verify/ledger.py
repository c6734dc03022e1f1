"""Verify ledger: the custody ledgers of a stored run against the receipts that were made of them, in both directions.

In: the outcomes of a group, as stored. Out: differences. A ledger's custody rows are the receipt's manifest and its
failure rows the outcome's failures: the same calls, in the same order, every field. What came after the freeze is
beside the ledger, not in it; a rollout whose group never finished, or whose ledger could not be read then, has no
receipt and is not looked at.
What a request was is held against the digests of its items, where the run has kept them: its length and options, and
that calls that began with the same items have one `context_digest`.
Invariant: a ledger row that was added, removed, moved or changed is named, and a ledger that is missing is. Not seen: a
change of any other `context_digest`, or of `compaction_of`, of which a run has no second copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.campaign.verify.report import VerifyReport
from workbench.errors import LedgerCorrupt, RunStoreError
from workbench.finalizer.messages import RolloutOutcome
from workbench.ledger.resolve import CustodyRow, FailureRow
from workbench.ledger.rows import parse_row
from workbench.runs.custody import SUFFIX
from workbench.runs.frames import read_lines, scan_lines
from workbench.wire import CallRecord, RolloutReceipt

LEDGER = "ledger"
ITEMS_SUFFIX = ".items.jsonl"
Beginnings = dict[tuple[str, ...], list[tuple[str, str, str, Any]]]
"""Digests of the items of a first request → file, rollout, call and `context_digest` of each call that began so."""
NOT_THERE = "ledger/ not there: not compared"


def verify_ledgers(run_dir: Path, outcomes: Sequence[RolloutOutcome], report: VerifyReport) -> None:
    """Note in `report` where the ledgers of these rollouts and their receipts say different things."""
    directory = run_dir / LEDGER
    beginnings: Beginnings = defaultdict(list)
    for outcome in outcomes:
        receipt = outcome.receipt
        if receipt is None or not (receipt.manifest or outcome.failures):
            continue
        if not directory.is_dir():
            # A run may be handed on without its custody; a directory with a gap in it may not.
            if NOT_THERE not in report.not_compared:
                report.not_compared.append(NOT_THERE)
            continue
        path = directory / f"{outcome.rollout_id}{SUFFIX}"
        if not path.exists():
            calls = len(receipt.manifest) + len(outcome.failures)
            what = f"this ledger is missing, the receipt names {calls} calls of it"
            report.differs(f"{LEDGER}/{path.name}", outcome.rollout_id, None, what)
            continue
        _Ledger(path, outcome.rollout_id, report).verify(receipt, outcome, beginnings)
    _verify_beginnings(beginnings, report)


def _verify_beginnings(beginnings: Beginnings, report: VerifyReport) -> None:
    """Of calls that began with the same items, most say what their digest is."""
    for calls in beginnings.values():
        (expected, _), *_ = Counter(digest for *_, digest in calls).most_common(1)
        for file, rollout_id, call_id, digest in calls:
            if digest != expected:
                what = f"context_digest is {digest!r}, other calls of the same items have {expected!r}"
                report.differs(file, rollout_id, call_id, what)


class _Ledger:
    """One ledger file, held against one receipt."""

    def __init__(self, path: Path, rollout_id: str, report: VerifyReport) -> None:
        self.path = path
        self.rollout_id = rollout_id
        self.report = report

    def verify(self, receipt: RolloutReceipt, outcome: RolloutOutcome, beginnings: Beginnings) -> None:
        try:
            raw = read_lines(self.path)
            rows = [parse_row(self.path, number, row) for number, row in enumerate(raw, start=1)]
        except (RunStoreError, LedgerCorrupt) as error:
            self._differs(None, str(error))
            return
        custody = {
            row.record.model_call_id: (row, line)
            for row, line in reversed(list(zip(rows, raw, strict=True)))
            if isinstance(row, CustodyRow)
        }
        self._verify_places(
            [row.record.model_call_id for row in rows if isinstance(row, CustodyRow)],
            [record.model_call_id for record in receipt.manifest],
            "call",
        )
        self._verify_places(
            [(row.model_call_id, row.reason, row.detail) for row in rows if isinstance(row, FailureRow)],
            [(failure.model_call_id, failure.reason, failure.detail) for failure in outcome.failures],
            "failure",
        )
        chains = _staging_chains(receipt.manifest)
        for record in receipt.manifest:
            if record.model_call_id in custody:
                self.report.ledger_rows += 1
                self._verify_row(*custody[record.model_call_id], record, chains[record.model_call_id])
        noted = scan_lines(self.path.with_name(f"{self.rollout_id}{ITEMS_SUFFIX}")).rows
        for call_id, note in {str(note.get("model_call_id")): note for note in noted}.items():
            if call_id in custody:
                self._verify_items(custody[call_id][1], note, beginnings)

    def _differs(self, call_id: str | None, what: str) -> None:
        self.report.differs(f"{LEDGER}/{self.path.name}", self.rollout_id, call_id, what)

    def _verify_places(self, here: list[Any], named: list[Any], kind: str) -> None:
        """The same calls in the same order; an item is a call id, or a tuple that begins with one."""

        def call_id(item: Any) -> str:
            return item if isinstance(item, str) else item[0]

        def said(item: Any) -> str:
            return "" if isinstance(item, str) else f" ({', '.join(str(word) for word in item[1:] if word)})"

        for item in dict.fromkeys([*named, *here]):
            times, expected = here.count(item), named.count(item)
            if times < expected:
                self._differs(call_id(item), f"the receipt names this {kind}{said(item)}, the ledger does not")
            elif not expected:
                self._differs(call_id(item), f"the ledger has this {kind}{said(item)}, the receipt does not")
            elif times > expected:
                self._differs(call_id(item), f"the ledger has this {kind}{said(item)} {times} times")
        if here != named and sorted(map(str, here)) == sorted(map(str, named)):
            self._differs(None, f"its {kind}s are in another order than the receipt's")

    def _verify_row(self, row: CustodyRow, line: dict[str, Any], record: CallRecord, chain: list[str]) -> None:
        for name in CallRecord.model_fields:
            if getattr(row.record, name) != getattr(record, name):
                what = f"{name} is {getattr(row.record, name)!r} here, {getattr(record, name)!r} in the receipt"
                self._differs(record.model_call_id, what)
        # The columns by which a child is found again repeat what the record says.
        repeated = {"digest": record.cumulative_hash, "staging_chain": chain}
        if record.continuation_fingerprint is not None:
            repeated["fingerprint"] = record.continuation_fingerprint
        for name, expected in repeated.items():
            if line.get(name) != expected:
                what = f"column {name} is {line.get(name)!r}, the receipt gives {expected!r}"
                self._differs(record.model_call_id, what)

    def _verify_items(self, line: dict[str, Any], note: dict[str, Any], beginnings: Beginnings) -> None:
        """A row against what was noted of its request's items; a note that is none counts for nothing."""
        try:
            own: int = note["response_at"]
            found = {"context_len": note["skip"] + own, "prompt_options": note["prompt_options"]}
            items = tuple(digest for _, digest, *_ in note["items"][:own])
        except (KeyError, TypeError, ValueError):
            return
        call_id = line["model_call_id"]
        for name, expected in found.items():
            if line.get(name) != expected:
                self._differs(call_id, f"{name} is {line.get(name)!r}, the items of its request give {expected!r}")
        if not note["skip"]:
            file = f"{LEDGER}/{self.path.name}"
            beginnings[items].append((file, self.rollout_id, call_id, line.get("context_digest")))


def _staging_chains(manifest: Sequence[CallRecord]) -> dict[str, list[str]]:
    """The staging keys from the root to each call."""
    records = {record.model_call_id: record for record in manifest}
    chains: dict[str, list[str]] = {}
    for record in manifest:
        chain: list[str] = []
        at: CallRecord | None = record
        while at is not None and at.staging_key not in chain:
            chain.append(at.staging_key)
            at = records.get(at.parent_call_id) if at.parent_call_id else None
        chains[record.model_call_id] = chain[::-1]
    return chains
