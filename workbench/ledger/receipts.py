"""Receipts: one finished rollout, ready to be verified or to be put aside with its reason.

    manifest → is anything uncaptured that could matter? → which call is the terminal one? → RolloutReceipt

Invariant: an unpoisoned receipt names one terminal call, and every call on its chain is in custody. A receipt that is
poisoned carries its primary cause in `failure_reason`, as a word of `Cause`.
The one carve-out: a call that ended before any completion existed (`request_finished_without_staged_coordinates`) can
have no children, so off the terminal chain it does not poison.
Not here: digests (verifier), the witnesses themselves (attribution), the guess without them (heuristic).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.ledger.attribution import attribute_terminal
from workbench.ledger.heuristic import SELECTED, select_terminal
from workbench.wire import CallRecord, Cause, RolloutManifest, RolloutReceipt

OnNoWitness = Literal["refuse", "mask", "heuristic"]

HARMLESS_OFF_CHAIN = Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES


@dataclass(frozen=True)
class Terminal:
    """Which call ends the trajectory: by `selection` (`declared`, `response_id`, `content`, `heuristic`), or none for
    `cause`. `reason` is what the witnesses said."""

    call_id: str | None
    selection: str | None
    reason: str
    cause: Cause | None


def choose_terminal(
    records: list[CallRecord],
    response: Mapping[str, Any] | None = None,
    declared_response_id: str | None = None,
    on_no_witness: OnNoWitness = "mask",
) -> Terminal:
    """Attribute the terminal call; where nobody bears witness, guess it or give none.

    The heuristic runs when neither a response nor a declared id was given, unless `on_no_witness` is `refuse`. A
    response that matched nothing is no witness either, but suspicious: then only `heuristic` lets it run. A failed
    declaration, several different matches and a disagreement never fall back.
    """
    attribution = attribute_terminal(records, response, declared_response_id)
    if attribution.terminal is not None:
        return Terminal(attribution.terminal, attribution.method, attribution.reason, None)
    cause = _attribution_cause(attribution.reason)
    nobody_spoke = response is None and not declared_response_id
    may_guess = on_no_witness == "heuristic" or (nobody_spoke and on_no_witness == "mask")
    if cause is not Cause.MISSING_TERMINAL or not may_guess:
        return Terminal(None, None, attribution.reason, cause if records else Cause.NO_RECORDS)
    guess = select_terminal(records)
    reason = attribution.reason if guess.reason == SELECTED else f"{attribution.reason},{guess.reason}"
    if guess.terminal is None:
        return Terminal(None, None, reason, Cause(guess.reason))
    return Terminal(guess.terminal, "heuristic", reason, None)


def assemble_receipt(
    manifest: RolloutManifest,
    *,
    rollout_id: str,
    reward: float | None,
    response: Mapping[str, Any] | None = None,
    declared_response_id: str | None = None,
    failure_reason: str | None = None,
    on_no_witness: OnNoWitness = "mask",
) -> RolloutReceipt:
    """Turn a closed rollout's manifest and its reward into a receipt.

    `failure_reason` is the harness's own (the agent crashed, the reward could not be computed) and outranks all others.
    The primary cause of a poisoned receipt is, in this order: that; a manifest of another rollout; two different rows
    of one call, of which nobody knows which is true (`duplicate_call_id`; to witnesses a row that is there twice is
    one, and the guess takes neither); the first uncaptured call that matters; the failed choice of a terminal.
    """
    by_id = {record.model_call_id: record for record in reversed(manifest.records)}
    records = list(by_id.values())[::-1]
    terminal = choose_terminal(list(manifest.records), response, declared_response_id, on_no_witness)
    reason = failure_reason
    if reason is None and manifest.rollout_id != rollout_id:
        reason = Cause.IDENTITY_MISMATCH.value
    if reason is None and any(record != by_id[record.model_call_id] for record in manifest.records):
        reason = Cause.DUPLICATE_CALL_ID.value
    if reason is None:
        reason = _uncaptured(manifest, terminal.call_id)
    if reason is None and terminal.cause is not None:
        reason = terminal.cause.value
    return RolloutReceipt(
        rollout_id=rollout_id,
        reward=reward,
        terminal_model_call_id=terminal.call_id,
        manifest=records,
        capture_poisoned=reason is not None,
        failure_reason=reason,
        terminal_selection=terminal.selection,
        terminal_attribution_reason=terminal.reason or None,
    )


def _uncaptured(manifest: RolloutManifest, terminal: str | None) -> str | None:
    """The reason of the first failure that poisons, or None."""
    chain = calls_of_chain(manifest.records, terminal)
    for failure in manifest.failures:
        if failure.reason != HARMLESS_OFF_CHAIN or failure.model_call_id in chain:
            return failure.reason
    return None


def calls_of_chain(records: Sequence[CallRecord], terminal: str | None) -> set[str]:
    """Call ids from the terminal to the root, a parent that has no record included; none without a terminal."""
    parents = {record.model_call_id: record.parent_call_id for record in records}
    chain: set[str] = set()
    call_id = terminal
    while call_id is not None and call_id not in chain:
        chain.add(call_id)
        call_id = parents.get(call_id)
    return chain


def _attribution_cause(reason: str) -> Cause:
    for sign, cause in (
        ("declared_terminal_not_captured", Cause.DECLARED_TERMINAL_NOT_CAPTURED),
        ("declared_ambiguous", Cause.DECLARED_AMBIGUOUS),
        ("witness_disagreement", Cause.WITNESS_DISAGREEMENT),
        ("content_ambiguous", Cause.CONTENT_AMBIGUOUS),
        ("response_id_ambiguous", Cause.AMBIGUOUS_TERMINAL),
    ):
        if sign in reason:
            return cause
    return Cause.MISSING_TERMINAL
