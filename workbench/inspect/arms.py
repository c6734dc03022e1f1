"""Arms: two runs paired rollout by rollout, and what differs between the partners.

In: two rollouts frames. Out: pairs by task and seed (a task's id names its seed, the index its place in the group; the
n-th group of a task in one arm is paired with its n-th in the other), metric differences with intervals, and flips.
Intervals: 95 %, percentile bootstrap over tasks with a fixed seed, because rollouts of one task are not independent.
Invariants: a value that one partner lacks leaves the pair out of that metric; the same frames give the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from workbench.inspect.causes import in_words

METRICS = (
    ("reward", "reward of pairs that both count"),
    ("valid", "rows that can be trained on"),
    ("calls", "calls"),
    ("failed_calls", "failed or unresolved calls"),
    ("tokens", "tokens of the row"),
    ("sampled_tokens", "sampled tokens"),
)
_RESAMPLES = 2_000
_SEED = 20_240_607
_KEY = ("task_id", "index", "occurrence")


@dataclass(frozen=True)
class Difference:
    """B − A of one metric over the pairs that have it; `low` and `high` are None where there is only one task."""

    metric: str
    meaning: str
    pairs: int
    one: float | None
    other: float | None
    mean: float | None
    low: float | None
    high: float | None


def pair_up(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """One row a pair: the key, then each column of both arms with `_other` on the second's. Sorted by the key."""
    left, right = _prepared(one), _prepared(other)
    return left.join(right, on=list(_KEY), how="inner", suffix="_other").sort(*_KEY)


def differences(pairs: pl.DataFrame) -> list[Difference]:
    """The differences of `METRICS` over the pairs; calls only where both arms record them (echo does not)."""
    recorded = pairs["calls"].sum() and pairs["calls_other"].sum()
    return [
        _difference(pairs, metric, meaning)
        for metric, meaning in METRICS
        if recorded or metric not in ("calls", "failed_calls")
    ]


def flips(pairs: pl.DataFrame, solved: float) -> pl.DataFrame:
    """Pairs whose verdict differs: trained on or not, else solved or not (reward ≥ `solved`); most telling first.

    Columns: task_id, index, rollout_id, rollout_id_other, reward, reward_other, what.
    """
    valid, valid_other = pl.col("valid") == 1, pl.col("valid_other") == 1
    won, won_other = pl.col("reward") >= solved, pl.col("reward_other") >= solved
    what = (
        pl.when(valid & ~valid_other)
        .then(pl.format("B rejected: {}", pl.col("why_other").fill_null("unknown")))
        .when(~valid & valid_other)
        .then(pl.format("A rejected: {}", pl.col("why").fill_null("unknown")))
        .when(valid & valid_other & won & ~won_other)
        .then(pl.lit("only A solved it"))
        .when(valid & valid_other & ~won & won_other)
        .then(pl.lit("only B solved it"))
    )
    size = (pl.col("reward_other") - pl.col("reward")).abs().fill_null(0.0)
    return (
        pairs.with_columns(what.alias("what"), size.alias("size"))
        .drop_nulls("what")
        .sort(["size", "task_id", "index"], descending=[True, False, False])
        .select("task_id", "index", "rollout_id", "rollout_id_other", "reward", "reward_other", "what")
    )


def _prepared(rollouts: pl.DataFrame) -> pl.DataFrame:
    details = rollouts["detail"].drop_nulls().unique().to_list()
    return (
        rollouts.sort("group_id", "index")
        .with_columns(pl.col("detail").replace({detail: in_words(detail) for detail in details}))
        .with_columns(
            pl.int_range(pl.len()).over("task_id", "index").alias("occurrence"),
            (pl.col("sample_mask") == 1).cast(pl.Int64).alias("valid"),
            pl.when(pl.col("detail").is_null())
            .then("cause")
            .otherwise(pl.format("{}: {}", "cause", "detail"))
            .alias("why"),
        )
        .select(*_KEY, "rollout_id", "why", "reward", "valid", "calls", "failed_calls", "tokens", "sampled_tokens")
    )


def _difference(pairs: pl.DataFrame, metric: str, meaning: str) -> Difference:
    known = pairs.drop_nulls([metric, f"{metric}_other"])
    if metric in ("reward", "tokens", "sampled_tokens"):
        known = known.filter((pl.col("valid") == 1) & (pl.col("valid_other") == 1))
    if known.is_empty():
        return Difference(metric, meaning, 0, None, None, None, None, None)
    by_task = (
        known.group_by("task_id", maintain_order=True)
        .agg((pl.col(f"{metric}_other") - pl.col(metric)).sum().alias("sum"), pl.len().alias("size"))
        .select(pl.col("sum").cast(pl.Float64), pl.col("size").cast(pl.Float64))
    )
    low, high = _interval(by_task["sum"].to_numpy(), by_task["size"].to_numpy())
    one, other = _mean(known[metric]), _mean(known[f"{metric}_other"])
    return Difference(metric, meaning, known.height, one, other, other - one, low, high)


def _interval(sum_K: np.ndarray, size_K: np.ndarray) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of the mean difference, K tasks resampled whole; none for a single task."""
    tasks = sum_K.size
    if tasks < 2:
        return None, None
    counts = np.random.default_rng(_SEED).multinomial(tasks, np.full(tasks, 1 / tasks), size=_RESAMPLES)
    means = (counts @ sum_K) / (counts @ size_K)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _mean(column: pl.Series) -> float:
    value: Any = column.cast(pl.Float64).mean()
    return float(value)
