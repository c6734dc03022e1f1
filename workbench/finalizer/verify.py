"""Verify and linearise: turn one receipt and its staged deltas into one flat training row, or say why not.

In: a receipt and its staged calls in manifest order. Out: ids_T, mask_T, logprobs_T of the terminal chain, and spans.
Invariants: ids_T equals the terminal call's engine prompt + sampled ids, id for id; every digest was recomputed here;
the order of the checks is part of the contract, so a receipt with several faults has the same cause everywhere.
Not here: choosing the terminal (`ledger`), fetching (`capture.staging`), placeholders and rows (`group`).

Side branches are checked for identity, digest and graph; chain hash and mask order only along the terminal chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from workbench.errors import ReceiptRejected
from workbench.finalizer.links import Joined, Link, carry_of, check_digest, checked_link, reject
from workbench.wire import (
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    CallRecord,
    Cause,
    RolloutReceipt,
    StagedCall,
)
from workbench.wire.digests import chain_encoded_ids, hash_encoded_ids

_FIELDS = (
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
    "schema_version",
    "digest_version",
    "extras_digest_version",
)
_fields_of = attrgetter(*_FIELDS)
_VERSIONS = _FIELDS[-3:]
_versions_of = attrgetter(*_VERSIONS)


@dataclass(frozen=True)
class LinearizedRow:
    """One verified trajectory of T tokens, root first.

    token_ids uint64[T]; token_mask float32[T], 1 where sampled; logprobs float32[T] in nats, 0 where carried.
    prompt_len is the root's carry. weight_version_spans `(call, start, end, version)` over row positions; link_spans
    `(call, carry, generated)` in tokens; extras_commitments `(call, extras digest)`, to be checked by whoever reads
    the extras.
    """

    rollout_id: str
    token_ids: np.ndarray
    token_mask: np.ndarray
    logprobs: np.ndarray
    model_call_ids: list[str]
    prompt_len: int
    weight_versions: list[int]
    weight_version_spans: list[tuple[str, int, int, int]]
    link_spans: list[tuple[str, int, int]]
    extras_commitments: list[tuple[str, str]]


def verify_and_linearize(receipt: RolloutReceipt, staged_calls: Sequence[StagedCall]) -> LinearizedRow:
    """Check everything a receipt claims and return the terminal chain as one row.

    `staged_calls` holds one call for every manifest row, side branches too, in manifest order. Raises ReceiptRejected
    with `.cause` (a `Cause`), `.call_id` and, where a token is to blame, `.position` in that call's delta; TypeError
    for arguments that are no records.
    """
    if not isinstance(receipt, RolloutReceipt):
        raise TypeError(f"receipt must be a RolloutReceipt, got {type(receipt).__name__}")
    _check_receipt(receipt, staged_calls)
    records = {record.model_call_id: record for record in receipt.manifest}
    links: dict[str, Link] = {}
    fault: ReceiptRejected | None = None
    for record, staged in zip(receipt.manifest, staged_calls, strict=True):
        try:
            _check_identity(records, links, record, staged)
            _check_fields(receipt, record, staged)
            links[staged.model_call_id] = checked_link(record, staged)
        except ReceiptRejected as error:
            fault = error
            break
    if links:
        joined = Joined.of(list(links.values()))
        for link in links.values():
            check_digest(link, joined)
    if fault is not None:  # the rows before it come first, their digests too
        raise fault
    _check_graph(records)
    chain = _terminal_chain(receipt, records, links)
    if len(chain) != len(links) or chain != list(links.values()):
        joined = Joined.of(chain)
    return _linearize(receipt, chain, joined)


def _check_receipt(receipt: RolloutReceipt, staged_calls: Sequence[StagedCall]) -> None:
    for cause, came, expected in (
        (Cause.UNSUPPORTED_SCHEMA, receipt.schema_version, SCHEMA_VERSION),
        (Cause.UNSUPPORTED_DIGEST, receipt.digest_version, DIGEST_VERSION),
        (Cause.UNSUPPORTED_EXTRAS_DIGEST, receipt.extras_digest_version, EXTRAS_DIGEST_VERSION),
    ):
        if came != expected:
            reject(cause, None, f"the receipt of {receipt.rollout_id} says {came}, this code reads {expected}")
    # The detail of these two is the receipt's own reason, word for word: it is the primary cause that is counted.
    if receipt.failure_reason is not None:
        reject(Cause.ROLLOUT_FAILED, None, receipt.failure_reason)
    if receipt.capture_poisoned:
        reject(Cause.CAPTURE_POISONED, None, receipt.terminal_attribution_reason or "")
    if not receipt.manifest:
        reject(Cause.EMPTY_MANIFEST, None, f"the receipt of {receipt.rollout_id} lists no call")
    call_ids: set[str] = set()
    keys: set[str] = set()
    for record in receipt.manifest:
        if record.model_call_id in call_ids:
            reject(Cause.DUPLICATE_MANIFEST_ROW, record.model_call_id, "two manifest rows carry this id")
        if record.staging_key in keys:
            reject(Cause.DUPLICATE_STAGING_KEY, record.model_call_id, f"{record.staging_key} is named twice")
        call_ids.add(record.model_call_id)
        keys.add(record.staging_key)
    if len(staged_calls) != len(receipt.manifest):
        detail = f"{len(staged_calls)} staged calls came for {len(receipt.manifest)} manifest rows"
        reject(Cause.ROW_COUNT_MISMATCH, None, detail)


def _check_identity(
    records: dict[str, CallRecord], links: dict[str, Link], record: CallRecord, staged: StagedCall
) -> None:
    if not isinstance(staged, StagedCall):
        raise TypeError(f"staged calls must be StagedCall records, got {type(staged).__name__}")
    if staged.model_call_id in links:
        reject(Cause.DUPLICATE_SNAPSHOT, staged.model_call_id, "the same staged call came twice")
    if staged.model_call_id not in records:
        reject(Cause.SNAPSHOT_IDENTITY_MISMATCH, staged.model_call_id, "it is not in the manifest")
    if staged.model_call_id != record.model_call_id:
        reject(
            Cause.SNAPSHOT_ORDER_MISMATCH,
            record.model_call_id,
            f"{staged.model_call_id} came in the place of staging key {record.staging_key}",
        )


def _check_fields(receipt: RolloutReceipt, record: CallRecord, staged: StagedCall) -> None:
    call_id = record.model_call_id
    if staged.rollout_id != receipt.rollout_id:
        detail = f"the staged call belongs to {staged.rollout_id}, the receipt to {receipt.rollout_id}"
        reject(Cause.WRONG_ROLLOUT, call_id, detail)
    came, expected = _fields_of(staged), _fields_of(record)
    versions = _versions_of(receipt)
    if came == expected and came[-3:] == versions:
        return
    for name, staged_value, value in zip(_FIELDS, came, expected, strict=True):
        if staged_value != value:
            reject(Cause(f"wrong_{name}"), call_id, f"staged {staged_value!r}, manifest {value!r}")
        if name in _VERSIONS and staged_value != getattr(receipt, name):
            reject(Cause(f"wrong_{name}"), call_id, f"staged {staged_value!r}, receipt {getattr(receipt, name)!r}")


def _check_graph(records: dict[str, CallRecord]) -> None:
    reaches_end: set[str] = set()
    for call_id, record in records.items():
        parent_id = record.parent_call_id
        if parent_id is not None:
            parent = records.get(parent_id)
            if parent is None:
                reject(Cause.MISSING_PARENT, call_id, f"its parent {parent_id} is not in the manifest")
            if parent.cum_len != record.prev_len:
                detail = f"it begins at {record.prev_len}, its parent {parent_id} ends at {parent.cum_len}"
                reject(Cause.PARENT_LENGTH_MISMATCH, call_id, detail)
        walked: set[str] = set()
        cursor: CallRecord | None = record
        while cursor is not None and cursor.model_call_id not in reaches_end:
            if cursor.model_call_id in walked:
                reject(Cause.LINEAGE_CYCLE, call_id, f"its parents lead back to {cursor.model_call_id}")
            walked.add(cursor.model_call_id)
            cursor = records.get(cursor.parent_call_id) if cursor.parent_call_id is not None else None
        reaches_end |= walked


def _terminal_chain(receipt: RolloutReceipt, records: dict[str, CallRecord], links: dict[str, Link]) -> list[Link]:
    terminal = receipt.terminal_model_call_id
    if terminal is None or terminal not in records:
        reject(Cause.MISSING_TERMINAL, terminal, "the receipt names no terminal call of its manifest")
    chain: list[Link] = []
    cursor: str | None = terminal
    while cursor is not None:
        chain.append(links[cursor])
        cursor = records[cursor].parent_call_id
    chain.reverse()
    return chain


def _linearize(receipt: RolloutReceipt, chain: list[Link], joined: Joined) -> LinearizedRow:
    """The row of a chain whose columns are `joined`, which is used up."""
    running: str | None = None
    version_spans: list[tuple[str, int, int, int]] = []
    link_spans: list[tuple[str, int, int]] = []
    for link in chain:
        record, call_id = link.record, link.record.model_call_id
        running = chain_encoded_ids(running, joined.ids[link.span])
        if running != record.chain_hash:
            detail = f"the deltas up to here chain to {running}, the manifest says {record.chain_hash}"
            reject(Cause.CHAIN_HASH_MISMATCH, call_id, detail)
        carry = carry_of(link)
        version_spans.append((call_id, link.start, link.start + record.delta_len, record.weight_version))
        link_spans.append((call_id, carry, record.delta_len - carry))
    # Never an empty training row: each of its calls has sampled something, or was refused as an empty generation.
    terminal = chain[-1].record
    came = hash_encoded_ids(joined.ids)
    if came != terminal.cumulative_hash:
        detail = f"the {joined.ids.size} linearised ids hash to {came}, the manifest says {terminal.cumulative_hash}"
        reject(Cause.CUMULATIVE_HASH_MISMATCH, terminal.model_call_id, detail)
    ids_T, mask_T, logprobs_T = joined.into_native()
    return LinearizedRow(
        rollout_id=receipt.rollout_id,
        token_ids=ids_T,
        token_mask=mask_T,
        logprobs=logprobs_T,
        model_call_ids=[link.record.model_call_id for link in chain],
        prompt_len=link_spans[0][1],
        weight_versions=[link.record.weight_version for link in chain],
        weight_version_spans=version_spans,
        link_spans=link_spans,
        extras_commitments=[(link.record.model_call_id, link.record.extras_digest) for link in chain],
    )
