"""Choose: which rollout to show when nobody has named one."""

from __future__ import annotations

from typing import Any

import polars as pl

from workbench.errors import RunStoreError


def telling_rollout(run: Any) -> str:
    """The rollout with the most to see: trained on, most calls beside its chain, most calls, first by id.

    Where no rollout was trained on, one that was not. Raises RunStoreError for a run without calls.
    """
    calls: pl.DataFrame = run.calls
    if calls.is_empty():
        raise RunStoreError(f"Run {getattr(run, 'name', '?')} has no calls yet; there is no rollout to show")
    valid = run.rollouts.select("rollout_id", (pl.col("sample_mask") == 1).alias("valid"))
    ranked = (
        calls.group_by("rollout_id")
        .agg(
            pl.col("relation").is_in(["retry", "branch", "side_root"]).sum().alias("beside"),
            pl.col("failure_reason").is_not_null().sum().alias("failed"),
            pl.len().alias("calls"),
        )
        .join(valid, on="rollout_id", how="left")
        .with_columns(pl.col("valid").fill_null(False))
        .sort(["valid", "beside", "failed", "calls", "rollout_id"], descending=[True, True, True, True, False])
    )
    return str(ranked["rollout_id"][0])
