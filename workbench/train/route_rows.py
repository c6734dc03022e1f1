"""Route rows: routes of the rows of a step, fetched when they are consumed, and how much of the loss they cover.

    row with a plan ──calls/<group>.parquet, digests checked──▶ row with routes [T, layers, topk]

Invariants: fragments are used only where their call's extras give the digest that the plan names; what is fetched here
equals what the finalizer would have put into the row.
Not here: the plan itself (finalizer.routes), replaying (replay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from workbench.errors import RunStoreError, TrainerError
from workbench.finalizer.routes import RoutePlan, fill_routes, known_positions, loss_positions
from workbench.finalizer.stored import stored_fragments
from workbench.train.rows import TrainRow


def fetch_routes(run_dir: Path, rows: Sequence[TrainRow]) -> list[TrainRow]:
    """The rows with their routes filled in from the run store; those that have some already stay as they are.

    Raises TrainerError where a row has no plan, a fragment is missing, or its digest is not the plan's.
    """
    plans: dict[str, RoutePlan] = {}
    for row in rows:
        if row.routes is None:
            if not row.meta.get("route_plan"):
                raise TrainerError(
                    f"Training row {row.rollout_id} has no plan of its routes, although router replay is on; it was "
                    f"published without."
                )
            try:
                plans[row.rollout_id] = RoutePlan.of(row.meta["route_plan"])
            except (KeyError, TypeError, ValueError) as error:
                raise TrainerError(
                    f"Training row {row.rollout_id} has no readable plan of its routes: {error}"
                ) from error
    out: list[TrainRow] = list(rows)
    for group_id in dict.fromkeys(row.group_id for row in rows if row.rollout_id in plans):
        members = [i for i, row in enumerate(rows) if row.group_id == group_id and row.rollout_id in plans]
        own = {rows[i].rollout_id: plans[rows[i].rollout_id] for i in members}
        try:
            fragments = stored_fragments(run_dir, group_id, own)
        except RunStoreError as error:
            raise TrainerError(
                f"Routes of group {group_id} cannot be replayed, nothing was trained: {error}"
            ) from error
        for i, (rollout_id, plan) in zip(members, own.items(), strict=True):
            out[i] = replace(rows[i], routes=fill_routes(plan, len(rows[i].token_ids), fragments[rollout_id]))
    return out


def coverage(rows: Sequence[TrainRow], masks: Sequence[np.ndarray], layers: Sequence[int]) -> tuple[int, int]:
    """(positions with a known route, positions) of those whose logits enter the loss; `masks` (T,) bool: in it;
    `layers`: the indices of those with experts."""
    covered = positions = 0
    for row, mask_T in zip(rows, masks, strict=True):
        before_T = loss_positions(mask_T)
        positions += int(before_T.sum())
        covered += int((before_T & known_positions(row.routes, layers)).sum()) if row.routes is not None else 0
    return covered, positions


def check_coverage(step: int, rows: Sequence[TrainRow], masks: Sequence[np.ndarray], layers: Sequence[int]) -> None:
    """TrainerError when router replay is on and not one position in the loss has a route."""
    covered, positions = coverage(rows, masks, layers)
    if positions and not covered:
        raise TrainerError(
            f"Step {step}: router replay is on, and none of the {positions} positions in the loss has a route: the "
            f"experts that sampled these tokens are not known. Nothing was trained. Next: see route_faults of the "
            f"run's groups, or set train.router_replay.mode to none."
        )
