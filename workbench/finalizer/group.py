"""Group: turn N finished rollouts and their staged calls into exactly N training rows, in index order. Pure.

    FinalizationRequest (metadata only) + staged calls by key  --assemble-->  N GroupRows + FinalizedGroup (metadata)

A rollout that does not verify becomes a placeholder: no vote, and its prompt is borrowed from the first valid sibling,
else the carry of a verified staged root of the group, else one BOS token.
Invariants: N rows come out of N rollouts, whatever happened to them; a rejected rollout has one primary cause, which
for `rollout_failed` and `capture_poisoned` is the receipt's own reason; one bad rollout changes nothing in a sibling.
Not here: fetching, publishing, storing (actor), the checks of one rollout (verify), what the numbers mean (metrics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.errors import FinalizerError, ReceiptRejected, StagingError, WireError
from workbench.finalizer.metrics import GroupMetrics, group_metrics
from workbench.finalizer.routes import (
    RouteDims,
    RoutePlan,
    RouteSettings,
    dims_of,
    fill_routes,
    fragments_of,
    plan_routes,
)
from workbench.finalizer.rows import GroupRow
from workbench.finalizer.spans import sampling_of, version_spans
from workbench.finalizer.verify import LinearizedRow, verify_and_linearize
from workbench.wire import Cause, ManifestFailure, RolloutReceipt, StagedCall, extras_digest
from workbench.wire.extras import ROUTED_EXPERTS

Staged = Mapping[str, StagedCall | StagingError]

_CAUSES = frozenset(cause.value for cause in Cause)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutOutcome(_Message):
    """One rollout as the controller saw it end.

    `receipt` None means that none was assembled, `failure` then says why; `failures` are the manifest's calls without a
    custody row, which a receipt does not carry. `reward` and its parts are the environment's.
    """

    rollout_id: str
    index: int = Field(ge=0)
    task_id: str | None = None
    receipt: RolloutReceipt | None = None
    failures: list[ManifestFailure] = Field(default_factory=list)
    failure: Cause | None = None
    detail: str | None = None
    reward: float = Field(default=0.0, allow_inf_nan=False)
    reward_components: dict[str, float] = Field(default_factory=dict)
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
    reward: float
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


@dataclass(frozen=True)
class Assembly:
    """The N rows to publish and what is said about them; `rows[i]` belongs to `summaries[i]`."""

    rows: list[GroupRow]
    summaries: list[RowSummary]
    metrics: GroupMetrics
    exit_cause: Cause | None = None
    """Why there are no rows at all; the group must be replaced."""
    route_dims: RouteDims | None = None
    """Shape of a token's routes, once it is known; None without router replay."""


@dataclass(frozen=True)
class Rejection:
    """Why a rollout has no vote: one primary cause, and where known the call and the token position."""

    cause: Cause
    detail: str
    call_id: str | None = None
    position: int | None = None


def assemble(
    request: FinalizationRequest,
    staged: Staged,
    bos_token_id: int,
    routes: RouteSettings | None = None,
    dims: RouteDims | None = None,
) -> Assembly:
    """Verify every rollout and give N rows in index order. `staged` maps every key of `request.staging_keys()`.

    `routes`: how rows get routed experts, None for none; `dims` is their shape as far as earlier groups told it.
    Nothing about one rollout raises: what is wrong with it is its placeholder's cause. FinalizerError where rows must
    have routes and no call of a group of valid ones has any.
    """
    verdicts = [_verify(outcome, staged) for outcome in request.rollouts]
    plans: list[RoutePlan] | None = None
    if routes is not None:
        dims = dims or _dims(request, verdicts, staged)
        if dims is None:
            return Assembly([], [], group_metrics(request.rollouts, []), exit_cause=Cause.ROUTE_DIMS_UNKNOWN)
        verdicts, plans = _plan(request, verdicts, staged, routes, dims)
    prompt = _placeholder_prompt(request, verdicts, staged, bos_token_id)
    assembly = build_group(request, verdicts, *prompt, staged)
    if routes is None or plans is None:
        return assembly
    rows = [
        replace(row, route_plan=plan.as_json(), routes=fill_routes(plan, row.token_ids.size, fragments_of(own)))
        for row, plan, own in zip(
            assembly.rows, plans, (_own_calls(outcome, staged) for outcome in request.rollouts), strict=True
        )
    ]
    metrics = group_metrics(request.rollouts, assembly.summaries, rows)
    if routes.mode == "deferred":
        rows = [replace(row, routes=None) for row in rows]
    return Assembly(rows, assembly.summaries, metrics, route_dims=dims)


def _dims(
    request: FinalizationRequest, verdicts: Sequence[LinearizedRow | Rejection], staged: Staged
) -> RouteDims | None:
    """The shape of a token's routes as the verified rollouts tell it; None where there are none."""
    valid = [o for o, verdict in zip(request.rollouts, verdicts, strict=True) if isinstance(verdict, LinearizedRow)]
    dims = next((dims for outcome in valid if (dims := dims_of(_own_calls(outcome, staged)))), None)
    if dims is None and valid:
        raise FinalizerError(
            f"Group {request.group_id}: router replay is on, and no call of its {len(valid)} verified rollouts has "
            f"routed experts. Next: set token_capture.routes, or train.router_replay.mode to none."
        )
    return dims


def _plan(
    request: FinalizationRequest,
    verdicts: Sequence[LinearizedRow | Rejection],
    staged: Staged,
    routes: RouteSettings,
    dims: RouteDims,
) -> tuple[list[LinearizedRow | Rejection], list[RoutePlan]]:
    """Every rollout's plan, and its verdict with its routes taken into account; a placeholder's plan has no span."""
    judged: list[LinearizedRow | Rejection] = []
    plans: list[RoutePlan] = []
    for outcome, verdict in zip(request.rollouts, verdicts, strict=True):
        plan = RoutePlan(dims, [])
        if isinstance(verdict, LinearizedRow):
            plan = plan_routes(verdict, _own_calls(outcome, staged), dims)
            if plan.faults and routes.missing == "reject":
                span = plan.faults[0]
                cause = Cause(span.fault or Cause.ROUTE_MISSING)
                detail = f"{cause.explanation} Staged: {span.staged}, delta: {span.carry} + {span.generated} tokens."
                verdict, plan = Rejection(cause, detail, span.call_id), RoutePlan(dims, [])
        judged.append(verdict)
        plans.append(plan)
    return judged, plans


def _own_calls(outcome: RolloutOutcome, staged: Staged) -> list[StagedCall]:
    records = outcome.receipt.manifest if outcome.receipt else []
    return [call for record in records if isinstance(call := staged[record.staging_key], StagedCall)]


def build_group(
    request: FinalizationRequest,
    verdicts: Sequence[LinearizedRow | Rejection],
    prompt_T: np.ndarray,
    source: str,
    staged: Staged,
) -> Assembly:
    """N rows in index order from N verdicts. `prompt_T` (uint64[T]) is the placeholders', `source` says whence."""
    rows: list[GroupRow] = []
    summaries: list[RowSummary] = []
    seen: dict[bytes, str] = {}
    for outcome, verdict in zip(request.rollouts, verdicts, strict=True):
        rejection = verdict if isinstance(verdict, Rejection) else None
        row = _group_row(request, outcome, verdict, prompt_T, staged)
        first = outcome.rollout_id
        if rejection is None:
            # Byte-equal siblings are legitimate samples, and also what a broken sampling seed looks like: reported.
            content = b"".join(a.tobytes() for a in (row.token_ids, row.token_mask, row.logprobs))
            first = seen.setdefault(content, outcome.rollout_id)
        rows.append(row)
        summaries.append(
            RowSummary(
                rollout_id=outcome.rollout_id,
                index=outcome.index,
                task_id=outcome.task_id,
                sample_mask=row.sample_mask,
                reward=outcome.reward,
                prompt_len=row.prompt_len,
                tokens=int(row.token_ids.size),
                sampled_tokens=int(np.count_nonzero(row.token_mask)),
                weight_version_min=min(row.versions, default=None),
                weight_version_max=max(row.versions, default=None),
                terminal_selection=outcome.receipt.terminal_selection if outcome.receipt else None,
                placeholder=source if rejection else None,
                cause=rejection.cause if rejection else None,
                detail=rejection.detail if rejection else None,
                call_id=rejection.call_id if rejection else None,
                position=rejection.position if rejection else None,
                duplicate_of=None if first == outcome.rollout_id else first,
            )
        )
    return Assembly(rows, summaries, group_metrics(request.rollouts, summaries))


def _verify(outcome: RolloutOutcome, staged: Staged) -> LinearizedRow | Rejection:
    receipt = outcome.receipt
    if receipt is None:
        cause = outcome.failure or Cause.MISSING_RECEIPT
        return Rejection(cause, outcome.detail or cause.explanation)
    if receipt.rollout_id != outcome.rollout_id:
        detail = f"the receipt that came for rollout {outcome.rollout_id} is that of {receipt.rollout_id}"
        return Rejection(Cause.IDENTITY_MISMATCH, detail)
    if outcome.failure is not None and not receipt.capture_poisoned:
        return Rejection(outcome.failure, outcome.detail or outcome.failure.explanation)
    answers = [staged[record.staging_key] for record in receipt.manifest]
    calls = [answer for answer in answers if isinstance(answer, StagedCall)]
    try:
        row = verify_and_linearize(receipt, calls)
        _check_extras(calls)
        return replace(row, weight_version_spans=version_spans(row, calls))
    except ReceiptRejected as error:
        if error.cause == Cause.ROW_COUNT_MISMATCH:
            # Rows are missing because they could not be read: that is the cause, and the key says which call.
            for record, answer in zip(receipt.manifest, answers, strict=True):
                if isinstance(answer, StagingError):
                    return Rejection(Cause(answer.cause), str(answer), record.model_call_id)
        return _primary(error, outcome, receipt)


def _check_extras(calls: list[StagedCall]) -> None:
    # The call digest covers the extras' digest only, so the extras themselves are checked where they are read.
    for call in calls:
        try:
            right = call.extras is None or extras_digest(call.extras) == call.extras_digest
        except WireError as error:
            raise ReceiptRejected(Cause.INVALID_SNAPSHOT, call_id=call.model_call_id, detail=str(error)) from error
        if not right:
            with_routes = ROUTED_EXPERTS in (call.extras or {})
            cause = Cause.ROUTE_DIGEST_MISMATCH if with_routes else Cause.CORRUPT_DIGEST
            what = "extras, routed experts among them," if with_routes else "extras"
            detail = f"its {what} do not give the extras digest {call.extras_digest}"
            raise ReceiptRejected(cause, call_id=call.model_call_id, detail=detail)


def _primary(error: ReceiptRejected, outcome: RolloutOutcome, receipt: RolloutReceipt) -> Rejection:
    """The one cause that is counted: behind a poisoned or failed receipt stands the reason it was poisoned for."""
    cause = Cause(error.cause)
    if cause not in (Cause.ROLLOUT_FAILED, Cause.CAPTURE_POISONED):
        return Rejection(cause, error.detail or cause.explanation, error.call_id, error.position)
    reason = receipt.failure_reason or ""
    if reason in _CAUSES:
        cause, reason = Cause(reason), ""
    # The failed call that poisoned it, where it was one: its detail is the worker's typed cause.
    failed = next((failure for failure in outcome.failures if failure.reason == cause), None)
    agent = outcome.detail if outcome.failure is not None or receipt.terminal_attribution_reason is None else None
    said = reason or (failed.detail if failed else None) or agent or receipt.terminal_attribution_reason
    return Rejection(cause, said or cause.explanation, failed.model_call_id if failed else None)


def _placeholder_prompt(
    request: FinalizationRequest, verdicts: list[LinearizedRow | Rejection], staged: Staged, bos_token_id: int
) -> tuple[np.ndarray, str]:
    for verdict in verdicts:
        if isinstance(verdict, LinearizedRow):
            return verdict.token_ids[: verdict.prompt_len], "sibling"
    for outcome in request.rollouts:
        for record in outcome.receipt.manifest if outcome.receipt else ():
            call = staged[record.staging_key]
            if record.parent_call_id is None and isinstance(call, StagedCall) and _is_recorded(call, record.digest):
                carry_T = call.token_ids_delta[call.token_mask_delta == 0]
                if carry_T.size:
                    return carry_T, "root_carry"
    return np.array([bos_token_id], dtype=np.uint64), "bos"


def _is_recorded(call: StagedCall, digest: str) -> bool:
    try:
        return call.digest == digest == call.recompute_digest()
    except WireError:
        return False


def _group_row(
    request: FinalizationRequest,
    outcome: RolloutOutcome,
    verdict: LinearizedRow | Rejection,
    placeholder_T: np.ndarray,
    staged: Staged,
) -> GroupRow:
    row = _no_vote(outcome.rollout_id, placeholder_T) if isinstance(verdict, Rejection) else verdict
    return GroupRow(
        rollout_id=outcome.rollout_id,
        group_id=request.group_id,
        index=outcome.index,
        reward=outcome.reward,
        reward_components=outcome.reward_components,
        sample_mask=int(isinstance(verdict, LinearizedRow)),
        prompt_len=row.prompt_len,
        model_call_ids=list(row.model_call_ids),
        weight_versions=list(row.weight_versions),
        weight_version_spans=[list(span) for span in row.weight_version_spans],
        link_spans=[list(span) for span in row.link_spans],
        sampling=sampling_of(row, _own_calls(outcome, staged)),
        cause=verdict.cause.value if isinstance(verdict, Rejection) else None,
        token_ids=row.token_ids,
        token_mask=row.token_mask.astype(np.uint8),
        logprobs=row.logprobs,
    )


def _no_vote(rollout_id: str, prompt_T: np.ndarray) -> LinearizedRow:
    """A row that is prompt only and stands on no call."""
    zeros_T = np.zeros(prompt_T.size, dtype=np.float32)
    return LinearizedRow(rollout_id, prompt_T, zeros_T, zeros_T, [], int(prompt_T.size), [], [], [], [])
