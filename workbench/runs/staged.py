"""Staged: a stored call as the record that was staged, so that every digest can be recomputed from it.

In: a row of the calls table, arrays included. Out: a `StagedCall`, digests unchecked. Invariant: the recorded fields,
and where the fetched call differed from them (`snapshot`), its own: what was wrong then is still wrong.
Not here: recomputing (`workbench.wire`), comparing a whole run (`campaign.verify_run`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from workbench.wire import StagedCall

_CALL_FIELDS = tuple(
    name
    for name in StagedCall.model_fields
    if name not in ("extras", "token_ids_delta", "token_mask_delta") and name != "generation_log_probs_delta"
)


def staged_call(row: dict[str, Any]) -> StagedCall:
    """The staged call as it was fetched; `row` is one of table `calls` whose `staging` is `fetched`."""
    fields = {name: row[name] for name in _CALL_FIELDS}
    fields |= orjson.loads(row["snapshot"] or "{}")
    return StagedCall.unverified(
        **fields,
        extras=None if row["extras"] is None else orjson.loads(row["extras"]),
        token_ids_delta=np.asarray(row["token_ids"], dtype=np.uint64),
        token_mask_delta=np.asarray(row["token_mask"], dtype=np.float32),
        generation_log_probs_delta=np.asarray(row["logprobs"], dtype=np.float32),
    )
