"""Rejected: what most of some rejected rollouts were rejected for, in words.

In: rows or summaries of rollouts (cause, detail, rollout id). Out: the commonest reason and a rollout that has it; why
a run that took steps has trained nothing.
Not here: what the causes mean (wire), each rejected rollout (PoisonTable, and a run's summary).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from workbench import runs
from workbench.inspect.causes import explain, in_words
from workbench.runs.shelf import finished_rollouts


@dataclass(frozen=True)
class Commonest:
    """`count` of the rejected were for `cause`, most of these with `detail`, `often` as words; `rollout_id` is one of
    them."""

    cause: str
    count: int
    detail: str | None
    rollout_id: str
    often: str

    @property
    def words(self) -> str:
        """The detail for a reader, the place in it; what the cause means where there is none."""
        return in_words(self.detail, self.cause) or explain(self.cause)


def commonest(rejected: Iterable[Mapping[str, Any]]) -> Commonest | None:
    """Of rollouts with a cause; None where there are none."""
    rejected = list(rejected)
    if not rejected:
        return None
    counts = Counter(row["cause"] for row in rejected)
    cause = min(counts, key=lambda cause: (-counts[cause], cause))  # of equally many as PoisonTable has them
    alike = [row for row in rejected if row["cause"] == cause]
    (detail, times), *rarer = Counter(row["detail"] for row in alike).most_common(2)
    often = "" if not rarer else ", for example" if rarer[0][1] == times else f", most often ({times} times)"
    example = next(row["rollout_id"] for row in alike if row["detail"] == detail)
    return Commonest(cause, len(alike), detail, example, often)


def rejected_words(rejected: Collection[Mapping[str, Any]], rollouts: int) -> tuple[str, str | None]:
    """How many of how many rollouts were rejected and most often why, without a full stop, and one of those to look
    at."""
    words = f"{len(rejected)} of {rollouts} rollouts {'was' if len(rejected) == 1 else 'were'} rejected"
    most = commonest(rejected)
    if most is None:
        return words, None
    words += f", {f'{most.count} of them ' * (len(rejected) > 1)}as {most.cause}"
    return words + (f"{most.often}: {most.words.removesuffix('.')}" if most.detail else ""), most.rollout_id


def nothing_trained(run_dir: Path) -> str | None:
    """One sentence where a run has taken steps and none of them had a row with a vote; None where one had."""
    run = runs.open(run_dir)
    rollouts, steps = finished_rollouts(run), run.steps
    voted = (rollouts["sample_mask"] == 1).any() and steps["loss_tokens"].fill_null(1).sum() > 0
    if steps.is_empty() or voted:
        return None
    rejected = rollouts.filter(pl.col("cause").is_not_null()).select("cause", "detail", "rollout_id").to_dicts()
    return f"nothing was trained: {rejected_words(rejected, rollouts.height)[0]}"
