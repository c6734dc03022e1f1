"""Controller: one asyncio loop that turns a recipe into optimiser steps, and never blocks.

    rollout pump ──► finalizer dispatch ──► supply ──► train pump ──► weight sync (proof) ──► rollout pump
      (sampling)      (metadata only)      (buffer)    (training)     (sync, version + 1)

Here the parts are put together, run side by side and ended together; the first one that fails ends the campaign with
its own error. Invariants: tokens never pass through here; every wait has a deadline (actors, watch).
Not here: starting and stopping the parts (fleet), playing one rollout (rollouts), numbers (finalizer, trainer).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workbench.actors import root_cause
from workbench.campaign.echo_rollouts import EchoPlayer
from workbench.campaign.environments import Environment, make_environment
from workbench.campaign.environments.components import components_needed
from workbench.campaign.fleet import Fleet
from workbench.campaign.left_off import NOTHING_YET, LeftOff, read_left_off, remove_unfinished
from workbench.campaign.resume import catch_up
from workbench.campaign.rollouts import AgentRunner, RolloutPlayer, left_by
from workbench.campaign.sampling import RolloutPump
from workbench.campaign.standstill import Standstill
from workbench.campaign.state import CampaignState
from workbench.campaign.training import TrainPump
from workbench.config import Recipe
from workbench.echo.finalizer import EchoFinalizer
from workbench.errors import WorkbenchError, first_cause
from workbench.inspect.rejected import nothing_trained
from workbench.runs.writer import RunWriter, recipe_digest, refuse_taken, store_recipe
from workbench.serving.sampling import SamplingPins
from workbench.wire import check_rollout_id

_LAST_LOOK_S = 3.0


@dataclass
class CampaignResult:
    """What a campaign that is done says of itself; everything else is a query over the run store."""

    run_dir: Path
    steps: int
    weight_version: int
    groups_replaced: int

    def __repr__(self) -> str:
        return f"Campaign {self.run_dir.name} · {self.steps} steps · weight version {self.weight_version}"


async def run_campaign(
    recipe: Recipe, run_dir: Path | str, *, resume: bool = False, make_fleet: Callable[..., Fleet] = Fleet
) -> CampaignResult:
    """Run `recipe` to its last step and write everything into `run_dir`.

    With `resume` it goes on with the stopped run in `run_dir`; `recipe` comes from `resume.resumable` then.
    `make_fleet` is for tests, which run the same campaign on a scripted engine.
    Raises SetupError before anything heavy starts, DeadlineExceeded or ComponentDied naming the part at fault
    later; the run store is closed with the true status either way.
    """
    run_dir = Path(run_dir)
    check_rollout_id(f"{run_dir.name}.0.0.0")
    run_dir.mkdir(parents=True, exist_ok=True)
    if not resume:
        refuse_taken(run_dir)
    with RunWriter(run_dir) as writer:
        left = _take_over(run_dir, writer) if resume else NOTHING_YET
        values = recipe.model_dump(mode="json")
        writer.event("set_up", recipe_digest=recipe_digest(values))  # the parts have `started` minutes later
        writer.status(status="running", phase="set-up", run=run_dir.name, resumed=left.segments)
        store_recipe(run_dir, values)
        try:
            environment = make_environment(recipe)
            on_phase = partial(_say_phase, writer)
            async with make_fleet(recipe, run_dir, on_phase=on_phase, report=writer.event) as fleet:
                result = await Campaign(recipe, fleet, writer, environment).run(left)
            untrained = await asyncio.to_thread(nothing_trained, run_dir)
        except (asyncio.CancelledError, KeyboardInterrupt):
            writer.event("stopped", reason="interrupted")
            writer.status(status="stopped", phase="stopped", error="stopped by an interrupt")
            raise
        except BaseException as error:
            writer.event("failed", error=type(error).__name__, message=str(error))
            writer.status(status="failed", phase="failed", error=root_cause(f"{type(error).__name__}: {error}"))
            raise
        writer.status(status="done", phase="done", error=untrained)
    return result


class Campaign:
    """The pumps over one started fleet."""

    def __init__(self, recipe: Recipe, fleet: Fleet, writer: RunWriter, environment: Environment) -> None:
        self.recipe = recipe
        self.fleet = fleet
        self.writer = writer
        self.environment = environment
        self.state = CampaignState.begin(recipe, fleet, writer)

    async def run(self, left: LeftOff = NOTHING_YET) -> CampaignResult:
        """Run to the last step, from where a stopped run was `left` off.

        Raises what ended it before: one plain error, whatever failed at the same time.
        """
        recipe, state = self.recipe, self.state
        self.writer.event("started", timings_s=self.fleet.timings_s, probe=self.fleet.probe)
        player = self._player()
        failure: BaseException | None = None
        try:
            training = TrainPump(state, left)
            if left.segments:
                await catch_up(state, training, left)
            await self._run_pumps(RolloutPump(state, player, left), training)
            await self._sweep_up()
        except BaseExceptionGroup as group:
            failure = first_cause(group)
        except WorkbenchError as error:
            failure = error
        finally:
            await player.close()
        if failure is not None:
            dead = await state.watch.find_dead(self.fleet.heartbeats(), _LAST_LOOK_S, failure)
            if dead is not None:
                self.writer.event("died", message=str(dead), seen_as=f"{type(failure).__name__}: {failure}")
                failure = dead
            # Not in the handler: the group would be its context, and IPython prints such an error without reporting it,
            # so that the runner would see a failed cell and no reason.
            raise failure
        self.writer.event(
            "finished",
            steps=recipe.train.steps,
            weight_version=state.weights.version,
            groups_replaced=state.replaced,
            rejections=dict(state.rejections),
            loop_lag_p99_s=(lag := state.watch.loop_lag_p99_s())["total"],
            loop_lag_own_p99_s=lag["own"],
        )
        return CampaignResult(self.fleet.run_dir, recipe.train.steps, state.weights.version, state.replaced)

    def _player(self) -> AgentRunner:
        recipe, fleet, finalizers = self.recipe, self.fleet, self.fleet.finalizers
        settings: dict[str, Any] = {
            "gateway_url": fleet.gateway_url,
            "environment": self.environment,
            "model": "policy",
            "timeout_s": recipe.rollouts.timeout_s,
            "request_timeout_s": recipe.gateway.request_timeout_s,
            "seed": recipe.seed,
            "components": components_needed(recipe, self.environment),
        }
        if isinstance(finalizers, EchoFinalizer):
            return EchoPlayer(
                finalizer=finalizers,
                sampling=SamplingPins.of(recipe.sampling, recipe.seed),
                weight_version=lambda: self.state.weights.version,
                **settings,
            )
        strict = recipe.rollouts.require_terminal_witness
        return RolloutPlayer(control=fleet.control, on_no_witness="refuse" if strict else "mask", **settings)

    async def _run_pumps(self, sampling: RolloutPump, training: TrainPump) -> None:
        watch, every_s = self.state.watch, self.recipe.deadlines.heartbeat_s
        standstill = Standstill(self.recipe.rollouts.timeout_s, left_by, self._stands_still)
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(watch.measure_loop_lag()),
                tasks.create_task(watch.until_stalled()),
                tasks.create_task(standstill.run()),
                tasks.create_task(self.state.sweeper.run()),
                *(
                    tasks.create_task(watch.until_dead(part, beat, every_s))
                    for part, beat in self.fleet.heartbeats().items()
                ),
            ]
            rollouts = tasks.create_task(sampling.run())
            await training.run()
            await rollouts
            for task in watches:
                task.cancel()

    def _stands_still(self, what: str) -> None:
        self.writer.event("standstill", what=what)
        self.writer.status_soon(phase=what)

    async def _sweep_up(self) -> None:
        """Wait until the worker has staged its last call, and leave both partitions of TransferQueue empty."""
        timeout_s = self.recipe.token_capture.sink_timeout_s + self.recipe.deadlines.stop_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if await self.fleet.policy.quiet(timeout_s):
                break
            await asyncio.sleep(0.1)
        left = await self.state.sweeper.finish(timeout_s)
        self.writer.event("swept", cleared=self.state.sweeper.swept, left=left)


def _take_over(run_dir: Path, writer: RunWriter) -> LeftOff:
    """Where the run stood, now that nobody else writes it; its unfinished parts make room for new attempts."""
    left = read_left_off(run_dir)
    if removed := remove_unfinished(left):
        writer.event("unfinished_removed", files=removed)
    return left


def _say_phase(writer: RunWriter, phase: str) -> None:
    writer.status_soon(phase=phase)
