"""Early: rollouts whose agent stopped before the end, as at a full window, counted by why.

Such a rollout has a vote: its chain is whole, only shorter than it would have been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

MANY = 0.1
"""A larger share of the rollouts than this is said loudly, here and of guessed last calls."""


def early_reason(said: str) -> str:
    """What `ended_early` is counted by: what stands before its first colon."""
    return said.partition(":")[0].strip() or "no reason given"


def count_early(said: Iterable[str | None]) -> dict[str, int]:
    """Reason -> rollouts, the most frequent first; None is a rollout that did not end early."""
    return dict(Counter(early_reason(each) for each in said if each is not None).most_common())


def early_words(counts: Mapping[str, int], rollouts: int) -> str:
    """`12 of 96 rollouts: window full (12)`."""
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in counts.items())
    return f"{sum(counts.values()):,} of {rollouts:,} rollouts: {reasons}"


def early_remark(counts: Mapping[str, int], rollouts: int) -> str:
    """The same, with what it means and what to do."""
    cure = "look at them: run.rollouts.drop_nulls('ended_early')"
    if counts.get("window full"):
        cure = "a larger model.max_model_len, or agents that say less"
    kept = "Those with a vote train as far as they came"
    return f"{early_words(counts, rollouts)}. {kept}. Next, if not meant: {cure}"
