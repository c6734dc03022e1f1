"""Resolve: which recorded call does this request continue?

    assistant fingerprint → candidates → conversation digest of each candidate's own request → same sequences collapse
    → exactly one left: resolved; no model-authored turn: root; anything else: unresolved

Invariant: an unresolved continuation is never turned into a root, for that would train policy tokens as prompt.
Cost: hashing what the request adds to an earlier one (`hashing`); the number of recorded calls does not enter.
Not here: files and locks (journal, store), why nothing matched (drift).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

import orjson

from workbench.ledger.hashing import Items, RequestHashes
from workbench.wire import FINGERPRINT_VERSION, CallRecord, CaptureAdmission
from workbench.wire.fingerprints import is_model_authored


@dataclass(frozen=True)
class CustodyRow:
    """One call in the ledger: its record and what makes it findable as a parent."""

    record: CallRecord
    fingerprint: str
    context_len: int
    context_digest: str
    staging_chain: tuple[str, ...]
    prompt_options: str | None  # digest of the template arguments; None: it had none
    row_digest: bytes  # SHA-256 of the row's content, to tell the same row from another


@dataclass(frozen=True)
class FailureRow:
    """A call that has no tokens in custody, with its wire reason."""

    model_call_id: str
    reason: str
    detail: str | None


@dataclass(frozen=True)
class Resolution:
    """The raw outcome. `prev_len` is the parent's length in tokens, `staging_chain` its staging keys root first.

    `candidates` names the calls that still matched where an `unresolved` outcome is one of ambiguity.
    """

    status: Literal["root", "resolved", "unresolved"]
    parent: str | None = None
    prev_len: int = 0
    staging_chain: tuple[str, ...] = ()
    chain_hash: str = ""
    candidates: tuple[str, ...] = ()

    @classmethod
    def to(cls, row: CustodyRow) -> Resolution:
        """Resolved to this call."""
        record = row.record
        return cls("resolved", record.model_call_id, record.cum_len, row.staging_chain, record.chain_hash)

    def admission(self, rollout_id: str, model_call_id: str) -> CaptureAdmission:
        """What a call of this outcome, root or resolved, may start from."""
        child = self.status == "resolved"
        return CaptureAdmission(
            rollout_id=rollout_id,
            model_call_id=model_call_id,
            parent_call_id=self.parent,
            prev_len=self.prev_len,
            mode="token_in" if child else "text",
            staging_chain=list(self.staging_chain),
            parent_chain_hash=self.chain_hash if child else None,
        )


@dataclass
class RolloutIndex:
    """The rows of one rollout in memory, in file order, with the look-ups that resolving needs."""

    custody: dict[str, CustodyRow] = field(default_factory=dict)
    failures: dict[str, FailureRow] = field(default_factory=dict)
    in_order: list[CustodyRow | FailureRow] = field(default_factory=list)
    by_fingerprint: dict[str, list[CustodyRow]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: CustodyRow | FailureRow) -> None:
        self.in_order.append(row)
        if isinstance(row, FailureRow):
            self.failures.setdefault(row.model_call_id, row)
        elif row.record.model_call_id not in self.custody:
            self.custody[row.record.model_call_id] = row
            # Fingerprints of another version were computed otherwise; an equal one would be chance. 0 is no version.
            if row.record.fingerprint_version in (0, FINGERPRINT_VERSION):
                self.by_fingerprint[row.fingerprint].append(row)

    def clear(self) -> None:
        self.custody.clear()
        self.failures.clear()
        self.in_order.clear()
        self.by_fingerprint.clear()


def resolve(
    index: RolloutIndex,
    request_items: Items,
    prompt_options: str | None = None,
    *,
    hashes: RequestHashes | None = None,
    repeats_continue: bool = True,
    after_response_id: str | None = None,
) -> Resolution:
    """Find the one recorded call that `request_items` continue.

    `prompt_options` is `options_digest` of whatever else shaped the prompt; a candidate must have had the same.
    Where a call answered with nothing that has a fingerprint, a request equal to its own matches it too, one that goes
    on without the answer, and one that has such an answer of a later call in it: candidates like any other by the
    contract, and none with `repeats_continue=False`.
    `after_response_id` is the response that the request itself says it continues: no other call is a candidate, and
    the outcome is never a root. `hashes` are those of `request_items`, where they were made before.
    Raises `FingerprintError` for items that have no fingerprint.
    """
    hashes = hashes or RequestHashes(request_items, {})
    fingerprint = hashes.assistant()
    if not fingerprint:
        return Resolution("root" if after_response_id is None else "unresolved")
    digests: dict[int, str] = {}
    sequences: dict[tuple[str, int], CustodyRow] = {}
    for row in index.by_fingerprint.get(fingerprint, ()):
        length = row.context_len
        if length > len(request_items) or row.prompt_options != prompt_options:
            continue
        if after_response_id not in (None, row.record.response_id):
            continue
        # What comes after the call's own request must be its answer and what the agent said then.
        if not repeats_continue and not _one_turn_first(request_items[length:]):
            continue
        if length not in digests:
            digests[length] = hashes.conversation(length)
        if digests[length] != row.context_digest:
            continue
        sequence = (row.record.cumulative_hash, row.record.cum_len)
        known = sequences.get(sequence)
        if known is None or row.record.model_call_id < known.record.model_call_id:
            sequences[sequence] = row
    if len(sequences) == 1:
        return Resolution.to(*sequences.values())
    return Resolution("unresolved", candidates=tuple(sorted(row.record.model_call_id for row in sequences.values())))


def _one_turn_first(items: Items) -> bool:
    """Whether `items` begin with a turn of the model (one or more items of it) and hold no other.

    A turn without content leaves no trace in the assistant fingerprint, so a request with one more of them, or one
    less, would match the call before it; and the prompt continues after the *last* turn.
    """
    spoke, turn_is_over = False, False
    for item in items:
        if is_model_authored(item):
            if turn_is_over:
                return False
            spoke = True
        elif item.get("type") != "reasoning":
            turn_is_over = True
    return spoke


def options_digest(options: Mapping[str, Any] | None) -> str | None:
    """SHA-256 (hex) of the canonical JSON of template arguments; None where there are none."""
    if not options:
        return None
    return sha256(orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS)).hexdigest()
