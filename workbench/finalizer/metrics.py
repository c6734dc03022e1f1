"""Metrics of a group, and of the groups of a step: counts that add up, rates that are computed from them last.

    group_metrics(outcomes, summaries) -> GroupMetrics      pool_metrics(groups) -> dict of the step

`token_in_rate` = token_in calls / all calls, unresolved and failed ones included: how much of what the policy was asked
continued from recorded tokens. `token_in_rate_after_roots` leaves roots (text calls, a retried first request among
them) out of the denominator, because a conversation has to begin somewhere; 1.0 means that every other call continued
one.
Not here: training metrics (train).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from workbench.finalizer.routes import RoutePlan, route_counts
from workbench.runs.early import count_early
from workbench.wire import Cause

if TYPE_CHECKING:
    from workbench.finalizer.messages import FinalizedGroup, RolloutOutcome, RowSummary
    from workbench.finalizer.rows import GroupRow


class GroupMetrics(BaseModel):
    """Counts of one group (or of several, added up). `rejections` is cause -> rollouts, `ended_early` reason ->
    rollouts, with a vote or without; a group without any has an empty dict. `route_counts` are those of
    `routes.route_counts` over valid rows, `route_faults` is cause -> calls of a chain whose routes could not be used;
    both empty without router replay. `echo_wrong_rows` is of the token-echo arm: valid rows that the engine did not run
    so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = 0
    valid_rows: int = 0
    unrewarded_rows: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    calls: int = 0
    token_in_calls: int = 0
    root_calls: int = 0
    failed_calls: int = 0
    unresolved_calls: int = 0
    receipts: int = 0
    capture_poisoned_rollouts: int = 0
    witness_disagreements: int = 0
    duplicate_rows: int = 0
    echo_wrong_rows: int = 0
    terminal_selection_counts: dict[str, int] = {}
    rejections: dict[str, int] = {}
    ended_early: dict[str, int] = {}
    route_counts: dict[str, int] = {}
    route_faults: dict[str, int] = {}

    def rates(self) -> dict[str, Any]:
        """Everything that is a share or a mean; None where its denominator is 0."""
        rewarded = self.valid_rows - self.unrewarded_rows
        mean = _share(self.reward_sum, rewarded)
        variance = None if mean is None else max(0.0, self.reward_square_sum / rewarded - mean * mean)
        selections = self.terminal_selection_counts
        return {
            "reward_mean": mean,
            "reward_std": None if variance is None else math.sqrt(variance),
            "valid_row_rate": _share(self.valid_rows, self.rows),
            "token_in_rate": _share(self.token_in_calls, self.calls),
            "token_in_rate_after_roots": _share(self.token_in_calls, self.calls - self.root_calls),
            "terminal_selection_fractions": {
                method: count / self.receipts for method, count in selections.items() if self.receipts
            },
            "heuristic_fraction": _share(selections.get("heuristic", 0), self.receipts),
            "route_coverage": _share(self.route_counts.get("covered", 0), self.route_counts.get("positions", 0)),
            "route_sentinel_fraction": _share(
                self.route_counts.get("sentinels", 0), self.route_counts.get("tokens", 0)
            ),
        }

    def __add__(self, other: GroupMetrics) -> GroupMetrics:
        added: dict[str, Any] = {}
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            added[name] = dict(Counter(mine) + Counter(theirs)) if isinstance(mine, dict) else mine + theirs
        return GroupMetrics(**added)


def group_metrics(
    outcomes: Sequence[RolloutOutcome], summaries: Sequence[RowSummary], rows: Sequence[GroupRow] = ()
) -> GroupMetrics:
    """Counts of one group from what the controller saw and what became of it; rewards are those of valid rows.

    `rows`, with their routes filled in, are needed for router replay only.
    """
    receipts = [outcome.receipt for outcome in outcomes if outcome.receipt is not None]
    records = [record for receipt in receipts for record in receipt.manifest]
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    valid = [row for row in summaries if row.sample_mask]
    rewards = [row.reward for row in valid if row.reward is not None]
    disagreement = Cause.WITNESS_DISAGREEMENT.value
    return GroupMetrics(
        rows=len(summaries),
        valid_rows=len(valid),
        tokens=sum(row.tokens for row in valid),
        sampled_tokens=sum(row.sampled_tokens for row in valid),
        unrewarded_rows=len(valid) - len(rewards),
        reward_sum=math.fsum(rewards),
        reward_square_sum=math.fsum(reward * reward for reward in rewards),
        calls=len(records) + len(failures),
        token_in_calls=sum(record.mode == "token_in" for record in records),
        root_calls=sum(record.mode == "text" for record in records),
        failed_calls=len(failures),
        unresolved_calls=sum(failure.reason == Cause.UNRESOLVED_PARENT for failure in failures),
        receipts=len(receipts),
        capture_poisoned_rollouts=sum(receipt.capture_poisoned for receipt in receipts),
        witness_disagreements=sum(disagreement in (r.terminal_attribution_reason or "") for r in receipts),
        duplicate_rows=sum(row.duplicate_of is not None for row in summaries),
        terminal_selection_counts=dict(Counter(r.terminal_selection for r in receipts if r.terminal_selection)),
        rejections=dict(Counter(row.cause.value for row in summaries if row.cause is not None)),
        ended_early=count_early(row.ended_early for row in summaries),
        **_routes(rows),
    )


def _routes(rows: Sequence[GroupRow]) -> dict[str, dict[str, int]]:
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for row in rows:
        if row.route_plan is not None and row.routes is not None and row.sample_mask:
            plan = RoutePlan.of(row.route_plan)
            counts.update(route_counts(plan, row.routes, row.token_mask))
            faults.update(span.fault for span in plan.spans if span.fault is not None)
    return {"route_counts": dict(counts), "route_faults": dict(faults)}


def pool_metrics(groups: Sequence[FinalizedGroup]) -> dict[str, Any]:
    """Counts and rates over all groups of a step (rates of the sums, not means of rates) and summed `*_s` timings."""
    total = sum((group.metrics for group in groups), GroupMetrics())
    seconds: Counter[str] = Counter()
    for group in groups:
        seconds.update({f"finalize_{name}_s": value for name, value in group.timings_s.items()})
    return {**total.model_dump(mode="json"), **total.rates(), **seconds, "group_ids": [g.group_id for g in groups]}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
