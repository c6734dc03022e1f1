"""Messages: what the controller asks of the finalizer, and what it gets back. Metadata only, never a tensor.

    FinalizationRequest (group id, rollouts with receipts and rewards)  ──▶  FinalizedGroup (train keys, row summaries)

Invariants: a request is N distinct rollouts in index order; an answer has a summary a row, or the one cause for which
there are no rows at all.
Not here: how rows come about (group), their tokens (rows).
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.finalizer.metrics import GroupMetrics
from workbench.wire import Cause, ManifestFailure, RolloutReceipt


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutOutcome(_Message):
    """One rollout as the controller saw it end.

    `receipt` None means that none was assembled, `failure` then says why; `failures` are the manifest's calls without a
    custody row, which a receipt does not carry. `detail` says more of the failure, or of a response that no call gave.
    `reward` and its parts are the environment's; None: nobody gave one, or the rollout failed before. `ended_early` is
    why its agent stopped before the end; None: it did not say so.
    """

    rollout_id: str
    index: int = Field(ge=0)
    task_id: str | None = None
    receipt: RolloutReceipt | None = None
    failures: list[ManifestFailure] = Field(default_factory=list)
    failure: Cause | None = None
    detail: str | None = None
    reward: float | None = Field(default=None, allow_inf_nan=False)
    reward_components: dict[str, float] = Field(default_factory=dict)
    ended_early: str | None = None
    duration_s: float | None = None


class FinalizationRequest(_Message):
    """A group to finalise: ids, receipts, rewards, versions; never a tensor. `rollouts` are put in index order."""

    group_id: str
    weight_version: int
    rollouts: list[RolloutOutcome] = Field(min_length=1)

    @model_validator(mode="after")
    def _n_distinct_rollouts(self) -> Self:
        self.rollouts.sort(key=lambda rollout: rollout.index)
        indexes = [rollout.index for rollout in self.rollouts]
        if indexes != list(range(len(indexes))):
            raise ValueError(f"group {self.group_id}: expected one rollout an index 0..N-1, got indexes {indexes}")
        if len({rollout.rollout_id for rollout in self.rollouts}) != len(self.rollouts):
            raise ValueError(f"group {self.group_id}: two rollouts have the same id")
        return self

    def staging_keys(self) -> list[str]:
        """Keys of every recorded call, side branches too, in index and manifest order."""
        return [r.staging_key for o in self.rollouts if o.receipt is not None for r in o.receipt.manifest]


class RowSummary(_Message):
    """One published row without its tokens; `placeholder` says where a placeholder's prompt is from."""

    rollout_id: str
    index: int
    task_id: str | None
    sample_mask: int
    reward: float | None
    prompt_len: int
    tokens: int
    sampled_tokens: int
    weight_version_min: int | None
    weight_version_max: int | None
    terminal_selection: str | None
    placeholder: str | None = None
    cause: Cause | None = None
    detail: str | None = None
    call_id: str | None = None
    position: int | None = None
    duplicate_of: str | None = None
    ended_early: str | None = None


class FinalizedGroup(_Message):
    """What the controller gets back. `train_keys` are N keys in index order; an empty list means that the group left by
    its one exit, `exit_cause`, and must be replaced. `timings_s`: fetch, verify, publish, store, clear."""

    group_id: str
    weight_version: int
    train_keys: list[str]
    rows: list[RowSummary]
    metrics: GroupMetrics
    timings_s: dict[str, float] = Field(default_factory=dict)
    exit_cause: Cause | None = None

    def store_record(self) -> dict[str, Any]:
        """The line for groups.jsonl: the columns of table `groups`, and the rows' summaries."""
        return {
            "group_id": self.group_id,
            "task_id": self.rows[0].task_id if self.rows else None,
            "weight_version": self.weight_version,
            **self.metrics.model_dump(mode="json"),
            **self.metrics.rates(),
            **{f"{name}_s": seconds for name, seconds in self.timings_s.items()},
            "rollouts": [row.model_dump(mode="json") for row in self.rows],
        }
