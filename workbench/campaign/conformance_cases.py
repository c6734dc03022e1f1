"""Conformance cases: run the input of one case of each kind through this code.

In: a case's name and its input, expectations taken out. Out: the result in the corpora's JSON form, for comparison.
    digests · capture · verify · terminal_heuristic · fingerprints · attribution · routes · ledger
Not here: reading files, telling kinds, comparing (`conformance`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.capture.core import CaptureCore, CaptureFailure
from workbench.errors import ReceiptRejected, WorkbenchError
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import LedgerStore, attribute_terminal, select_terminal
from workbench.wire import (
    CallRecord,
    CaptureAdmission,
    RolloutReceipt,
    StagedCall,
    assistant_fingerprint,
    chain_hash,
    classify_route_span,
    conversation_digest,
    decode_routes,
    extras_digest,
    hash_token_ids,
    staged_call_digest,
)
from workbench.wire.fingerprints import canonical_arguments

_REFUSED = {"error": True}


def _or_refused(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return {"ok": function(*arguments, **named)}
    except ValueError:  # WireError and pydantic's ValidationError are both ValueErrors
        return _REFUSED


def _digests(name: str, given: Any) -> Any:
    if name == "extras_digest":
        return _or_refused(extras_digest, given["extras"])
    if name == "staging_digest":
        floats = {key: [float(v) for v in given[key]] for key in ("token_mask_delta", "generation_log_probs_delta")}
        return _or_refused(staged_call_digest, **{**given, **floats})
    function = hash_token_ids if name == "hash_token_ids" else chain_hash
    outcome = _or_refused(function, **given)
    return outcome.get("ok", outcome)


class _Memory:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[StagedCall] = []

    def stage(self, call: StagedCall) -> None:
        self.calls.append(call)


def _capture(name: str, given: Any) -> Any:
    version = 0
    failures: list[CaptureFailure] = []
    core = CaptureCore(_Memory(), lambda: version, sink_timeout_s=None, on_failure=failures.append)
    coordinates = []
    for call in given:
        version = call["weight_version"]
        active = core.begin(CaptureAdmission.model_validate(call["admission"]))
        coords = core.complete(
            active,
            prompt_token_ids=call["prompt_token_ids"],
            generated_token_ids=call["generated_token_ids"],
            logprobs=[float(value) for value in call["generated_logprobs"]],
            extras=call["extras"],
        )
        coordinates.append(coords.model_dump(mode="json"))
    return coordinates


def _verify(name: str, given: Any) -> Any:
    try:
        receipt = RolloutReceipt.model_validate(given["receipt"])
        staged = [StagedCall.model_validate(snapshot) for snapshot in given["snapshots"]]
    except ValueError:
        return {"rejected_at": "parse"}
    try:
        row = verify_and_linearize(receipt, staged)
    except ReceiptRejected as rejected:
        return {"rejected_at": "verify", "code": str(rejected.cause)}
    return {name: _plain(value) for name, value in vars(row).items() if name != "rollout_id"}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _heuristic(name: str, given: Any) -> Any:
    selection = select_terminal([CallRecord.model_validate(record) for record in given])
    return {"terminal": selection.terminal, "reason": selection.reason}


def _fingerprints(name: str, given: Any) -> Any:
    if name == "tool_arguments":
        return _or_refused(canonical_arguments, given)
    return {
        "assistant_fingerprint": _or_refused(assistant_fingerprint, given),
        "conversation_digest": _or_refused(conversation_digest, given),
    }


def _attribution(name: str, given: Any) -> Any:
    records = [CallRecord.model_validate(record) for record in given["records"]]
    found = attribute_terminal(records, given.get("response"), given.get("declared_response_id"))
    return {"terminal": found.terminal, "method": found.method, "reason": found.reason}


def _routes(name: str, given: Any) -> Any:
    if name == "classify":
        return classify_route_span(**given)
    try:
        routes = decode_routes(given)
    except ValueError:
        return _REFUSED
    return {
        "values": routes.values.tolist(),
        "dtype": routes.dtype,
        "num_layers": routes.num_layers,
        "topk": routes.topk,
    }


def _ledger(name: str, given: Any) -> Any:
    rollout_id, operations = given
    resolutions: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="workbench-conformance-") as directory:
        store = LedgerStore(Path(directory))
        for operation in operations:
            if operation["op"] == "resolve":
                found = store.resolve(rollout_id, operation["request"])
                resolutions.append(
                    {
                        "status": found.status,
                        "parent": found.parent,
                        "staging_chain": list(found.staging_chain),
                        "prev_len": found.prev_len,
                        "chain_hash": found.chain_hash,
                    }
                )
            elif operation["op"] == "record":
                store.record(operation["commit"])
            elif operation["op"] == "record_failure":
                store.record_failure(rollout_id, operation["model_call_id"], operation["reason"])
            else:
                raise WorkbenchError(f"a ledger case has operations resolve, record, record_failure, not {operation!r}")
        manifest = store.manifest(rollout_id).model_dump(mode="json")
        # A second store reads the file afresh, as another process would.
        reread = LedgerStore(Path(directory)).manifest(rollout_id).model_dump(mode="json")
        if reread != manifest:
            return {
                "resolutions": resolutions,
                "manifest": reread,
                "file": "the manifest changes when it is read again",
            }
        file = Path(directory) / f"{rollout_id}.lineage.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {"resolutions": resolutions, "manifest": manifest, "file": text}


RUNNERS: dict[str, Callable[[str, Any], Any]] = {
    "digests": _digests,
    "capture": _capture,
    "verify": _verify,
    "terminal_heuristic": _heuristic,
    "fingerprints": _fingerprints,
    "attribution": _attribution,
    "routes": _routes,
    "ledger": _ledger,
}
