"""Group: turn N finished rollouts and their staged calls into exactly N training rows, in index order. Pure.

    FinalizationRequest (metadata only) + staged calls by key  --assemble-->  N GroupRows + FinalizedGroup (metadata)

A rollout that does not verify becomes a placeholder: no vote, and its prompt is borrowed from the first valid sibling,
else the carry of a verified staged root of the group, else one BOS token.
Invariants: N rows come out of N rollouts, whatever happened to them; one bad rollout changes nothing in a sibling.
Not here: fetching, publishing, storing (actor), what one rollout is worth (verdicts), what numbers mean (metrics).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.errors import FinalizerError, WireError
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome, RowSummary
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
from workbench.finalizer.spans import sampling_of
from workbench.finalizer.verdicts import Rejection, Staged, own_calls, verdict_of
from workbench.finalizer.verify import LinearizedRow
from workbench.wire import Cause, StagedCall


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
    verdicts = [verdict_of(outcome, staged) for outcome in request.rollouts]
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
            assembly.rows, plans, (own_calls(outcome, staged) for outcome in request.rollouts), strict=True
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
    dims = next((dims for outcome in valid if (dims := dims_of(own_calls(outcome, staged)))), None)
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
            plan = plan_routes(verdict, own_calls(outcome, staged), dims)
            if plan.faults and routes.missing == "reject":
                span = plan.faults[0]
                cause = Cause(span.fault or Cause.ROUTE_MISSING)
                detail = f"{cause.explanation} Staged: {span.staged}, delta: {span.carry} + {span.generated} tokens."
                verdict, plan = Rejection(cause, detail, span.call_id), RoutePlan(dims, [])
        judged.append(verdict)
        plans.append(plan)
    return judged, plans


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
                ended_early=outcome.ended_early,
            )
        )
    return Assembly(rows, summaries, group_metrics(request.rollouts, summaries))


def _placeholder_prompt(
    request: FinalizationRequest, verdicts: list[LinearizedRow | Rejection], staged: Staged, bos_token_id: int
) -> tuple[np.ndarray, str]:
    for verdict in verdicts:
        if isinstance(verdict, LinearizedRow) and verdict.prompt_len:
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
        sampling=sampling_of(row, own_calls(outcome, staged)),
        cause=verdict.cause.value if isinstance(verdict, Rejection) else None,
        token_ids=row.token_ids,
        token_mask=row.token_mask.astype(np.uint8),
        logprobs=row.logprobs,
    )


def _no_vote(rollout_id: str, prompt_T: np.ndarray) -> LinearizedRow:
    """A row that is prompt only and stands on no call."""
    zeros_T = np.zeros(prompt_T.size, dtype=np.float32)
    return LinearizedRow(rollout_id, prompt_T, zeros_T, zeros_T, [], int(prompt_T.size), [], [], [], [])
