"""Tokens: one row a token, with the call that made it and what sampler and trainer thought of it.

In: a stored training row (spans, ids, mask, log-probs) or the stored calls of a rollout. Out: frames, positions from 0.
Invariant: the ids are the recorded ones, in order; nothing is decoded, re-encoded or filled in. A number that nobody
computed is null, not 0.
Not here: turning ids into text (vocabulary, inspect).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import polars as pl

from workbench.errors import RunStoreError

LOGPROB_DTYPES = {
    "run": pl.String,
    "step": pl.Int64,
    "group_id": pl.String,
    "rollout_id": pl.String,
    "model_call_id": pl.String,
    "position": pl.Int64,
    "sampled_position": pl.Int64,
    "token_id": pl.UInt64,
    "logprob": pl.Float32,
    "trainer_logprob": pl.Float32,
    "delta": pl.Float32,
    "weight_version": pl.Int64,
}


def row_tokens(row: dict[str, Any], trained: dict[str, Any] | None) -> pl.DataFrame:
    """The tokens of one valid training row; `trained` is the trainer's record of it, where there is one."""
    count = len(row["token_ids"])
    mask_T = np.asarray(row["token_mask"], dtype=bool)
    call_T = np.empty(count, dtype=object)
    start = 0
    for call_id, carry, generated in orjson.loads(row["link_spans"] or "[]"):
        call_T[start : start + carry + generated] = call_id
        start += carry + generated
    version_T = np.full(count, -1, dtype=np.int64)
    for _, begin, end, version in orjson.loads(row["weight_version_spans"] or "[]"):
        version_T[begin:end] = version
    frame = _frame(row["group_id"], row["rollout_id"], call_T, row["token_ids"], mask_T, row["logprobs"], version_T)
    if trained is None or len(trained["trainer_logprobs"]) != count:
        return frame
    return frame.with_columns(
        _where(mask_T, trained["trainer_logprobs"]).alias("trainer_logprob"),
        _where(mask_T, trained["delta"]).alias("delta"),
        pl.lit(trained["advantage"], dtype=pl.Float64).alias("advantage"),
        *_agreement(trained.get("route_agreement")),
    )


def _agreement(values: Sequence[float] | None) -> list[pl.Series]:
    """Share of layers whose own router agrees with the replayed route; null where none was replayed."""
    if values is None:
        return []
    return [pl.Series("route_agreement", values, dtype=pl.Float32).fill_nan(None)]


def call_path_tokens(rollout_id: str, calls: Sequence[dict[str, Any]], call_id: str | None) -> pl.DataFrame:
    """The tokens on the path from the root to a call, joined from the stored deltas."""
    by_id = {call["model_call_id"]: call for call in calls if call["token_ids"] is not None}
    if call_id is None:
        terminal = [call["model_call_id"] for call in calls if call["terminal"] and call["model_call_id"] in by_id]
        staged = [call["model_call_id"] for call in calls if call["model_call_id"] in by_id]
        if not staged:
            raise RunStoreError(f"Rollout {rollout_id} has no staged tokens: {_reasons(calls)}")
        call_id = (terminal or staged)[-1]
    if call_id not in by_id:
        raise RunStoreError(
            f"Rollout {rollout_id} has no staged tokens of call {call_id!r}; it has: {', '.join(by_id) or 'none'}"
        )
    path: list[dict[str, Any]] = []
    seen: set[str] = set()
    at: str | None = call_id
    while at is not None and at in by_id and at not in seen:
        seen.add(at)
        path.append(by_id[at])
        # An echoed call holds its whole prompt; what its parent holds is part of that.
        at = None if by_id[at]["disposition"] == "echoed" else by_id[at]["parent_call_id"]
    if at is not None:
        raise RunStoreError(
            f"Call {path[-1]['model_call_id']} of rollout {rollout_id} continues {at!r}, which was not staged"
        )
    path.reverse()
    ids_T = [i for call in path for i in call["token_ids"]]
    mask_T = np.array([m for call in path for m in call["token_mask"]], dtype=bool)
    logprob_T = [p for call in path for p in call["logprobs"]]
    call_T = np.array([call["model_call_id"] for call in path for _ in call["token_ids"]], dtype=object)
    version_T = np.array([call["weight_version"] for call in path for _ in call["token_ids"]], dtype=np.int64)
    return _frame(path[0]["group_id"], rollout_id, call_T, ids_T, mask_T, logprob_T, version_T)


def sampled_logprobs(run: str, rows: pl.DataFrame, train: pl.DataFrame) -> pl.DataFrame:
    """The sampled tokens of every row that a step was trained on, sampler and trainer side by side.

    One frame a row is cheap (a row is one rollout), so spans are applied row by row.
    """
    stored = {row["rollout_id"]: row for row in rows.filter(pl.col("sample_mask") == 1).iter_rows(named=True)}
    trained = train.filter(pl.col("sample_mask") == 1).sort("step", "group_id", "index")
    frames = []
    for record in trained.iter_rows(named=True):
        row = stored.get(record["rollout_id"])
        if row is None or len(record["trainer_logprobs"]) != len(row["token_ids"]):
            continue
        tokens = row_tokens(row, record).filter(pl.col("sampled"))
        frames.append(
            tokens.select(
                pl.lit(run).alias("run"),
                pl.lit(record["step"], dtype=pl.Int64).alias("step"),
                "group_id",
                "rollout_id",
                "model_call_id",
                "position",
                pl.int_range(pl.len(), dtype=pl.Int64).alias("sampled_position"),
                "token_id",
                "logprob",
                "trainer_logprob",
                "delta",
                "weight_version",
            )
        )
    return pl.concat(frames) if frames else pl.DataFrame(schema=LOGPROB_DTYPES)


def equal_weights(version: int | None, step: int | None, still: Collection[int]) -> bool:
    """Whether a token of weight version `version` was sampled from the very weights that step `step` scored it with.
    Step n scores with version n - 1; an older one has the same weights where each step in between is in `still`, the
    steps that changed no weight (`runs.gradient.unchanged`)."""
    return version is not None and step is not None and version < step and {*range(version + 1, step)} <= set(still)


def at_equal_weights(tokens: pl.DataFrame, still: Collection[int] = frozenset()) -> pl.DataFrame:
    """The tokens that were sampled from the very weights that then scored them: what sampler and trainer differ in is
    number formats alone, and no optimiser step. `still`: the steps that changed no weight."""
    spans = tokens.select("weight_version", "step").unique()
    equal = [equal_weights(version, step, still) for version, step in spans.iter_rows()]
    return tokens.join(
        spans.filter(pl.Series(equal, dtype=pl.Boolean)), on=spans.columns, how="semi", maintain_order="left"
    )


@dataclass
class Deltas:
    """By how much sampler and trainer differ over trained tokens: by the version that sampled them and the step that
    trained them how many there are, and the sum of |delta| in nat."""

    sums: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, step: int, delta_K: np.ndarray, version_K: np.ndarray) -> None:
        """Add trained tokens of a step: their deltas and the versions that they were sampled from."""
        size_K = np.abs(delta_K.astype(np.float64))
        for version in np.unique(version_K).tolist():
            tokens, total = self.sums.get((version, step), (0, 0.0))
            chosen_K = size_K[version_K == version]
            self.sums[version, step] = (tokens + chosen_K.size, total + float(chosen_K.sum()))

    @property
    def steps(self) -> set[int]:
        return {step for _, step in self.sums}

    def mean_abs(self, still: Collection[int] | None = None) -> tuple[int, float | None]:
        """Number and mean |delta| of all tokens; with `still`, the steps that changed no weight, of those at equal
        weights."""
        chosen = [value for span, value in self.sums.items() if still is None or equal_weights(*span, still)]
        tokens = sum(count for count, _ in chosen)
        return tokens, sum(total for _, total in chosen) / tokens if tokens else None


def count_deltas(scored: pl.DataFrame) -> Deltas:
    """Of a frame as `sampled_logprobs` gives it."""
    deltas = Deltas()
    for (step,), tokens in scored.drop_nulls("delta").group_by("step", maintain_order=True):
        deltas.add(int(str(step)), tokens["delta"].to_numpy(), tokens["weight_version"].to_numpy())
    return deltas


def _frame(
    group_id: str | None,
    rollout_id: str,
    call_T: np.ndarray,
    ids_T: Sequence[int],
    mask_T: np.ndarray,
    logprob_T: Sequence[float],
    version_T: np.ndarray,
) -> pl.DataFrame:
    count = len(ids_T)
    versions = pl.Series("weight_version", version_T)
    return pl.DataFrame(
        {
            "group_id": pl.Series([group_id] * count, dtype=pl.String),
            "rollout_id": pl.Series([rollout_id] * count, dtype=pl.String),
            "model_call_id": pl.Series(call_T.tolist(), dtype=pl.String),
            "position": pl.Series(range(count), dtype=pl.Int64),
            "token_id": pl.Series(ids_T, dtype=pl.UInt64),
            "sampled": pl.Series(mask_T),
            "logprob": pl.Series(logprob_T, dtype=pl.Float32),
            "trainer_logprob": pl.Series([None] * count, dtype=pl.Float32),
            "delta": pl.Series([None] * count, dtype=pl.Float32),
            "advantage": pl.Series([None] * count, dtype=pl.Float64),
            "weight_version": versions.set(versions < 0, None),
        }
    )


def _where(mask_T: np.ndarray, values: Sequence[float]) -> pl.Series:
    series = pl.Series(values, dtype=pl.Float32)
    return series.set(pl.Series(~mask_T), None)


def _reasons(calls: Sequence[dict[str, Any]]) -> str:
    causes = sorted({call["failure_reason"] or call["staging"] or "unknown" for call in calls})
    return ", ".join(causes) or "it has no recorded calls"
