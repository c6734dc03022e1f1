"""Ids: shown as short as they stay telling, and refused where they are none."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import polars as pl

from workbench.errors import RunStoreError


def check_source(source: Any, view: str) -> None:
    """Raise RunStoreError for what holds no calls, such as the path of a run."""
    if not isinstance(source, pl.DataFrame):
        check_run(source, view, "calls", "a run or a frame")


def check_run(run: Any, view: str, holds: str, expected: str = "a run") -> None:
    """Raise RunStoreError for what has no `holds`, such as the path of a run, or a ledger where a run is needed."""
    if not hasattr(run, holds):
        what = f"{type(run).__name__}, which has no {holds}" if hasattr(run, "calls") else type(run).__name__
        how = f"workbench.runs.open_any({str(run)!r})" if isinstance(run, str | PathLike) else "runs.open(PATH)"
        raise RunStoreError(f"{view} expected {expected}, got {what}; open a run: {how}")


def check_rollout_id(rollout_id: Any, view: str) -> None:
    """Raise RunStoreError for what cannot be a rollout id, such as the rollout's number."""
    if rollout_id is not None and not isinstance(rollout_id, str):
        raise RunStoreError(
            f"Expected a rollout id such as 'first.0.1.0' as text, got {rollout_id!r}; they stand in "
            f"run.rollouts['rollout_id']: {view}(run, rollout_id)"
        )


def check_counts(view: str, **counts: Any) -> None:
    """Raise RunStoreError unless each of a view's limits is a whole number of at least 1."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise RunStoreError(f"{view} expected {name} to be a whole number of at least 1, got {value!r}")


def call_name(call_id: str | None, rollout_id: str, order_of: Mapping[str, int]) -> str:
    """A call as every view names it: its place in the ledger, where that is known, and its short id."""
    if call_id is None:
        return "?"
    order = order_of.get(call_id)
    return short_id(call_id, rollout_id) if order is None else f"#{order} {short_id(call_id, rollout_id)}"


def short_id(call_id: str, rollout_id: str) -> str:
    """A call id without its rollout's id; a long one (uuid4 hex) as its first eight characters."""
    if call_id.startswith(rollout_id) and len(call_id) > len(rollout_id):
        return call_id[len(rollout_id) :].lstrip("-./_") or call_id
    return call_id if len(call_id) <= 10 else call_id[:8]
