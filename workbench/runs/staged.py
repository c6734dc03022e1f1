"""Staged: a stored call as the record that was staged, so that every digest can be recomputed from it.

In: a row of the calls table, arrays included. Out: a `StagedCall`, digests unchecked. Routed experts lie in a column of
their own as plain bytes, a third smaller than in their envelope, and the extras keep the envelope's head.
Invariants: `together(*apart(extras))` gives the extras back, text for text; the recorded fields,
and where the fetched call differed from them (`snapshot`), its own: what was wrong then is still wrong.
Not here: recomputing (`workbench.wire`), comparing a whole run (`campaign.verify`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from workbench.errors import WireError
from workbench.wire import StagedCall, decode_routes, encode_routes
from workbench.wire.extras import ROUTED_EXPERTS

_CALL_FIELDS = tuple(
    name
    for name in StagedCall.model_fields
    if name not in ("extras", "token_ids_delta", "token_mask_delta") and name != "generation_log_probs_delta"
)


def staged_call(row: dict[str, Any]) -> StagedCall:
    """The staged call as it was fetched; `row` is one of table `calls` whose `staging` is `fetched`.

    Raises WireError, ValueError or TypeError for what no staged call was stored as.
    """
    fields = {name: row[name] for name in _CALL_FIELDS}
    fields |= orjson.loads(row["snapshot"] or "{}")
    extras = None if row["extras"] is None else orjson.loads(row["extras"])
    if not isinstance(extras, dict | None):
        raise WireError(f"the extras of a call are null or an object, got {type(extras).__name__}")
    return StagedCall.unverified(
        **fields,
        extras=together(extras, row["routes"]),
        token_ids_delta=np.asarray(row["token_ids"], dtype=np.uint64),
        token_mask_delta=np.asarray(row["token_mask"], dtype=np.float32),
        generation_log_probs_delta=np.asarray(row["logprobs"], dtype=np.float32),
    )


def apart(extras: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bytes | None]:
    """A call's extras as they are stored: routed experts as bytes, their envelope without its payload.

    Routes in another form than this code writes (a nested list, odd base64) stay where they are.
    """
    envelope = (extras or {}).get(ROUTED_EXPERTS)
    if extras is None or not isinstance(envelope, str):
        return extras, None
    try:
        values = decode_routes(envelope).values
        if encode_routes(values) != envelope:
            return extras, None
    except WireError:
        return extras, None
    return {**extras, ROUTED_EXPERTS: envelope[: envelope.rindex(":") + 1]}, values.tobytes()


def together(extras: dict[str, Any] | None, routes: bytes | None) -> dict[str, Any] | None:
    """The extras that were staged, from what `apart` made of them."""
    if routes is None or extras is None or ROUTED_EXPERTS not in extras:
        return extras
    return {**extras, ROUTED_EXPERTS: str(extras[ROUTED_EXPERTS]) + base64.b64encode(routes).decode("ascii")}
