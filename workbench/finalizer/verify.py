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
from typing import NoReturn

import numpy as np

from workbench.errors import ReceiptRejected, WireError
from workbench.wire import (
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    CallRecord,
    Cause,
    RolloutReceipt,
    StagedCall,
)
from workbench.wire.digests import (
    chain_encoded_ids,
    check_shape,
    check_versions,
    hash_call_columns,
    mask_and_logprobs,
    prefix_hasher,
)
from workbench.wire.encoding import big_endian, token_array

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


@dataclass
class _Checked:
    """One staged call whose digest was recomputed, with its columns."""

    record: CallRecord
    ids: np.ndarray  # uint64[T]
    mask: np.ndarray  # float32[T]
    logprobs: np.ndarray  # float32[T]
    carry: int | None  # None where the mask is not carry-then-generation


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
    checked: dict[str, _Checked] = {}
    for record, staged in zip(receipt.manifest, staged_calls, strict=True):
        if not isinstance(staged, StagedCall):
            raise TypeError(f"staged calls must be StagedCall records, got {type(staged).__name__}")
        if staged.model_call_id in checked:
            _reject(Cause.DUPLICATE_SNAPSHOT, staged.model_call_id, "the same staged call came twice")
        if staged.model_call_id not in records:
            _reject(Cause.SNAPSHOT_IDENTITY_MISMATCH, staged.model_call_id, "it is not in the manifest")
        if staged.model_call_id != record.model_call_id:
            _reject(
                Cause.SNAPSHOT_ORDER_MISMATCH,
                record.model_call_id,
                f"{staged.model_call_id} came in the place of staging key {record.staging_key}",
            )
        _check_fields(receipt, record, staged)
        checked[staged.model_call_id] = _recompute(record, staged)
    _check_graph(records)
    return _linearize(receipt, records, checked)


def _reject(cause: Cause, call_id: str | None, detail: str, position: int | None = None) -> NoReturn:
    raise ReceiptRejected(cause, call_id=call_id, position=position, detail=detail)


def _check_receipt(receipt: RolloutReceipt, staged_calls: Sequence[StagedCall]) -> None:
    for cause, came, expected in (
        (Cause.UNSUPPORTED_SCHEMA, receipt.schema_version, SCHEMA_VERSION),
        (Cause.UNSUPPORTED_DIGEST, receipt.digest_version, DIGEST_VERSION),
        (Cause.UNSUPPORTED_EXTRAS_DIGEST, receipt.extras_digest_version, EXTRAS_DIGEST_VERSION),
    ):
        if came != expected:
            _reject(cause, None, f"the receipt of {receipt.rollout_id} says {came}, this code reads {expected}")
    # The detail of these two is the receipt's own reason, word for word: it is the primary cause that is counted.
    if receipt.failure_reason is not None:
        _reject(Cause.ROLLOUT_FAILED, None, receipt.failure_reason)
    if receipt.capture_poisoned:
        _reject(Cause.CAPTURE_POISONED, None, receipt.terminal_attribution_reason or "")
    if not receipt.manifest:
        _reject(Cause.EMPTY_MANIFEST, None, f"the receipt of {receipt.rollout_id} lists no call")
    call_ids: set[str] = set()
    keys: set[str] = set()
    for record in receipt.manifest:
        if record.model_call_id in call_ids:
            _reject(Cause.DUPLICATE_MANIFEST_ROW, record.model_call_id, "two manifest rows carry this id")
        if record.staging_key in keys:
            _reject(Cause.DUPLICATE_STAGING_KEY, record.model_call_id, f"{record.staging_key} is named twice")
        call_ids.add(record.model_call_id)
        keys.add(record.staging_key)
    if len(staged_calls) != len(receipt.manifest):
        detail = f"{len(staged_calls)} staged calls came for {len(receipt.manifest)} manifest rows"
        _reject(Cause.ROW_COUNT_MISMATCH, None, detail)


def _check_fields(receipt: RolloutReceipt, record: CallRecord, staged: StagedCall) -> None:
    call_id = record.model_call_id
    if staged.rollout_id != receipt.rollout_id:
        detail = f"the staged call belongs to {staged.rollout_id}, the receipt to {receipt.rollout_id}"
        _reject(Cause.WRONG_ROLLOUT, call_id, detail)
    came, expected = _fields_of(staged), _fields_of(record)
    versions = _versions_of(receipt)
    if came == expected and came[-3:] == versions:
        return
    for name, staged_value, value in zip(_FIELDS, came, expected, strict=True):
        if staged_value != value:
            _reject(Cause(f"wrong_{name}"), call_id, f"staged {staged_value!r}, manifest {value!r}")
        if name in _VERSIONS and staged_value != getattr(receipt, name):
            _reject(Cause(f"wrong_{name}"), call_id, f"staged {staged_value!r}, receipt {getattr(receipt, name)!r}")


def _recompute(record: CallRecord, staged: StagedCall) -> _Checked:
    call = staged.model_call_id
    try:
        check_versions(staged.schema_version, staged.digest_version, staged.extras_digest_version, f"call {call}")
        check_shape(
            staged.rollout_id,
            call,
            staged.parent_call_id,
            staged.mode,
            staged.prev_len,
            staged.delta_len,
            staged.cum_len,
            f"call {call}",
        )
        ids_T = token_array(staged.token_ids_delta, "token ids")
        mask_T, logprobs_T = staged.token_mask_delta, staged.generation_log_probs_delta
        carry = _plain_carry(mask_T, logprobs_T)
        if carry is None:
            mask_T, logprobs_T = mask_and_logprobs(mask_T, logprobs_T, f"call {call}", strict=False)
        digest = hash_call_columns(
            rollout_id=staged.rollout_id,
            model_call_id=call,
            parent_call_id=staged.parent_call_id,
            mode=staged.mode,
            prev_len=staged.prev_len,
            delta_len=staged.delta_len,
            cum_len=staged.cum_len,
            weight_version=staged.weight_version,
            ids_be_T=big_endian(ids_T),
            mask_be_T=big_endian(mask_T),
            logprobs_be_T=big_endian(logprobs_T),
            extras_digest=staged.extras_digest,
            chain_hash=staged.chain_hash,
            cumulative_hash=staged.cumulative_hash,
        )
    except WireError as error:
        _reject(Cause.INVALID_SNAPSHOT, call, str(error))
    if digest != staged.digest:
        _reject(Cause.CORRUPT_DIGEST, call, f"contents give {digest}, the staged call says {staged.digest}")
    return _Checked(record, ids_T, mask_T, logprobs_T, carry)


def _plain_carry(mask_T: np.ndarray, logprobs_T: np.ndarray) -> int | None:
    """Length of the carry when both columns are float32, finite and carry-then-generation; None to look closer."""
    for column in (mask_T, logprobs_T):
        if not isinstance(column, np.ndarray) or column.dtype != np.float32 or column.ndim != 1:
            return None
    size = mask_T.size
    sampled_T = mask_T == 1.0
    carry = size - int(np.count_nonzero(sampled_T))
    if np.count_nonzero(sampled_T[carry:]) != size - carry or np.count_nonzero(mask_T[:carry]):
        return None
    if np.count_nonzero(logprobs_T[:carry]) or np.count_nonzero(np.isfinite(logprobs_T)) != size:
        return None
    return carry


def _check_graph(records: dict[str, CallRecord]) -> None:
    reaches_end: set[str] = set()
    for call_id, record in records.items():
        parent_id = record.parent_call_id
        if parent_id is not None:
            parent = records.get(parent_id)
            if parent is None:
                _reject(Cause.MISSING_PARENT, call_id, f"its parent {parent_id} is not in the manifest")
            if parent.cum_len != record.prev_len:
                detail = f"it begins at {record.prev_len}, its parent {parent_id} ends at {parent.cum_len}"
                _reject(Cause.PARENT_LENGTH_MISMATCH, call_id, detail)
        walked: set[str] = set()
        cursor: CallRecord | None = record
        while cursor is not None and cursor.model_call_id not in reaches_end:
            if cursor.model_call_id in walked:
                _reject(Cause.LINEAGE_CYCLE, call_id, f"its parents lead back to {cursor.model_call_id}")
            walked.add(cursor.model_call_id)
            cursor = records.get(cursor.parent_call_id) if cursor.parent_call_id is not None else None
        reaches_end |= walked


def _linearize(receipt: RolloutReceipt, records: dict[str, CallRecord], checked: dict[str, _Checked]) -> LinearizedRow:
    chain = _terminal_chain(receipt, records, checked)
    running: str | None = None
    cumulative = prefix_hasher(sum(link.ids.size for link in chain))
    version_spans: list[tuple[str, int, int, int]] = []
    link_spans: list[tuple[str, int, int]] = []
    end = 0
    for link in chain:
        record, call_id = link.record, link.record.model_call_id
        # Encoded a second time rather than kept from the first: fresh memory costs more than the conversion.
        ids_be_T = big_endian(link.ids)
        cumulative.update(ids_be_T.data)
        running = chain_encoded_ids(running, ids_be_T)
        if running != record.chain_hash:
            detail = f"the deltas up to here chain to {running}, the manifest says {record.chain_hash}"
            _reject(Cause.CHAIN_HASH_MISMATCH, call_id, detail)
        carry = _carry(link)
        start, end = end, end + record.delta_len
        version_spans.append((call_id, start, end, record.weight_version))
        link_spans.append((call_id, carry, record.delta_len - carry))
    mask_T = np.concatenate([link.mask for link in chain])
    if not mask_T.any():
        _reject(Cause.EMPTY_TRAINING_ROW, receipt.terminal_model_call_id, "the chain holds no sampled token")
    terminal = chain[-1].record
    if cumulative.hexdigest() != terminal.cumulative_hash:
        came = cumulative.hexdigest()
        detail = f"the {end} linearised ids hash to {came}, the manifest says {terminal.cumulative_hash}"
        _reject(Cause.CUMULATIVE_HASH_MISMATCH, terminal.model_call_id, detail)
    return LinearizedRow(
        rollout_id=receipt.rollout_id,
        token_ids=np.concatenate([link.ids for link in chain]),
        token_mask=mask_T,
        logprobs=np.concatenate([link.logprobs for link in chain]),
        model_call_ids=[link.record.model_call_id for link in chain],
        prompt_len=link_spans[0][1],
        weight_versions=[link.record.weight_version for link in chain],
        weight_version_spans=version_spans,
        link_spans=link_spans,
        extras_commitments=[(link.record.model_call_id, link.record.extras_digest) for link in chain],
    )


def _terminal_chain(
    receipt: RolloutReceipt, records: dict[str, CallRecord], checked: dict[str, _Checked]
) -> list[_Checked]:
    terminal = receipt.terminal_model_call_id
    if terminal is None or terminal not in records:
        _reject(Cause.MISSING_TERMINAL, terminal, "the receipt names no terminal call of its manifest")
    chain: list[_Checked] = []
    cursor: str | None = terminal
    while cursor is not None:
        chain.append(checked[cursor])
        cursor = records[cursor].parent_call_id
    chain.reverse()
    return chain


def _carry(link: _Checked) -> int:
    """Length of the carry. Rejects a mask that goes back to 0 after a 1, and a call without a sampled token."""
    call_id, size = link.record.model_call_id, link.mask.size
    carry = link.carry
    if carry is None:
        sampled = np.flatnonzero(link.mask)
        carry = int(sampled[0]) if sampled.size else size
        back = np.flatnonzero(link.mask[carry:] != 1.0)
        if back.size:
            position = carry + int(back[0])
            _reject(Cause.INVALID_MASK_ORDER, call_id, "a carried token stands after a sampled one", position)
    if carry == size:
        _reject(Cause.EMPTY_GENERATION, call_id, f"none of its {size} tokens was sampled")
    return carry
