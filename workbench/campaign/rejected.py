"""Rejected: what most of some rejected rollouts were rejected for, in words.

In: rows or summaries of rollouts (cause, detail, rollout id). Out: the commonest reason and a rollout that has it.
Not here: what the causes mean (wire), each rejected rollout (summary).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.inspect.causes import explain, in_words


@dataclass(frozen=True)
class Commonest:
    """`count` of the rejected were for `cause`, most of these with `detail`; `rollout_id` is one of them."""

    cause: str
    count: int
    detail: str | None
    rollout_id: str

    @property
    def words(self) -> str:
        """The detail for a reader, the place in it; what the cause means where there is none."""
        return in_words(self.detail) or explain(self.cause)


def commonest(rejected: Iterable[Mapping[str, Any]]) -> Commonest | None:
    """Of rollouts with a cause; None where there are none."""
    rejected = list(rejected)
    if not rejected:
        return None
    ((cause, count),) = Counter(row["cause"] for row in rejected).most_common(1)
    alike = [row for row in rejected if row["cause"] == cause]
    ((detail, _),) = Counter(row["detail"] for row in alike).most_common(1)
    return Commonest(cause, count, detail, next(row["rollout_id"] for row in alike if row["detail"] == detail))
