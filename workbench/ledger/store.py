"""Ledger store: who continues whom, without a single token.

    admit  → what a call may start from (resolve + the rule about histories without rows)
    record → the custody row of a call whose tokens are durable; from then on it can be a parent
    record_failure → the row of a call that has no tokens in custody
    freeze → the trajectory is closed; what comes later goes beside the ledger, never into it

Files per rollout, all in one directory that any number of processes may share:
    <rollout>.lineage.jsonl  custody and failure rows alone, byte for byte the contract's
    <rollout>.items.jsonl    digests of each call's conversation items, and shortened texts (drift diagnosis reads them)
    <rollout>.events.jsonl   drift diagnoses, late commits, seals
    <rollout>.replay.jsonl   what became of each call, for requests that come again (the gateway's, as .answers is,
                             which holds the served bytes, and .responses.jsonl)
    <rollout>.frozen         its existence closes the rollout
Invariant: a row is durable before the call that wrote it returns, and rows never change.
Not here: tokens, HTTP, which call is the terminal one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import LedgerConflict, RolloutFrozen
from workbench.ledger.drift import Drift, diagnose_drift
from workbench.ledger.hashing import Items, RequestHasher
from workbench.ledger.items import CallItems, read_items, write_items
from workbench.ledger.journal import Journal, sync_directory
from workbench.ledger.nearest_answer import nearest_answer
from workbench.ledger.resolve import (
    CustodyRow,
    FailureRow,
    Resolution,
    RolloutIndex,
    options_digest,
    resolve,
)
from workbench.ledger.rows import COMPACTION_OF, PROMPT_OPTIONS, custody_row, failure_row, parse_row, row_digest
from workbench.wire import (
    CaptureAdmission,
    Cause,
    ManifestFailure,
    RolloutCommit,
    RolloutManifest,
    check_rollout_id,
)

# Rollouts kept in memory; a colder one is read again from its file when it is asked for. A long one (500 calls) holds
# about 10 MB, most of it staging chains.
INDEXED_ROLLOUTS = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admitted:
    """What a call may start from. `admission` is None for an unresolved call, and `drift` then says why."""

    admission: CaptureAdmission | None
    resolution: Resolution
    drift: Drift | None = None
    compaction_of: str | None = None  # the call whose history this root replaces, as the agent declared
    parent_response_id: str | None = None  # what the parent call served


class _Rollout:
    """One rollout's ledger file and what is known of it in this process."""

    def __init__(self, directory: Path, rollout_id: str) -> None:
        self.lock = threading.RLock()
        self.index = RolloutIndex()
        self.hasher = RequestHasher()
        self.path = directory / f"{rollout_id}.lineage.jsonl"
        self.frozen_path = directory / f"{rollout_id}.frozen"
        self.items_path = directory / f"{rollout_id}.items.jsonl"
        self.events_path = directory / f"{rollout_id}.events.jsonl"
        self.journal = Journal(
            self.path,
            on_line=lambda number, value: self.index.add(parse_row(self.path, number, value)),
            on_reset=self.index.clear,
        )


class LedgerStore:
    """The custody ledger in `directory` (made where it is missing). Thread-safe, and safe between processes.

    Rollout ids are checked before any path is made of them (`WireError`). Every method raises `LedgerCorrupt` for a
    rollout whose file holds a complete line that cannot be read.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._lock = threading.Lock()

    def resolve(
        self, rollout_id: str, request_items: Items, prompt_options: Mapping[str, Any] | None = None
    ) -> Resolution:
        """The raw outcome for a request by the contract alone, without admitting anything."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            rollout.journal.refresh()
            hashes = rollout.hasher.hashes(request_items)
            return resolve(rollout.index, request_items, options_digest(prompt_options), hashes=hashes)

    def admit(
        self,
        rollout_id: str,
        request_items: Items,
        model_call_id: str,
        *,
        prompt_options: Mapping[str, Any] | None = None,
        dialect: str = "chat",
        replaces_response_id: str | None = None,
        after_response_id: str | None = None,
    ) -> Admitted:
        """Decide what a call starts from; an unresolved one gets its failure row and its diagnosis here.

        `replaces_response_id` declares a compacted history: the call is then a root, linked to the call that served
        that response, or unresolved where no recorded call did.
        `after_response_id` names the response that the request continues; it is then never a root.
        Raises `RolloutFrozen` after `freeze`, `FingerprintError` for items that have no fingerprint.
        """
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            self.check_open(rollout_id)
            rollout.journal.refresh()
            hashes = rollout.hasher.hashes(request_items)
            hashes.conversation(
                len(request_items)
            )  # what cannot be recorded afterwards is refused before it is generated
            if replaces_response_id is not None:
                replaced = self._serving_call(rollout, replaces_response_id)
                resolution = Resolution("root" if replaced else "unresolved")
            else:
                replaced = None
                resolution = resolve(
                    rollout.index,
                    request_items,
                    options_digest(prompt_options),
                    hashes=hashes,
                    repeats_continue=False,
                    after_response_id=after_response_id,
                )
                seeded = not rollout.index.in_order and after_response_id is None
                if resolution.status == "unresolved" and seeded:
                    # A history that this rollout was seeded with: nothing of it was sampled here.
                    resolution = Resolution("root")
            if resolution.status != "unresolved":
                parent = rollout.index.custody.get(resolution.parent or "")
                return Admitted(
                    resolution.admission(rollout_id, model_call_id),
                    resolution,
                    compaction_of=replaced,
                    parent_response_id=parent.record.response_id if parent else None,
                )
            drift = diagnose_drift(
                read_items(rollout.items_path),
                request_items,
                dialect=dialect,
                prompt_options=options_digest(prompt_options),
                candidates=resolution.candidates,
                in_custody=rollout.index.custody.keys(),
            )
            self.record_failure(rollout_id, model_call_id, Cause.UNRESOLVED_PARENT, str(drift.cause))
            self.event(rollout_id, "drift", model_call_id=model_call_id, **drift.as_dict())
            return Admitted(None, resolution, drift)

    def readmit(self, rollout_id: str, model_call_id: str, parent_call_id: str | None) -> CaptureAdmission:
        """The admission that a call was given when it was resolved to this parent (None: it is a root).

        For whoever finishes a call that another process admitted. Raises `LedgerConflict` for a parent without a row.
        """
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            rollout.journal.refresh()
            if parent_call_id is None:
                return Resolution("root").admission(rollout_id, model_call_id)
            parent = rollout.index.custody.get(parent_call_id)
            if parent is None:
                raise LedgerConflict(
                    f"{rollout.path.name}: call {model_call_id} was resolved to call {parent_call_id}, which has no "
                    "custody row."
                )
            return Resolution.to(parent).admission(rollout_id, model_call_id)

    def record(
        self,
        commit: RolloutCommit | Mapping[str, Any],
        request_items: Items | None = None,
        response_items: Items | None = None,
        *,
        prompt_options: Mapping[str, Any] | None = None,
        dialect: str = "chat",
        compaction_of: str | None = None,
    ) -> None:
        """Append the custody row of a staged call; it is durable on return. The same row again changes nothing.

        `commit` carries the items, or they are given beside it. Raises `LedgerConflict` for a different row of a
        recorded call, `RolloutFrozen` after `freeze` (the row is then kept as a late commit beside the ledger).
        """
        commit = RolloutCommit.model_validate(commit)
        request_items = commit.request_items if request_items is None else request_items
        response_items = commit.response_items if response_items is None else response_items
        rollout = self._rollout(commit.rollout_id)
        with rollout.lock:
            row = custody_row(
                commit.record,
                commit.staging_chain,
                request_items,
                response_items,
                {PROMPT_OPTIONS: options_digest(prompt_options), COMPACTION_OF: compaction_of},
                rollout.hasher.hashes(request_items),
            )
        if self._append(commit.rollout_id, row, "late_commit"):
            self.note_items(
                commit.rollout_id,
                commit.record.model_call_id,
                request_items,
                response_items,
                parent=commit.record.parent_call_id,
                dialect=dialect,
                prompt_options=prompt_options,
            )

    def fingerprint(self, rollout_id: str, request_items: Items, response_items: Items) -> str:
        """`assistant_fingerprint` of a call's request and response. Raises `FingerprintError` as it does."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            return rollout.hasher.hashes(request_items).assistant(response_items)

    def record_failure(
        self, rollout_id: str, model_call_id: str, reason: Cause | str, detail: str | None = None
    ) -> None:
        """Append a failure row. The same reason for the same call again changes nothing, whatever its detail.

        Raises `LedgerConflict` where the call has another row, `RolloutFrozen` after `freeze` (kept as `late_failure`).
        """
        self._append(rollout_id, failure_row(model_call_id, reason, detail), "late_failure")

    def manifest(self, rollout_id: str) -> RolloutManifest:
        """Records and failures of a rollout in the order they were committed. A rollout without a file has none."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            rollout.journal.refresh()
            return self._manifest(rollout_id, rollout)

    def has_row(self, rollout_id: str, model_call_id: str) -> bool:
        """Whether a call has its row, of custody or of failure."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            rollout.journal.refresh()
            return model_call_id in rollout.index.custody or model_call_id in rollout.index.failures

    def freeze(self, rollout_id: str) -> RolloutManifest:
        """Close the trajectory and return its manifest; the same one for ever after. Freezing again is a no-op."""
        rollout = self._rollout(rollout_id)
        with rollout.lock, rollout.journal.exclusive():
            if not rollout.frozen_path.exists():
                rollout.frozen_path.write_bytes(orjson.dumps({"frozen_at": time.time()}) + b"\n")
                sync_directory(self.directory)
            return self._manifest(rollout_id, rollout)

    def frozen(self, rollout_id: str) -> bool:
        return self._rollout(rollout_id).frozen_path.exists()

    def check_open(self, rollout_id: str) -> None:
        """Raise `RolloutFrozen` after `freeze`."""
        if self.frozen(rollout_id):
            raise RolloutFrozen(f"Rollout {rollout_id} is frozen: its trajectory is closed, so this call is too late.")

    def event(self, rollout_id: str, kind: str, **fields: Any) -> None:
        """Append one durable line to the rollout's events, beside the ledger."""
        rollout = self._rollout(rollout_id)
        with rollout.lock, Journal(rollout.events_path, lambda number, value: None).exclusive() as append:
            append({"kind": kind, "at": time.time(), **fields})

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        """Everything that was noted beside the ledger, in order."""
        rollout = self._rollout(rollout_id)
        events: list[dict[str, Any]] = []
        with rollout.lock:
            Journal(rollout.events_path, lambda number, value: events.append(value), events.clear).refresh()
        return events

    def nearest_answer(self, rollout_id: str, response: Mapping[str, Any]) -> str | None:
        """What a scored response that no call gave nearly is, in a sentence; None where nothing can be said."""
        return nearest_answer(read_items(self._rollout(rollout_id).items_path), response)

    def note_items(
        self,
        rollout_id: str,
        model_call_id: str,
        request_items: Items,
        response_items: Items,
        *,
        parent: str | None,
        dialect: str = "chat",
        prompt_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep digests of a served call's items, so that a later request that departs from it can be diagnosed.

        Also for calls without custody: a request that continues one of those is unresolved, and should say so. Where
        they cannot be written, a diagnosis is lost, of which the log has the reason, and neither the call nor its row.
        """
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            known = rollout.index.custody.get(parent) if parent else None
            items = CallItems.of(
                model_call_id,
                request_items,
                response_items,
                parent=parent if known else None,
                skip=known.context_len if known else 0,
                dialect=dialect,
                prompt_options=options_digest(prompt_options),
            )
            try:
                write_items(rollout.items_path, items)
            except OSError:
                logger.exception("the items of call %s/%s could not be kept", rollout_id, model_call_id)

    def _append(self, rollout_id: str, row: dict[str, Any], late_kind: str) -> bool:
        """Append unless it is there; True where the row is new and in the ledger."""
        rollout = self._rollout(rollout_id)
        call_id = row["model_call_id"]
        with rollout.lock:
            with rollout.journal.exclusive() as append:
                if self._same_row(rollout, row):
                    return False
                late = rollout.frozen_path.exists()
                if not late:
                    append(row)
            if late:
                self.event(rollout_id, late_kind, model_call_id=call_id, row=row)
                raise RolloutFrozen(
                    f"Rollout {rollout_id} is frozen: the row of call {call_id} was kept as a {late_kind} beside the "
                    "ledger and does not change the trajectory."
                )
        return True

    def _same_row(self, rollout: _Rollout, row: dict[str, Any]) -> bool:
        call_id = row["model_call_id"]
        custody, failure = rollout.index.custody.get(call_id), rollout.index.failures.get(call_id)
        if custody is None and failure is None:
            return False
        if custody is not None and custody.row_digest == row_digest(row):
            return True
        if custody is None and failure is not None and failure.reason == row.get("failure_reason"):
            return True
        there = f"the failure {failure.reason}" if custody is None and failure is not None else "a custody row"
        raise LedgerConflict(
            f"{rollout.path.name}: call {call_id} already has {there}, and a different row came for it. One call has "
            "one row; a retry needs a call id of its own."
        )

    @staticmethod
    def _serving_call(rollout: _Rollout, response_id: str) -> str | None:
        calls = [row for row in rollout.index.custody.values() if row.record.response_id == response_id]
        return calls[0].record.model_call_id if len(calls) == 1 else None

    @staticmethod
    def _manifest(rollout_id: str, rollout: _Rollout) -> RolloutManifest:
        rows = rollout.index.in_order
        return RolloutManifest(
            rollout_id=rollout_id,
            records=[row.record for row in rows if isinstance(row, CustodyRow)],
            failures=[
                ManifestFailure(model_call_id=row.model_call_id, reason=row.reason, detail=row.detail)
                for row in rows
                if isinstance(row, FailureRow)
            ],
        )

    def _rollout(self, rollout_id: str) -> _Rollout:
        check_rollout_id(rollout_id)
        with self._lock:
            rollout = self._rollouts.get(rollout_id)
            if rollout is None:
                rollout = self._rollouts[rollout_id] = _Rollout(self.directory, rollout_id)
                if len(self._rollouts) > INDEXED_ROLLOUTS:
                    self._rollouts.popitem(last=False)
            self._rollouts.move_to_end(rollout_id)
            return rollout
