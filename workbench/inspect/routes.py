"""Routes: which tokens of a row have recorded expert routes, as far as the calls' extras say it.

In: a run and a token frame. Out: `[start, coverage]` spans over the row (full, tail or sentinel, the words of
`workbench.wire.classify_route_span`), or one sentence why there are none. Only the envelope's header is read, never its
payload. Not here: what the routes are.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from workbench.wire import classify_route_span
from workbench.wire.extras import ROUTED_EXPERTS

_NONE = "no routed experts were recorded (dense model, or capture of routes is off)"
_HEADER = re.compile(rf'"{ROUTED_EXPERTS}":\s*"nrlre1:\w+:(\d+)x')


def route_spans(source: Any, rollout_id: str, tokens: pl.DataFrame) -> list[list[Any]] | str:
    """Spans of route coverage over `tokens`, or why there are none."""
    calls = None if isinstance(source, pl.DataFrame) else source.calls
    if calls is None or "extras" not in calls.columns:
        return "routes are known only where the strip is made from a run"
    own = calls.filter((pl.col("rollout_id") == rollout_id) & pl.col("extras").str.contains(ROUTED_EXPERTS))
    if own.is_empty():
        return _NONE
    spans: list[list[Any]] = []
    staged = {row["model_call_id"]: row for row in own.iter_rows(named=True)}
    stretches = tokens.group_by(pl.col("model_call_id").rle_id(), maintain_order=True).agg(
        pl.col("model_call_id").first().alias("call"), pl.len().alias("size")
    )
    start = 0
    for call_id, size in stretches.select("call", "size").iter_rows():
        row = staged.get(call_id)
        header = _HEADER.search(row["extras"]) if row is not None else None
        if row is None or header is None:
            spans.append([start, "sentinel"])
        else:
            carry, generated = row["carry_tokens"], row["sampled_tokens"]
            kind = classify_route_span(carry, generated, int(header[1]))
            spans.append([start, "sentinel" if kind == "tail" else kind])
            if kind == "tail":
                spans.append([start + max(0, size - int(header[1])), "tail"])
        start += size
    return spans
