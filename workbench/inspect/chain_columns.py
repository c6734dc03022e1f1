"""Chain columns: all calls of a rollout as the live chain wants them.

In: call rows and their places. Out: (words, columns) for `live.pack`, one entry a call in drawing order (a parent
before its children). Numbers are i4 with `UNKNOWN` for what nobody recorded; words that repeat are codes into tables.
Invariant: every recorded call is there, failed and unresolved ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from workbench.inspect.ids import short_id
from workbench.inspect.layout import Place

UNKNOWN = -(2**31)
_NUMBERS = ("order", "delta_len", "sampled_tokens", "cum_len", "weight_version")
_CODED = ("relation", "mode", "finish_reason", "failure_reason", "detail")


def chain_columns(
    rows: Sequence[dict[str, Any]],
    places: Sequence[Place],
    why: Callable[[dict[str, Any]], str],
    contenders: Collection[str],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Words and columns; `why(row)` is the phrase that says why a call stands where it stands, `contenders` are the ids
    of calls between which no terminal could be chosen."""
    drawn = [rows[place.call] for place in places]
    at = {place.call: index for index, place in enumerate(places)}
    columns = {
        "row": np.array([place.row for place in places], dtype=np.int32),
        "column": np.array([place.column for place in places], dtype=np.int32),
        "parent": np.array([-1 if p.parent is None else at[p.parent] for p in places], dtype=np.int32),
    }
    for name in _NUMBERS:
        values = [row.get(name) for row in drawn]
        columns[name] = np.array([UNKNOWN if value is None else value for value in values], dtype=np.int32)
    columns["contends"] = np.array([row["model_call_id"] in contenders for row in drawn], dtype=np.uint8)
    tables: dict[str, list[str]] = {}
    for name in _CODED:
        columns[name], tables[name] = _coded([row.get(name) or "" for row in drawn])
    columns["why"], tables["why"] = _coded([why(row) for row in drawn])
    words = {
        "unknown": UNKNOWN,
        "ids": [row["model_call_id"] for row in drawn],
        "names": [short_id(row["model_call_id"], row["rollout_id"]) for row in drawn],
        "digests": [(row.get("digest") or "")[:8] for row in drawn],
        "tables": tables,
    }
    return words, columns


def _coded(values: list[str]) -> tuple[np.ndarray, list[str]]:
    code: dict[str, int] = {}
    codes = np.array([code.setdefault(value, len(code)) for value in values], dtype=np.int32)
    return codes, list(code)
