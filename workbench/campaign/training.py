"""Training: the train pump, which takes finalised groups, has the trainer step on them and the new weights synced.

    supply ─► trainer (keys only) ─► sync ─► steps.jsonl ─► gathered parts, now and then ─► checkpoint, every few steps

Invariant: a step trains exactly `groups_per_step` groups of exactly N rows, and the next one begins after the weights
it made are confirmed. Not here: the step itself (train.trainer), which groups it gets (train.buffer).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from workbench.actors import within
from workbench.campaign.left_off import NOTHING_YET, LeftOff
from workbench.campaign.pace import Pace
from workbench.campaign.state import CampaignState
from workbench.errors import NothingToTrainOn
from workbench.finalizer.metrics import pool_metrics
from workbench.inspect.rejected import commonest
from workbench.places import as_word
from workbench.runs import gathered
from workbench.train.buffer import Entry


class TrainPump:
    """One optimiser step after the other, after those of a stopped run that was `left` off."""

    def __init__(self, state: CampaignState, left: LeftOff = NOTHING_YET) -> None:
        self._state = state
        self._steps_done = left.steps_done
        self._pace = Pace(left.step_lines, left.first_steps)
        self._poisoned = 0
        self._empty: list[tuple[int, list[Entry]]] = []
        """Steps since the last one that had a valid row, and the groups that they took."""

    async def run(self) -> None:
        """Take every step that is still to come."""
        for step in range(self._steps_done + 1, self._state.recipe.train.steps + 1):
            await self._step(step)

    async def _step(self, step: int) -> None:
        state, train = self._state, self._state.recipe.train
        waited_from, evicted_before = time.monotonic(), state.evicted
        state.writer.status_soon(phase="sampling", step=step, steps=train.steps)
        taken = await state.supply.take(train.groups_per_step, state.weights.version)
        waited_s = time.monotonic() - waited_from
        evicted = state.evicted - evicted_before
        keys = [key for group in taken for key in group.train_keys]
        state.writer.status_soon(phase="training", step=step)
        began = time.monotonic()
        with state.watch.doing(f"step {step}", "training", bounded=True):
            trained = await within(
                state.fleet.trainer.train_step.remote(step, keys), train.timeout_s, "the trainer", f"step {step}"
            )
        state.supply.trained(taken)
        trained_s = time.monotonic() - began
        state.watch.moved()
        with state.watch.doing(f"step {step}", "weight sync", bounded=True):
            synced = await state.weights.advance(step)
        measured = trained | synced | {"groups_evicted": evicted}
        self._pace.took(time.monotonic() - waited_from)
        self._record(step, taken, measured, waited_s=waited_s, trained_s=trained_s)
        self._end_if_empty(step, taken)
        await asyncio.to_thread(gathered.gather, state.fleet.run_dir, growth=gathered.AGAIN)
        every = state.recipe.checkpoint.every
        if every and (step % every == 0 or step == train.steps):
            await self.checkpoint(step)

    def _end_if_empty(self, step: int, taken: list[Entry]) -> None:
        """Raise NothingToTrainOn where as many steps in a row as the recipe allows had no valid row. After the last
        step there is nothing to spare any more, and the summary says the same."""
        train = self._state.recipe.train
        if any(row.sample_mask for entry in taken for row in entry.payload.rows):
            self._empty.clear()
            return
        self._empty.append((step, taken))
        if len(self._empty) < train.max_empty_steps or step == train.steps:
            return
        rows = [row for _, groups in self._empty for entry in groups for row in entry.payload.rows]
        most = commonest(row.model_dump(mode="json") for row in rows)
        assert most is not None  # a row without a vote has its cause
        raise NothingToTrainOn(
            f"{len(self._empty)} steps in a row, {self._empty[0][0]} to {step}, had no valid row "
            f"(train.max_empty_steps={train.max_empty_steps}): {most.count} of their {len(rows)} rollouts were "
            f"rejected as {most.cause}, most often: {most.words.rstrip('.')}. "
            f"Next: workbench inspect {as_word(self._state.fleet.run_dir)} {most.rollout_id}"
        )

    async def checkpoint(self, step: int) -> None:
        """Have the trainer write a checkpoint of `step`, its last one; groups are sampled meanwhile."""
        state, recipe = self._state, self._state.recipe
        saving = state.fleet.trainer.save_checkpoint.remote(step, recipe.checkpoint.keep)
        with state.watch.doing(f"step {step}", "checkpoint", bounded=True):
            saved = await within(saving, recipe.train.timeout_s, "the trainer", f"the checkpoint of step {step}")
        state.watch.moved()
        state.writer.event("checkpoint", step=step, seconds=saved["seconds"])

    def _record(
        self, step: int, taken: list[Entry], measured: dict[str, Any], *, waited_s: float, trained_s: float
    ) -> None:
        state = self._state
        pooled = pool_metrics([entry.payload for entry in taken])
        times = {"rollout_s": waited_s, "train_s": trained_s}
        staleness = {"staleness_max": step - 1 - min(entry.weight_version for entry in taken)}
        rates = state.counts.rates()
        self._poisoned += pooled["capture_poisoned_rollouts"]
        state.writer.step(
            {"step": step, "weight_version": state.weights.version, **pooled, **measured, **times, **staleness}
        )
        for rollout_id, had in measured.get("other_components", {}).items():
            state.writer.event("other_components", step=step, rollout_id=rollout_id, components=had)
        if measured.get("agreement_suspect"):
            state.writer.event(
                "agreement", step=step, suspect=measured["agreement_suspect"], evidence=measured.get("agreement")
            )
        state.writer.status_soon(
            phase="step done",
            step=step,
            weight_version=state.weights.version,
            token_in_rate=rates["token_in_rate"],
            token_in_rate_after_roots=rates["token_in_rate_after_roots"],
            reward_mean=measured["reward_mean"],
            rejected=sum(state.rejections.values()),
            poisoned=self._poisoned,
            groups=step * state.recipe.train.groups_per_step,
            eta_s=round(self._pace.for_steps(state.recipe.train.steps - step), 1),
        )
