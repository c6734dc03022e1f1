"""Choose: which rollout, pair or group to show when nobody has named one, and what to show where there is none.

    rollout_id = telling_rollout(run)            None for a run without calls
    look(PrefixChain, run, rollout_id)           the view, or one sentence why there is none

Invariant: a name that does not exist is answered with the names that do; nothing is chosen that was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import polars as pl

from workbench.errors import RunStoreError, WorkbenchError
from workbench.inspect import html as markup
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import StaticView

View = TypeVar("View", bound=StaticView)


class Sentence(StaticView):
    """What stands in the place of a view that cannot be made: the reason. It counts as false."""

    def __init__(self, words: str) -> None:
        self.words = words

    def sentence(self) -> str:
        return self.words

    def html(self) -> str:
        return markup.block(markup.line(self.words))

    def __bool__(self) -> bool:
        return False


def look(view: Callable[..., View], *args: Any, **options: Any) -> View | Sentence:
    """`view(*args, **options)`, or a `Sentence` where the run does not hold what it needs (yet)."""
    try:
        return view(*args, **options)
    except WorkbenchError as error:
        return Sentence(str(error))


def telling_rollout(run: Any) -> str | None:
    """The rollout with the most to see: trainable, most calls beside its chain, most calls, first by id.

    Where no rollout is trainable, one that is not; None for a run without calls.
    """
    check_run(run, "telling_rollout", "calls")
    calls: pl.DataFrame = run.calls
    if calls.is_empty():
        return None
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


def verified_rollout(run: Any, rollout_id: str | None = None) -> str:
    """`rollout_id`, or the most telling one, if it is verified. Raises RunStoreError where it is not, or none is."""
    check_run(run, "verified_rollout", "rollouts")
    rollouts: pl.DataFrame = run.rollouts
    verified = rollouts.filter("verified")["rollout_id"].to_list()
    if not verified:
        raise RunStoreError(f"Run {run.name} has no verified rollout; it has {rollouts.height:,} finalised ones")
    chosen = rollout_id or telling_rollout(run)
    if chosen in verified:
        return str(chosen)
    if rollout_id is None:
        return str(verified[0])
    found = rollouts.filter(rollout_id=rollout_id)
    why = "it is not there" if found.is_empty() else f"it was rejected for {found['cause'][0]}"
    raise RunStoreError(f"Rollout {rollout_id} is not verified: {why}. Verified are, for instance: {_some(verified)}")


def siblings(run: Any) -> pl.DataFrame:
    """The best and the worst valid rollout of each group that has two; the furthest apart in reward first.

    Columns: group_id, best, worst (rollout ids), apart (difference of their rewards).
    """
    check_run(run, "siblings", "rollouts")
    valid: pl.DataFrame = run.rollouts.filter(pl.col("sample_mask") == 1)
    valid = valid.sort(["reward", "rollout_id"], descending=[True, False], nulls_last=True)
    return (
        valid.group_by("group_id", maintain_order=True)
        .agg(
            pl.col("rollout_id").first().alias("best"),
            pl.col("rollout_id").last().alias("worst"),
            (pl.col("reward").max() - pl.col("reward").min()).alias("apart"),
            pl.len().alias("rows"),
        )
        .filter(pl.col("rows") > 1)
        .sort(["apart", "group_id"], descending=[True, False], nulls_last=True)
        .drop("rows")
    )


def telling_pair(run: Any, group_id: str | None = None) -> tuple[str, str]:
    """Best and worst of `siblings`, of `group_id` or of the first group. Raises RunStoreError where there are none."""
    pairs = siblings(run)
    _check_group(run, group_id)
    chosen = pairs if group_id is None else pairs.filter(group_id=group_id)
    if chosen.is_empty():
        where = f"Group {group_id}" if group_id else f"Run {getattr(run, 'name', '?')}"
        raise RunStoreError(f"{where} has no two valid rollouts of one group to compare")
    return str(chosen["best"][0]), str(chosen["worst"][0])


def trained_group(run: Any, group_id: str | None = None) -> str:
    """`group_id`, or the first group with a rejected rollout, else the first; only one of which a step has trained at
    least two rows. Raises RunStoreError where there is none."""
    check_run(run, "trained_group", "rollouts")
    _check_group(run, group_id)
    counted = run.rollouts.group_by("group_id", maintain_order=True).agg(
        pl.col("trained_step").count().alias("trained"), (pl.col("sample_mask") == 0).any().alias("rejected")
    )
    trained = counted.filter(pl.col("trained") > 1).sort("rejected", descending=True, maintain_order=True)
    chosen = trained if group_id is None else trained.filter(group_id=group_id)
    if chosen.is_empty():
        which = f"group {group_id}" if group_id else "any group"
        raise RunStoreError(f"No step of run {run.name} has trained two rows of {which}: there is nothing to compute")
    return str(chosen["group_id"][0])


def _check_group(run: Any, group_id: str | None) -> None:
    groups = run.rollouts["group_id"].unique().sort().to_list()
    if group_id is not None and group_id not in groups:
        known = f"it has {len(groups)}: {_some(groups)}" if groups else "it has none yet"
        raise RunStoreError(f"Run {getattr(run, 'name', '?')} has no group {group_id!r}; {known}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
