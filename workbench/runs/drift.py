"""Drift in tokens: the first recorded token from which an unresolved request departed.

In: a run's calls (where the gateway noted which call a request nearly continues, and what differs in which item), the
stored deltas, the vocabulary. Out: one row an unresolved call, with the token where text and request part.
The gateway saw text and no ids; here the text is found again among the bytes of the recorded ids. Invariant: a token is
named only where that text stands in exactly one place; otherwise it is null.
Not here: the diagnosis itself (workbench.ledger.drift).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from workbench.errors import RunStoreError
from workbench.runs.vocabulary import Vocabulary

_COLUMNS = {
    "rollout_id": pl.String,
    "model_call_id": pl.String,
    "cause": pl.String,
    "near_call_id": pl.String,
    "near_item": pl.Int64,
    "near_path": pl.String,
    "near_was": pl.String,
    "near_came": pl.String,
    "drift": pl.String,
    "token_call_id": pl.String,
    "token_position": pl.Int64,
    "token_id": pl.UInt64,
}


def drift_frame(run: Any, rollout_id: str | None = None, limit: int = 200) -> pl.DataFrame:
    """One row an unresolved call of `run` (or of one of its rollouts), in the calls' order; tokens for the first
    `limit` of them.

    `token_position` counts from the root of the path to `near_call_id`, as `run.tokens(rollout_id, near_call_id)` does;
    `token_call_id` is the call whose delta holds it. The three are null where the deltas or the vocabulary are not
    there, or the recorded text is not found once among the tokens.
    """
    calls: pl.DataFrame = run.calls.filter(pl.col("near_call_id").is_not_null() | (pl.col("relation") == "unresolved"))
    if rollout_id is not None:
        calls = calls.filter(pl.col("rollout_id") == rollout_id)
    try:
        vocabulary = run.vocabulary()
    except (AttributeError, RunStoreError):
        vocabulary = None
    rows = []
    for number, call in enumerate(calls.rename({"detail": "cause"}).iter_rows(named=True)):
        row = {name: call.get(name) for name in _COLUMNS}
        if vocabulary is not None and number < limit:
            row |= _first_token(run, call, vocabulary)
        rows.append(row)
    return pl.DataFrame(rows, schema=_COLUMNS)


def sentences(drift: pl.DataFrame) -> list[str]:
    """One sentence a row of `drift_frame`, for a terminal."""
    told = []
    for row in drift.iter_rows(named=True):
        words = f"call {row['model_call_id']} is unresolved ({row['cause'] or 'why is not recorded'})"
        if row["near_call_id"] is not None:
            words += f": it nearly continues call {row['near_call_id']}"
        if row["drift"] is not None:
            words += f"; {row['drift']}"
        if row["token_position"] is not None:
            words += f"; first token {row['token_position']} (id {row['token_id']}) of the path to that call"
        told.append(words)
    return told


def _first_token(run: Any, call: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    if call["near_call_id"] is None or call["near_was"] is None:
        return {}
    try:
        tokens: pl.DataFrame = run.tokens(call["rollout_id"], call["near_call_id"])
    except RunStoreError:
        return {}
    position = first_differing_token(
        tokens["token_id"].to_list(), call["near_was"], call["near_came"] or "", vocabulary
    )
    if position is None:
        return {}
    found = tokens.row(position, named=True)
    return {
        "token_call_id": found["model_call_id"],
        "token_position": position,
        "token_id": found["token_id"],
    }


def first_differing_token(token_ids: list[int], was: str, came: str, vocabulary: Vocabulary) -> int | None:
    """Index of the token that holds the first byte in which `was` and `came` differ; None where `was` stands nowhere or
    in several places among the tokens.

    `was` and `came` are excerpts around one difference, `…` where they were cut. Where `came` merely ends earlier or is
    empty, the first byte that it lacks counts; where it only adds to `was`, the byte behind `was`.
    """
    expected, other = _uncut(was), _uncut(came)
    if not expected:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, other, strict=False)) if a != b), min(map(len, (expected, other)))
    )
    pieces = [vocabulary.pieces.get(i, vocabulary.special.get(i, "").encode()) for i in token_ids]
    text = b"".join(pieces)
    start = text.find(expected)
    if start < 0 or text.find(expected, start + 1) >= 0:
        return None
    ends_T = np.cumsum([len(piece) for piece in pieces])
    token = int(np.searchsorted(ends_T, start + at, side="right"))
    return token if token < len(pieces) else None


def _uncut(excerpt: str) -> bytes:
    return excerpt.removeprefix("…").removesuffix("…").encode()
