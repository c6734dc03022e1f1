"""Rows: the two kinds of ledger line, as written and as read.

custody row   the call record without its version keys, `digest` renamed to `staging_digest`, plus `digest` (the
              cumulative hash), `fingerprint` of request + response, `context_len` and `context_digest` of the request,
              `staging_chain`; our own extra columns only where they have a value
failure row   `model_call_id`, `failure_reason`, and `detail` where there is one

Reading accepts columns it does not know (other writers add some) and refuses other kinds of row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from workbench.errors import LedgerCorrupt, WireError, first_fault
from workbench.ledger.hashing import Items, RequestHashes
from workbench.ledger.resolve import CustodyRow, FailureRow
from workbench.wire import (
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    CallRecord,
    Cause,
)

_VERSIONS = {
    "schema_version": SCHEMA_VERSION,
    "digest_version": DIGEST_VERSION,
    "extras_digest_version": EXTRAS_DIGEST_VERSION,
}
_RECORD_FIELDS = frozenset(CallRecord.model_fields) - _VERSIONS.keys() - {"digest"}

# Our own columns: the digest of template arguments, and the call whose history a declared compaction replaces.
PROMPT_OPTIONS = "prompt_options"
COMPACTION_OF = "compaction_of"


def custody_row(
    record: CallRecord,
    staging_chain: Sequence[str],
    request_items: Items,
    response_items: Items,
    extra: Mapping[str, Any],
    hashes: RequestHashes | None = None,
) -> dict[str, Any]:
    """The ledger row of a committed call; `hashes` are those of `request_items`, where they were made before.

    Raises `FingerprintError` for items without one, `WireError` for a call without a staging chain: no reader would
    take such a row, and the rollout's whole file with it.
    """
    if not staging_chain:
        raise WireError(f"call {record.model_call_id}: staging_chain must name the call's own key at least, got none")
    hashes = hashes or RequestHashes(request_items, {})
    row = {key: value for key, value in record.model_dump(mode="json").items() if key not in _VERSIONS}
    row["staging_digest"] = row.pop("digest")
    row["digest"] = record.cumulative_hash
    row["fingerprint"] = hashes.assistant(response_items)
    row["context_len"] = len(request_items)
    row["context_digest"] = hashes.conversation(len(request_items))
    row["staging_chain"] = list(staging_chain)
    row.update((key, value) for key, value in extra.items() if value is not None)
    return row


def failure_row(model_call_id: str, reason: Cause | str, detail: str | None = None) -> dict[str, Any]:
    """The ledger row of a call without tokens in custody. Raises `WireError` for what names no call or no reason."""
    if not model_call_id or not reason:
        raise WireError(f"a failure row names a call and a reason, got {model_call_id!r} and {str(reason)!r}")
    row = {"model_call_id": model_call_id, "failure_reason": str(reason)}
    return row | ({"detail": detail} if detail else {})


def row_digest(row: dict[str, Any]) -> bytes:
    """Tells the same row from another. Every row is hashed when it is read, so not in the file's slower spelling."""
    return sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).digest()


_Name = Annotated[StrictStr, Field(min_length=1)]


class _Failure(BaseModel):
    """The columns of a failure row; others are let pass."""

    model_call_id: _Name
    failure_reason: _Name
    detail: StrictStr | None = None


class _Findable(BaseModel):
    """The columns of a custody row beside the record's own."""

    fingerprint: StrictStr
    context_len: StrictInt = Field(ge=0)
    context_digest: StrictStr
    staging_chain: tuple[_Name, ...] = Field(min_length=1)
    prompt_options: StrictStr | None = None


def parse_row(path: Path, number: int, row: Any) -> CustodyRow | FailureRow:
    """One line of a ledger. Raises `LedgerCorrupt`, naming file and line, for what is neither kind of row."""
    if not isinstance(row, dict) or not (isinstance(row.get("model_call_id"), str) and row["model_call_id"]):
        raise LedgerCorrupt(
            f"{path}, line {number}: expected a custody or failure row with a model_call_id, got {str(row)[:60]!r}. "
            "Next: keep the file, drop this rollout."
        )
    call_id = row["model_call_id"]
    try:
        if row.get("failure_reason") is not None:
            failure = _Failure.model_validate(row)
            return FailureRow(call_id, failure.failure_reason, failure.detail)
        # Older writers left these empty; such a call cannot be verified, which is a failure of the call, not the file.
        for column, reason in (
            ("response_id", Cause.LEDGER_ROW_MISSING_RESPONSE_ID),
            ("chain_hash", Cause.LEDGER_ROW_MISSING_CHAIN_HASH),
            ("cumulative_hash", Cause.LEDGER_ROW_MISSING_CHAIN_HASH),
        ):
            if not row.get(column):
                return FailureRow(call_id, str(reason), None)
        record = CallRecord.model_validate(
            {key: row[key] for key in _RECORD_FIELDS if key in row} | {"digest": row.get("staging_digest")} | _VERSIONS
        )
        findable = _Findable.model_validate(row)
    except ValidationError as error:
        raise LedgerCorrupt(
            f"{path}, line {number}: call {call_id} is no custody or failure row: {first_fault(error)}. "
            "Next: keep the file, drop this rollout."
        ) from None
    return CustodyRow(record=record, row_digest=row_digest(row), **dict(findable))
