"""Attribution: which recorded call produced the response that was scored.

    declared response id ┐
    the response's own id ├─ independent witnesses, each names one token sequence or none → agree, or nobody wins
    its content           ┘

Invariant: witnesses that name different sequences never elect a call, and a declared id that fails never falls back
to the others. Calls with the same sequence (equal cumulative hash, chain hash and length) are one candidate, named by
the smallest call id.
Not here: the guess from parent links when there is no witness at all (heuristic), what follows (receipts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import FingerprintError
from workbench.wire import FINGERPRINT_VERSION, CallRecord, assistant_fingerprint
from workbench.wire.fingerprints import is_model_authored

DECLARED_FAILURES = ("declared_terminal_not_captured", "declared_ambiguous")


@dataclass(frozen=True)
class Attribution:
    """`terminal` is a model call id or None, `method` `declared`, `response_id`, `content` or empty, `reason` what
    every witness had to say (`wire.causes.REASONS`), joined by commas."""

    terminal: str | None
    method: str
    reason: str


def attribute_terminal(
    records: Sequence[CallRecord], response: Mapping[str, Any] | None = None, declared_response_id: str | None = None
) -> Attribution:
    """Name the call that ends the trajectory, by witnesses.

    `response` is the scored object as it was served: a Responses object (`output`), a chat completion (`choices`) or
    an Anthropic message (`content`); anything but an object counts as none. `declared_response_id` is the id that the
    harness declares as its last; an empty one declares nothing.
    """
    witnesses: list[tuple[str, CallRecord]] = []
    remarks: list[str] = []
    if declared_response_id:
        declared = _sequences(r for r in records if r.response_id == declared_response_id)
        if len(declared) != 1:
            return Attribution(None, "", DECLARED_FAILURES[1 if declared else 0])
        witnesses.append(("declared", declared[0]))
    if not isinstance(response, Mapping):
        remarks.append("no_response_object")
    else:
        for name, candidates, remark in (
            ("response_id", *_by_response_id(records, response)),
            ("content", *_by_content(records, response)),
        ):
            if remark:
                remarks.append(remark)
            else:
                witnesses.append((name, candidates[0]))
    if not witnesses:
        return Attribution(None, "", ",".join(remarks))
    if len({_sequence(record) for _, record in witnesses}) > 1:
        named = ";".join(f"{name}={record.model_call_id}" for name, record in witnesses)
        return Attribution(None, "", ",".join([*remarks, f"witness_disagreement[{named}]"]))
    method, terminal = witnesses[0]
    if len(witnesses) > 1:
        remarks.append("corroborated_by=" + "+".join(name for name, _ in witnesses[1:]))
    return Attribution(terminal.model_call_id, method, ",".join(remarks))


def scored_items(response: Mapping[str, Any]) -> list[Any]:
    """The conversation items in a served object of any dialect; empty where it has none."""
    output = response.get("output")
    if isinstance(output, list):
        return output
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        return [] if message is None else [message]
    if response.get("role") == "assistant" and response.get("content"):
        return [{"role": "assistant", "content": response["content"]}]
    return []


def _by_response_id(records: Sequence[CallRecord], response: Mapping[str, Any]) -> tuple[list[CallRecord], str]:
    response_id = str(response.get("id") or "")
    if not response_id:
        return [], "response_has_no_id"
    found = _sequences(record for record in records if record.response_id == response_id)
    if not found:
        return [], "response_id_no_match"
    return found, "response_id_ambiguous" if len(found) > 1 else ""


def _by_content(records: Sequence[CallRecord], response: Mapping[str, Any]) -> tuple[list[CallRecord], str]:
    served = scored_items(response)
    if not served:
        return [], "response_has_no_output"
    # What is no object was authored by nobody; it does not make the rest of the response unreadable.
    items = [item for item in served if isinstance(item, dict)]
    try:
        whole = assistant_fingerprint(items)
        run = _last_authored_run(items)
        tail = assistant_fingerprint(run) if run else ""
    except FingerprintError:
        return [], "response_output_unfingerprintable"
    if not whole:
        return [], "no_model_authored_output"
    found = _sequences(
        record
        for record in records
        if record.fingerprint_version == FINGERPRINT_VERSION
        and (
            whole in (record.continuation_fingerprint, record.output_fingerprint)
            or (tail and tail == record.output_fingerprint)
        )
    )
    if not found:
        return [], "no_content_match"
    return found, "content_ambiguous" if len(found) > 1 else ""


def _last_authored_run(items: Sequence[Any]) -> list[Any]:
    """The last unbroken run of model-authored items, where others stand before it; empty where the response ends in
    another item. Reasoning is another item, as it is to the fingerprints: it breaks a run."""
    start = len(items)
    while start and is_model_authored(items[start - 1]):
        start -= 1
    return list(items[start:]) if start else []


def _sequence(record: CallRecord) -> tuple[str, str, int]:
    return (record.cumulative_hash, record.chain_hash, record.cum_len)


def _sequences(records: Iterable[CallRecord]) -> list[CallRecord]:
    """One record for each distinct token sequence, the one with the smallest call id."""
    smallest: dict[tuple[str, str, int], CallRecord] = {}
    for record in records:
        known = smallest.get(_sequence(record))
        if known is None or record.model_call_id < known.model_call_id:
            smallest[_sequence(record)] = record
    return list(smallest.values())
