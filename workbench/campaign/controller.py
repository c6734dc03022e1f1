"""Controller: one asyncio loop that turns a recipe into optimiser steps, and never blocks.

    rollout pump ──► finalizer dispatch ──► replay buffer ──► train pump ──► weight sync (proof) ──► rollout pump
         (groups)        (metadata only)                         (keys)            (version + 1)

Invariants: a step trains exactly `groups_per_step` groups of exactly N rows; a group that leaves by the typed exit is
replaced and counted; sampling for step s starts only when the weights of step s − 1 − max_staleness have been
confirmed by the worker; tokens never pass through here; every wait has a deadline.
Not here: starting and stopping the parts (fleet), playing one rollout (rollouts), numbers (finalizer, trainer).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.campaign.environments import make_environment
from workbench.campaign.fleet import Fleet, within
from workbench.campaign.proof import proof_ids, prove_weights
from workbench.campaign.rollouts import RolloutPlan, RolloutPlayer
from workbench.config import Recipe
from workbench.errors import DeadlineExceeded, SetupError, WorkbenchError
from workbench.finalizer.group import FinalizationRequest, FinalizedGroup
from workbench.finalizer.metrics import pool_metrics
from workbench.runs.writer import RunWriter
from workbench.train.buffer import Entry, ReplayBuffer
from workbench.wire import check_rollout_id


@dataclass
class CampaignResult:
    """What a finished campaign says of itself; everything else is a query over the run store."""

    run_dir: Path
    steps: int
    weight_version: int
    groups_replaced: int
    summary: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Campaign {self.run_dir.name} · {self.steps} steps · weight version {self.weight_version}"


async def run_campaign(recipe: Recipe, run_dir: Path | str) -> CampaignResult:
    """Run `recipe` to its last step and write everything into `run_dir`.

    Raises SetupError before anything heavy starts, DeadlineExceeded or ComponentDied naming the part at fault
    later; the run store is closed with the true status either way.
    """
    run_dir = Path(run_dir)
    check_rollout_id(f"{run_dir.name}.0.0.0")
    run_dir.mkdir(parents=True, exist_ok=True)
    if (run_dir / "steps.jsonl").exists():
        raise SetupError(f"{run_dir} already holds a run. Next: choose another name (--run NAME), or move it away.")
    with RunWriter(run_dir) as writer:
        writer.status(status="running", phase="set-up", run=run_dir.name)
        try:
            async with Fleet(recipe, run_dir, on_phase=lambda phase: writer.status(phase=phase)) as fleet:
                result = await Campaign(recipe, fleet, writer).run()
        except (asyncio.CancelledError, KeyboardInterrupt):
            writer.event("stopped", reason="interrupted")
            writer.status(status="killed", phase="stopped", error="interrupted")
            raise
        except BaseException as error:
            writer.event("failed", error=type(error).__name__, message=str(error))
            writer.status(status="failed", phase="failed", error=f"{type(error).__name__}: {error}")
            raise
        writer.status(status="done", phase="done")
    return result


class Campaign:
    """The three pumps over one started fleet."""

    def __init__(self, recipe: Recipe, fleet: Fleet, writer: RunWriter) -> None:
        self.recipe = recipe
        self.fleet = fleet
        self.writer = writer
        self.run_name = fleet.run_dir.name
        self._environment = make_environment(recipe)
        self.version = 0
        self._version_changed = asyncio.Condition()
        self._buffer = ReplayBuffer(capacity=self._capacity(), sampler="in_order")
        self._group_ready = asyncio.Condition()
        self._next_group = 0
        self._replaced = 0
        self._finalizer_turn = 0
        self._last_progress = time.monotonic()
        self._in_flight: dict[str, str] = {}
        self._rejections: Counter[str] = Counter()
        self._sampling_slots = asyncio.Semaphore(recipe.rollouts.max_inflight_groups)
        self._loop_lag_s: list[float] = []
        self._proof_ids = proof_ids(fleet.model_path)

    def _capacity(self) -> int:
        # Groups of the step being trained, of the step being sampled, and of each further step that may run ahead.
        return self.recipe.train.groups_per_step * (self.recipe.train.max_staleness + 2)

    async def run(self) -> CampaignResult:
        recipe = self.recipe
        self.writer.event("started", timings_s=self.fleet.timings_s, probe=self.fleet.probe)
        self._player = RolloutPlayer(
            gateway_url=self.fleet.gateway_url,
            control=self.fleet.control,
            environment=self._environment,
            model="policy",
            timeout_s=recipe.rollouts.timeout_s,
            request_timeout_s=recipe.gateway.request_timeout_s,
            seed=recipe.seed,
        )
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as pumps:
                lag = pumps.create_task(self._measure_loop_lag())
                watchdog = pumps.create_task(self._watch_for_stalls())
                rollouts = pumps.create_task(self._rollout_pump())
                await self._train_pump()
                await rollouts
                for task in (lag, watchdog):
                    task.cancel()
        except BaseExceptionGroup as group:
            failure = _first_cause(group)
        finally:
            await self._player.close()
        if failure is not None:
            # Not in the handler: the group would be its context, and IPython prints such an error without reporting it,
            # so that the runner would see a failed cell and no reason.
            raise failure
        lag_p99 = float(np.quantile(self._loop_lag_s, 0.99)) if self._loop_lag_s else None
        self.writer.event(
            "finished",
            steps=recipe.train.steps,
            weight_version=self.version,
            groups_replaced=self._replaced,
            rejections=dict(self._rejections),
            loop_lag_p99_s=lag_p99,
        )
        return CampaignResult(self.fleet.run_dir, recipe.train.steps, self.version, self._replaced)

    async def _rollout_pump(self) -> None:
        """Start the groups of every step in order, each no earlier than its staleness bound allows."""
        train = self.recipe.train
        async with asyncio.TaskGroup() as groups:
            for step in range(1, train.steps + 1):
                await self._wait_for_version(step - 1 - train.max_staleness)
                for _ in range(train.groups_per_step):
                    await self._sampling_slots.acquire()
                    groups.create_task(self._sample_group(step))

    async def _sample_group(self, step: int) -> None:
        """Sample and finalise one group for `step`; a group that cannot be published is replaced by a fresh one."""
        try:
            while True:
                number, self._next_group = self._next_group, self._next_group + 1
                if await self._play_group(step, number):
                    return
                self._replaced += 1
        finally:
            self._sampling_slots.release()

    async def _play_group(self, step: int, number: int) -> bool:
        group_id = f"g{number:05d}"
        train = self.recipe.train
        task = self._environment.task(self.recipe.seed * 1_000_003 + number)
        plans = [
            RolloutPlan(run=self.run_name, group=number, index=index, attempt=0, task=task)
            for index in range(train.rollouts_per_group)
        ]
        rollout_ids = [plan.rollout_id for plan in plans]
        self._buffer.reserve(group_id, rollout_ids, self.version)
        self._in_flight[group_id] = "sampling"
        version_at_start = self.version
        began = time.monotonic()
        self.writer.event("group_started", step=step, group_id=group_id, rollout_ids=rollout_ids, task_id=task.task_id)
        try:
            outcomes = await asyncio.gather(*(self._player.play(plan) for plan in plans))
            sampled_s = time.monotonic() - began
            self._progress()
            self._in_flight[group_id] = "finalizing"
            request = FinalizationRequest(group_id=group_id, weight_version=version_at_start, rollouts=outcomes)
            finalizer = self.fleet.finalizers[self._finalizer_turn % len(self.fleet.finalizers)]
            self._finalizer_turn += 1
            answer = await within(
                finalizer.finalize.remote(request.model_dump(mode="json")),
                self.recipe.finalizer.timeout_s,
                "the finalizer",
                f"group {group_id}",
            )
        except BaseException:
            self._buffer.abort(group_id)
            raise
        finally:
            self._in_flight.pop(group_id, None)
        group = FinalizedGroup.model_validate(answer)
        if not group.train_keys:
            self._buffer.abort(group_id)
            self.writer.event("group_replaced", step=step, group_id=group_id, cause=group.exit_cause)
            return False
        for row in group.rows:
            if row.cause is not None:
                self._rejections[row.cause] += 1
                self.writer.event(
                    "rollout_rejected",
                    step=step,
                    group_id=group_id,
                    rollout_id=row.rollout_id,
                    cause=row.cause,
                    detail=row.detail,
                    call_id=row.call_id,
                    position=row.position,
                )
        self.writer.group({"step": step, "sampling_s": sampled_s, **group.store_record()})
        self._progress()
        async with self._group_ready:
            versions = [row.weight_version_min for row in group.rows if row.weight_version_min is not None]
            self._buffer.commit_finalized(
                group_id, group.train_keys, weight_version=min(versions, default=version_at_start), payload=group
            )
            self._group_ready.notify_all()
        return True

    async def _train_pump(self) -> None:
        train = self.recipe.train
        for step in range(1, train.steps + 1):
            waited_from = time.monotonic()
            self.writer.status(phase="sampling", step=step, steps=train.steps)
            taken = await self._take_groups()
            waited_s = time.monotonic() - waited_from
            keys = [key for group in taken for key in group.train_keys]
            self.writer.status(phase="training", step=step)
            began = time.monotonic()
            self._in_flight[f"step {step}"] = "training"
            trained = await within(
                self.fleet.trainer.train_step.remote(step, keys), train.timeout_s, "the trainer", f"step {step}"
            )
            self._in_flight.pop(f"step {step}")
            trained_s = time.monotonic() - began
            self._progress()
            synced = await self._sync_weights(step)
            self._record_step(step, taken, trained, synced, waited_s=waited_s, trained_s=trained_s)

    async def _take_groups(self) -> list[Entry]:
        """Wait for the next `groups_per_step` finalised groups, in the order in which they were started."""
        async with self._group_ready:
            while not (taken := self._buffer.take(self.recipe.train.groups_per_step, current_version=self.version)):
                await self._group_ready.wait()
        return taken

    async def _sync_weights(self, step: int) -> dict[str, Any]:
        """Publish the weights of `step`, load them into the worker, prove agreement, and only then admit calls."""
        timeout_s = self.recipe.train.sync_timeout_s
        self.writer.status(phase="weight sync", step=step)
        began = time.monotonic()
        path = await within(
            self.fleet.trainer.publish.remote(step), timeout_s, "the trainer", f"publishing step {step}"
        )
        published = time.monotonic()
        timings = await within(
            self.fleet.worker.update_weights.remote(path, step), timeout_s, "the policy worker", f"loading step {step}"
        )
        loaded = time.monotonic()
        proof = await prove_weights(
            self.fleet.worker,
            self.fleet.trainer,
            self._proof_ids,
            version=step,
            timeout_s=timeout_s,
            max_mean_abs_delta=self.recipe.proof.max_mean_abs_delta,
        )
        async with self._version_changed:
            self.version = step
            self._version_changed.notify_all()
        self._progress()
        return {
            "publish_s": published - began,
            "load_s": loaded - published,
            "sync_s": time.monotonic() - published,
            "proof_mean_abs_delta": proof.mean_abs_delta,
            "proof_max_abs_delta": proof.max_abs_delta,
            "worker_timings_s": timings,
        }

    def _record_step(
        self,
        step: int,
        taken: list[Entry],
        trained: dict[str, Any],
        synced: dict[str, Any],
        *,
        waited_s: float,
        trained_s: float,
    ) -> None:
        pooled = pool_metrics([entry.payload for entry in taken])
        times = {"rollout_s": waited_s, "train_s": trained_s}
        staleness = {"staleness_max": step - 1 - min(entry.weight_version for entry in taken)}
        self.writer.step(
            {"step": step, "weight_version": self.version, **pooled, **trained, **synced, **times, **staleness}
        )
        self.writer.status(
            phase="step done",
            step=step,
            weight_version=self.version,
            token_in_rate=pooled["token_in_rate"],
            token_in_rate_after_roots=pooled["token_in_rate_after_roots"],
            reward_mean=trained["reward_mean"],
            rejected=sum(self._rejections.values()),
        )

    async def _wait_for_version(self, version: int) -> None:
        async with self._version_changed:
            await self._version_changed.wait_for(lambda: self.version >= version)

    def _progress(self) -> None:
        self._last_progress = time.monotonic()

    async def _watch_for_stalls(self) -> None:
        """End the campaign when nothing has moved for `rollouts.stall_timeout_s`, naming what was in flight."""
        limit_s = self.recipe.rollouts.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            self.fleet.gateway.check()
            if time.monotonic() - self._last_progress > limit_s:
                in_flight = ", ".join(f"{what} ({doing})" for what, doing in sorted(self._in_flight.items()))
                raise DeadlineExceeded(
                    f"nothing has moved for {limit_s:g} s (rollouts.stall_timeout_s); "
                    f"in flight: {in_flight or 'nothing'}."
                )

    async def _measure_loop_lag(self) -> None:
        while True:
            due = time.monotonic() + 0.1
            await asyncio.sleep(0.1)
            self._loop_lag_s.append(max(0.0, time.monotonic() - due))


def _first_cause(group: BaseExceptionGroup) -> BaseException:
    """The deliberate error inside an exception group, or the first leaf: one failure is reported, not a tree."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    deliberate = [error for error in leaves if isinstance(error, WorkbenchError)]
    return (deliberate or leaves)[0]
