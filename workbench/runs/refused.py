"""Refused: requests that were refused, by rollout and reason. Whether an agent went on all the same is not known here.

In: the lines that a run's gateways wrote (`refused.jsonl`; a run from before it has none) and its calls, whose failure
rows name the answer that an engine refused. Out: one row a rollout, status, code and refuser.
Invariant: a request counts once; what is no refusal (a field that was replaced, a fault of a worker) not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

REFUSED_FILE = "refused.jsonl"
_COLUMNS = {
    "rollout_id": pl.String,
    "status": pl.Int64,
    "code": pl.String,
    "by": pl.String,
    "requests": pl.Int64,
    "message": pl.String,
}
_ENGINE = r"^HTTP (4\d\d) (\w+)$"
_SHOWN = 4


def refused_frame(lines: Iterable[Mapping[str, Any]], calls: pl.DataFrame) -> pl.DataFrame:
    """Columns rollout_id (null: the request named none), status, code, by (`gateway` or `engine`), requests, message
    (the first one, cut; null for the engine's); by rollout and code."""
    rows = [
        [line.get("rollout_id"), line["status"], line["code"], "gateway", line.get("times", 1), line.get("message")]
        for line in lines
        if isinstance(line.get("status"), int) and isinstance(line.get("code"), str)
    ]
    failed = calls.select("rollout_id", pl.col("detail").str.extract_groups(_ENGINE).alias("said")).unnest("said")
    rows += [[who, int(status), code, "engine", 1, None] for who, status, code in failed.drop_nulls("2").iter_rows()]
    frame = pl.DataFrame(rows, schema=_COLUMNS, orient="row", strict=False)
    together = frame.group_by("rollout_id", "status", "code", "by", maintain_order=True)
    summed = together.agg(pl.col("requests").sum(), pl.col("message").drop_nulls().first())
    return summed.sort("rollout_id", "code", nulls_last=True)


def is_cut(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the gateways' file was full before the run was over, so that more was refused than it tells."""
    return any("full_at_bytes" in line for line in lines)


def refused_words(refused: pl.DataFrame, *, cut: bool = False) -> str | None:
    """`7 in 3 rollouts: content_not_read (5), worker_error (2)`; None for none. `cut`: as `is_cut`."""
    if refused.is_empty():
        return None
    codes = by_code(refused)
    reasons = [f"{code} ({requests:,})" for code, requests in codes.select("code", "requests").head(_SHOWN).iter_rows()]
    more = f" and {codes.height - _SHOWN} more codes" if codes.height > _SHOWN else ""
    at_least = "at least " if cut else ""
    full = f"; {REFUSED_FILE} was full then, later ones are not in it" if cut else ""
    return f"{at_least}{_where(refused)}: {', '.join(reasons)}{more}{full}"


def _where(refused: pl.DataFrame) -> str:
    """`5 in 1 rollout and 1 outside of any`, for a request under no rollout's address is refused as well."""
    within = refused.drop_nulls("rollout_id")
    inside, rollouts = int(within["requests"].sum()), within["rollout_id"].n_unique()
    outside = int(refused["requests"].sum()) - inside
    told = [f"{inside:,} in {rollouts:,} rollout{'' if rollouts == 1 else 's'}"] if inside else []
    return " and ".join([*told, *([f"{outside:,} outside of any rollout"] if outside else [])])


def by_code(refused: pl.DataFrame) -> pl.DataFrame:
    """One row a status, code and refuser: requests, rollouts, an example and what was said; the most frequent first."""
    together = refused.group_by("status", "code", "by", maintain_order=True)
    return together.agg(
        pl.col("requests").sum(),
        pl.col("rollout_id").drop_nulls().n_unique().cast(pl.Int64).alias("rollouts"),
        pl.col("rollout_id").drop_nulls().first().alias("example"),
        pl.col("message").drop_nulls().first(),
    ).sort(["requests", "code"], descending=[True, False])
