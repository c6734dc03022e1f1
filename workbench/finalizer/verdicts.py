"""Verdicts: what one rollout of a group is worth, its row or the one cause for which it has no vote.

    RolloutOutcome + staged calls ──verdict_of──▶ LinearizedRow | Rejection

Invariants: nothing about a rollout raises; behind a poisoned or failed receipt the cause is the reason that the receipt
gives; extras are checked against their digest before anything reads them.
Not here: the checks of the chain itself (verify), what a rejected rollout's row looks like (group).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.errors import ReceiptRejected, StagingError, WireError
from workbench.finalizer.messages import RolloutOutcome
from workbench.finalizer.spans import version_spans
from workbench.finalizer.verify import LinearizedRow, verify_and_linearize
from workbench.wire import Cause, RolloutReceipt, StagedCall, extras_digest
from workbench.wire.extras import ROUTED_EXPERTS

Staged = Mapping[str, StagedCall | StagingError]
"""What a fetch gave for every staging key: the call, or why it cannot be had."""

_CAUSES = frozenset(cause.value for cause in Cause)


@dataclass(frozen=True)
class Rejection:
    """Why a rollout has no vote: one primary cause, and where known the call and the token position."""

    cause: Cause
    detail: str
    call_id: str | None = None
    position: int | None = None


def verdict_of(outcome: RolloutOutcome, staged: Staged) -> LinearizedRow | Rejection:
    """The rollout's verified row with its weight-version spans, or why it has none."""
    receipt = outcome.receipt
    if receipt is None:
        cause = outcome.failure or Cause.MISSING_RECEIPT
        return Rejection(cause, outcome.detail or cause.explanation)
    if receipt.rollout_id != outcome.rollout_id:
        detail = f"the receipt that came for rollout {outcome.rollout_id} is that of {receipt.rollout_id}"
        return Rejection(Cause.IDENTITY_MISMATCH, detail)
    if outcome.failure is not None and not receipt.capture_poisoned:
        return Rejection(outcome.failure, outcome.detail or outcome.failure.explanation)
    answers = [staged[record.staging_key] for record in receipt.manifest]
    calls = [answer for answer in answers if isinstance(answer, StagedCall)]
    try:
        row = verify_and_linearize(receipt, calls)
        _check_extras(calls)
        return replace(row, weight_version_spans=version_spans(row, calls))
    except ReceiptRejected as error:
        if error.cause == Cause.ROW_COUNT_MISMATCH:
            # Rows are missing because they could not be read: that is the cause, and the key says which call.
            for record, answer in zip(receipt.manifest, answers, strict=True):
                if isinstance(answer, StagingError):
                    return Rejection(Cause(answer.cause), str(answer), record.model_call_id)
        return _primary(error, outcome, receipt)


def _check_extras(calls: list[StagedCall]) -> None:
    # The call digest covers the extras' digest only, so the extras themselves are checked where they are read.
    for call in calls:
        try:
            right = call.extras is None or extras_digest(call.extras) == call.extras_digest
        except WireError as error:
            raise ReceiptRejected(Cause.INVALID_SNAPSHOT, call_id=call.model_call_id, detail=str(error)) from error
        if not right:
            with_routes = ROUTED_EXPERTS in (call.extras or {})
            cause = Cause.ROUTE_DIGEST_MISMATCH if with_routes else Cause.CORRUPT_DIGEST
            what = "extras, routed experts among them," if with_routes else "extras"
            detail = f"its {what} do not give the extras digest {call.extras_digest}"
            raise ReceiptRejected(cause, call_id=call.model_call_id, detail=detail)


def _primary(error: ReceiptRejected, outcome: RolloutOutcome, receipt: RolloutReceipt) -> Rejection:
    """The one cause that is counted: behind a poisoned or failed receipt stands the reason it was poisoned for."""
    cause = Cause(error.cause)
    if cause not in (Cause.ROLLOUT_FAILED, Cause.CAPTURE_POISONED):
        return Rejection(cause, error.detail or cause.explanation, error.call_id, error.position)
    reason = receipt.failure_reason or ""
    if reason in _CAUSES:
        cause, reason = Cause(reason), ""
    # The failed call that poisoned it, where it was one: its detail is the worker's typed cause.
    failed = next((failure for failure in outcome.failures if failure.reason == cause), None)
    agent = outcome.detail if outcome.failure is not None or receipt.terminal_attribution_reason is None else None
    witnesses = receipt.terminal_attribution_reason
    if cause is Cause.MISSING_TERMINAL and outcome.failure is None and witnesses and outcome.detail:
        witnesses = f"{witnesses}; {outcome.detail}"
    said = reason or (failed.detail if failed else None) or agent or witnesses
    return Rejection(cause, said or cause.explanation, failed.model_call_id if failed else None)


def own_calls(outcome: RolloutOutcome, staged: Staged) -> list[StagedCall]:
    """The rollout's calls that could be fetched, in manifest order."""
    records = outcome.receipt.manifest if outcome.receipt else []
    return [call for record in records if isinstance(call := staged[record.staging_key], StagedCall)]
