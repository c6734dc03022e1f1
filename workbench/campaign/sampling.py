"""Sampling: the rollout pump, which plays groups of rollouts and has each of them finalised.

    reserve ─► N agents side by side ─► finalizer (metadata only) ─► supply          one task a group

Invariants: groups of step s start only when the weights of step s − 1 − max_staleness have been confirmed; at most
`max_inflight_groups` are being played or finalised; a group that leaves by its typed exit, or is evicted as too stale,
is counted and replaced, so no step trains short; where group after group leaves, the campaign ends and says why.
Not here: one rollout (rollouts), verification (finalizer), what is trained when (training).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from workbench.campaign.environments import task_seed
from workbench.campaign.left_off import NOTHING_YET, LeftOff, OpenGroup
from workbench.campaign.rollouts import AgentRunner, RolloutPlan, rollout_name
from workbench.campaign.state import CampaignState
from workbench.errors import GroupsDropped, ReplayBufferError, RunStoreError, WorkbenchError, first_cause
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.rows import clear_rows
from workbench.finalizer.stored import read_group
from workbench.inspect.causes import in_words
from workbench.train.buffer import Discarded


class RolloutPump:
    """Plays `groups_per_step` groups for every step.

    Of a stopped run the groups that were `left` open come first: finished ones are published again, the others played.
    """

    def __init__(self, state: CampaignState, player: AgentRunner, left: LeftOff = NOTHING_YET) -> None:
        self._state = state
        self._player = player
        self._steps_done = left.steps_done
        self._left_open = deque(left.open_groups)
        self._next_group = left.next_group
        self._evicted_at: Counter[int] = Counter()  # weight version -> groups given up while it was the newest
        self._slots = asyncio.Semaphore(state.recipe.rollouts.max_inflight_groups)
        at_once = state.recipe.rollouts.max_inflight_rollouts
        # First come, first served, so that one at a time are played in the order of their places.
        self._agents = asyncio.Semaphore(at_once) if at_once else contextlib.nullcontext()

    async def run(self) -> None:
        """Start the groups of all steps still to come, in order, each as soon as its staleness bound allows."""
        train = self._state.recipe.train
        async with asyncio.TaskGroup() as groups:
            self._state.supply.on_evicted = partial(self._replace, groups)
            for step in range(self._steps_done + 1, train.steps + 1):
                await self._state.weights.reached(step - 1 - train.max_staleness)
                for _ in range(train.groups_per_step):
                    await self._slots.acquire()
                    groups.create_task(self._until_finalized(step))
            # Until the last step has its groups, one of them may be evicted and need another in its place.
            await self._state.weights.reached(train.steps)

    def _replace(self, groups: asyncio.TaskGroup, evicted: Discarded) -> None:
        state, step = self._state, self._state.weights.version + 1
        state.evicted += 1
        state.writer.event("group_evicted", step=step, group_id=evicted.group_id, reason=evicted.reason)
        self._evicted_at[state.weights.version] += 1
        # Of one version at most what was in the buffer when it came can be too old; what replaces it is new.
        if self._evicted_at[state.weights.version] > 2 * state.supply.buffer.capacity:
            raise ReplayBufferError(
                f"the sampler {state.recipe.train.sampler.name} has given up {self._evicted_at[state.weights.version]} "
                f"groups at weight version {state.weights.version}, those sampled from these very weights too, so that "
                f"step {step} is never filled; the last was {evicted.group_id} ({evicted.reason}). "
                "Next: train.sampler and its options"
            )
        groups.create_task(self._clear(evicted.train_keys))
        groups.create_task(self._when_free(step))

    async def _when_free(self, step: int) -> None:
        await self._slots.acquire()
        await self._until_finalized(step)

    async def _clear(self, train_keys: Sequence[str]) -> None:
        """Remove the rows of a group that nobody will train on. What fails here costs memory, not the campaign."""
        if train_keys:
            with contextlib.suppress(WorkbenchError):
                await clear_rows(train_keys, deadline_s=self._state.recipe.finalizer.timeout_s)

    async def _until_finalized(self, step: int) -> None:
        """Sample and finalise one group for `step`; one that cannot be published is replaced by a fresh one."""
        try:
            while True:
                left = self._left_open.popleft() if self._left_open else None
                if left is not None and left.finished:
                    published = await self._publish_again(step, left)
                elif left is not None:
                    published = await self._play_group(step, left.number, left.attempt)
                else:
                    number, self._next_group = self._next_group, self._next_group + 1
                    published = await self._play_group(step, number)
                if published:
                    self._state.dropped_in_a_row = 0
                    return
        finally:
            self._slots.release()

    async def _publish_again(self, step: int, left: OpenGroup) -> bool:
        """Bring a group back that is stored already; nothing of it is sampled again."""
        state = self._state
        await state.supply.reserve(left.group_id, left.rollout_ids, lambda: left.weight_version)
        try:
            with state.watch.doing(left.group_id, "publishing again"):
                stored = await asyncio.to_thread(read_group, state.fleet.run_dir, left.group_id)
                if stored is None:
                    raise RunStoreError(f"group {left.group_id} has lost its parts since the run was opened")
                request = FinalizationRequest(
                    group_id=left.group_id, weight_version=left.weight_version, rollouts=stored.outcomes
                )
                group = await state.fleet.finalizers.republish(request)
        except BaseException:
            await asyncio.shield(state.supply.abort(left.group_id))
            raise
        if not left.recorded:
            self._record(step, task_seed(state.recipe.seed, left.number), group, None)
        await self._commit(group, left.weight_version)
        return True

    async def _play_group(self, step: int, number: int, attempt: int = 0) -> bool:
        state, train = self._state, self._state.recipe.train
        group_id = f"g{number:05d}"
        seed = task_seed(state.recipe.seed, number)
        run, places = state.fleet.run_dir.name, range(train.rollouts_per_group)
        rollout_ids = [rollout_name(run, number, index, attempt) for index in places]
        # Before the task is asked for, which takes as long as it likes: groups have their order from here, and with
        # `in_order` what a step trains on. The version is that of the moment in which there is room.
        version = await state.supply.reserve(group_id, rollout_ids, lambda: state.weights.version)
        began = time.monotonic()
        state.writer.event(
            "group_started",
            step=step,
            group_id=group_id,
            rollout_ids=rollout_ids,
            task_seed=seed,
            weight_version=version,
        )
        try:
            with state.watch.doing(group_id, "sampling"):
                task = await self._player.task(seed)
                outcomes = await self._play_all([RolloutPlan(run, number, index, attempt, task) for index in places])
                sampled_s = time.monotonic() - began
                state.watch.moved()
                state.watch.in_flight[group_id] = "finalizing"
                request = FinalizationRequest(group_id=group_id, weight_version=version, rollouts=outcomes)
                group = await state.fleet.finalizers.finalize(request)
        except BaseException:
            await asyncio.shield(state.supply.abort(group_id))
            raise
        if not group.train_keys:
            await state.supply.abort(group_id)
            self._drop(step, group)
            return False
        self._record(step, seed, group, sampled_s)
        await self._commit(group, version)
        return True

    def _drop(self, step: int, group: FinalizedGroup) -> None:
        """Count a group that left by its typed exit. Raises GroupsDropped where too many in a row did."""
        state, cause = self._state, group.exit_cause
        state.writer.event("group_replaced", step=step, group_id=group.group_id, cause=cause)
        state.replaced += 1
        state.dropped_in_a_row += 1
        if state.dropped_in_a_row > state.recipe.rollouts.max_dropped_in_a_row:
            why = f"{cause.value}: {cause.explanation}" if cause is not None else "no cause was given"
            raise GroupsDropped(
                f"{state.dropped_in_a_row} groups in a row left without becoming rows, more than "
                f"rollouts.max_dropped_in_a_row={state.recipe.rollouts.max_dropped_in_a_row}; the last was "
                f"{group.group_id} ({why}). Next: workbench inspect RUN, and the events group_replaced of the run"
            )

    async def _commit(self, group: FinalizedGroup, dispatched: int) -> None:
        """Make the group ready; clear its rows where it was evicted meanwhile, since another one is under way then."""
        versions = [row.weight_version_min for row in group.rows if row.weight_version_min is not None]
        if not await self._state.supply.commit(group, weight_version=min(versions, default=dispatched)):
            await self._clear(group.train_keys)

    async def _play_all(self, plans: list[RolloutPlan]) -> list[RolloutOutcome]:
        """Play the rollouts of a group side by side. When one raises, its siblings are cancelled and have ended before
        this does, so that none of them goes on talking to a gateway in a campaign that is over."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [siblings.create_task(self._play(plan)) for plan in plans]
        except BaseExceptionGroup as group:
            failure = first_cause(group)
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]

    async def _play(self, plan: RolloutPlan) -> RolloutOutcome:
        async with self._agents:
            outcome = await self._player.play(plan)
        self._state.watch.moved()
        return outcome

    def _record(self, step: int, task_seed: int, group: FinalizedGroup, sampled_s: float | None) -> None:
        writer = self._state.writer
        self._state.counts += group.metrics
        for row in group.rows:
            if row.cause is not None:
                self._state.rejections[row.cause] += 1
                self._state.reasons[in_words(row.detail) or row.cause.explanation] += 1
                writer.event(
                    "rollout_rejected",
                    step=step,
                    group_id=group.group_id,
                    rollout_id=row.rollout_id,
                    cause=row.cause,
                    detail=row.detail,
                    call_id=row.call_id,
                    position=row.position,
                )
        if self._state.reasons:
            ((reason, _),) = self._state.reasons.most_common(1)
            writer.status_soon(rejected=sum(self._state.rejections.values()), rejected_for=reason)
        writer.group({"step": step, "task_seed": task_seed, "sampling_s": sampled_s, **group.store_record()})
        self._state.watch.moved()
