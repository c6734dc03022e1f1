"""Speech: commits of made-up calls with right shapes, for tests that care about the ledger and not about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from workbench.ledger import LedgerStore
from workbench.wire import (
    FINGERPRINT_VERSION,
    CallRecord,
    RolloutCommit,
    assistant_fingerprint,
    staging_key,
)

Items = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool_call(arguments: str, name: str = "search", call_id: str = "t1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def commit(
    store: LedgerStore,
    rollout_id: str,
    call_id: str,
    request: Items,
    response: Items,
    *,
    parent: CallRecord | None = None,
    chain: Sequence[str] = (),
    sequence: str | None = None,
    admitted_at: float = 1.0,
    fingerprint_version: int = FINGERPRINT_VERSION,
    **options: Any,
) -> CallRecord:
    """Record one call of 3 tokens; `sequence` names its token sequence (calls of the same one have equal hashes)."""
    digest = sha256((sequence or f"{rollout_id}/{call_id}").encode()).hexdigest()
    prev_len = parent.cum_len if parent else 0
    record = CallRecord(
        model_call_id=call_id,
        parent_call_id=parent.model_call_id if parent else None,
        prev_len=prev_len,
        delta_len=3,
        cum_len=prev_len + 3,
        weight_version=0,
        digest=digest,
        extras_digest=digest,
        staging_key=staging_key(rollout_id, call_id),
        mode="token_in" if parent else "text",
        chain_hash=digest,
        cumulative_hash=digest,
        response_id=f"resp-{call_id}",
        admitted_at=admitted_at,
        output_fingerprint=assistant_fingerprint(response) or None,
        continuation_fingerprint=assistant_fingerprint([*request, *response]) or None,
        fingerprint_version=fingerprint_version,
    )
    row = RolloutCommit(rollout_id=rollout_id, record=record, staging_chain=[*chain, record.staging_key])
    store.record(row, request, response, **options)
    return record
