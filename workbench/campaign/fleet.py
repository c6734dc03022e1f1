"""Fleet: start every part of a campaign in order, and leave nothing running when it ends.

    Ray → placement → TransferQueue → policy workers ∥ trainer ∥ finalizers → probe → gateway
                                                   (no trainer where nothing is trained: serve)

Invariants: each start has a deadline and names the part that missed it; whatever was started is stopped, in reverse
order and each within a deadline, also when a later part fails to start.
Not here: what the parts are used for (controller).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from workbench import dataplane, part_logs
from workbench.actors import within
from workbench.campaign.handles import Actor, Asked, TrainerActor, WorkerActor
from workbench.campaign.machines import derived, ray_cluster
from workbench.campaign.machines.doctor import refuse_unable
from workbench.campaign.machines.node_check import check_nodes
from workbench.campaign.machines.part_settings import trainer_config, worker_config
from workbench.campaign.machines.placement import FINALIZER, RANK, WORKER, Placement
from workbench.campaign.policy import PARTS_S, START_S, PolicyWorkers
from workbench.campaign.processes import sigterm_given_back
from workbench.campaign.proof import SyncProof, proof_ids, prove_weights
from workbench.campaign.watch import Heartbeat
from workbench.config import Recipe
from workbench.echo.finalizer import EchoFinalizer
from workbench.echo.probe import probe_echo
from workbench.errors import ComponentDied, SetupError
from workbench.finalizer.bos import bos_of
from workbench.finalizer.pool import FinalizerPool
from workbench.gateway.client import ControlClient
from workbench.gateway.process import GatewayProcess
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN
from workbench.models import experts_of
from workbench.models import resolve as resolve_model
from workbench.runs.refused import REFUSED_FILE

WORKER_CONCURRENCY = 64
HURRIED_S = 2.0
# Questions that Ray answers at once from what it knows.
_ASKED_WITHIN_S = 60.0
# What starts something ends its own wait a little earlier, with a better reason than ours.
_REASON_S = 15.0
# Fetch, publish, clear: together they end before the controller stops waiting, so that the one at fault is named.
FINALIZER_REQUESTS = 4


class Fleet:
    """The running parts of one campaign. Use as `async with Fleet(recipe, run_dir) as fleet`.

    After entry: `policy` (its workers), `trainer` (a Ray actor handle), `finalizers` (their pool, or the echo
    finalizer), `placement` (what stands where), `control` (gateway control client),
    `gateway_url`, `probe` (the start-up probe's report) and `timings_s` (seconds a part took to start).
    `report(kind, **fields)` is told what happens to parts while they run.
    Without `training` there is no `trainer`, and nothing that only a trainer needs is asked for.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        on_phase: Callable[[str], None] = lambda phase: None,
        *,
        report: Callable[..., None] = lambda kind, **fields: None,
        training: bool = True,
    ) -> None:
        self.recipe = recipe
        # Actors are told of it: on another node a relative path would mean another place.
        self.run_dir = run_dir.resolve()
        self._training = training
        self.policy = PolicyWorkers([])
        self.trainer: TrainerActor
        self._report = report
        self.finalizers: FinalizerPool | EchoFinalizer
        self._data_plane_actors: dict[str, Actor] = {}
        self._further_ranks: dict[str, Actor] = {}
        self.timings_s: dict[str, float] = {}
        self.probe: dict[str, Any] = {}
        self._proof_ids: list[list[int]] | None = None
        self._on_phase = on_phase
        self._start_s = recipe.deadlines.start_s
        self._patience_s = recipe.deadlines.stop_s / 2
        """How long a part may take to stop itself before it is killed."""
        self._failed = False
        """Whether an error ended it: what its parts wrote is kept then."""
        self._stops: list[tuple[str, Callable[[], Awaitable[None]]]] = []

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException as error:
            self._failed = isinstance(error, Exception)
            await self._stop()
            raise
        return self

    async def __aexit__(self, exc_type: object, error: BaseException | None, *_: object) -> None:
        self._failed = isinstance(error, Exception)  # neither of an interrupt nor of a cancellation
        if isinstance(error, ComponentDied):
            # The others may be waiting for the dead one; what they have to say is not worth a deadline each.
            self._patience_s = min(self._patience_s, HURRIED_S)
        await self._stop()

    async def _start(self) -> None:
        recipe = self.recipe
        self._check_machine()
        self.model_path = model_path = resolve_model(recipe.model.path)
        if recipe.token_capture.routes and not experts_of(model_path):
            raise SetupError(
                f"token_capture.routes is true and {recipe.model.path} has no experts, so no token has a route. Next: "
                f"set it to false, or choose a mixture of experts such as tiny-moe."
            )
        # Tokens of this run alone: made here, handed on through the environment, never written anywhere.
        os.environ.setdefault(CONTROL_TOKEN, secrets.token_urlsafe(32))
        os.environ.setdefault(WORKER_TOKEN, secrets.token_urlsafe(32))

        await self._phase("ray", self._start_ray())
        await self._phase("placement", self._take_places())
        await self._phase("data plane", self._start_data_plane())
        actors = "policy worker and trainer" if self._training else "policy worker"
        await self._phase(actors, self._start_actors(model_path))
        # Captured tokens are looked at in the worker, echoed ones where they arrive, behind the gateway.
        if recipe.token_capture.enabled:
            await self._phase("probe", self._run_probe())
        await self._phase("gateway", self._start_gateway())
        if not recipe.token_capture.enabled:
            await self._phase("probe", self._run_echo_probe())

    async def _phase(self, name: str, start: Awaitable[None]) -> None:
        self._on_phase(f"starting {name}")
        began = time.monotonic()
        await start
        self.timings_s[name] = round(time.monotonic() - began, 3)

    def _check_machine(self) -> None:
        """Overridden by fleets whose scripted engine has no weights, which no recipe may ask for in a campaign."""
        refuse_unable(self.recipe, training=self._training)

    async def _start_ray(self) -> None:
        import ray

        if ray.is_initialized():
            raise SetupError("Ray is already running in this process. Next: ray.shutdown(), or start a new kernel.")
        temp_dir: list[str | None] = []

        async def stop() -> None:
            await asyncio.to_thread(ray.shutdown)
            for directory in filter(None, temp_dir):
                if self._failed:
                    await asyncio.to_thread(part_logs.keep, Path(directory), self.run_dir)
                shutil.rmtree(directory, ignore_errors=True)

        self._stops.append(("ray", stop))
        connecting = asyncio.to_thread(lambda: temp_dir.append(ray_cluster.connect(self.recipe)))
        # Its last try may begin just before its time is over.
        deadline_s = self._start_s + ray_cluster.ONE_TRY_S + _REASON_S
        with sigterm_given_back():
            await within(connecting, deadline_s, "Ray", "starting", key=START_S)

    async def _take_places(self) -> None:
        """Reserve room for every actor, and on a cluster look whether the nodes that have it can run them."""
        recipe = self.recipe
        self.placement = placement = Placement(recipe, training=self._training)

        async def stop() -> None:
            await asyncio.to_thread(placement.release)

        self._stops.append(("placement", stop))
        deadline_s = recipe.ray.placement_timeout_s + 30.0
        if recipe.ray.address != "local":
            settled = partial(ray_cluster.wait_for_lost_nodes, recipe.ray.placement_timeout_s, self._on_phase)
            await within(asyncio.to_thread(settled), deadline_s, "the Ray cluster", "giving up lost nodes")
        await within(asyncio.to_thread(placement.reserve), deadline_s, "the Ray cluster", "making room")
        if recipe.ray.address != "local":
            describing = asyncio.to_thread(placement.described)
            nodes = await within(describing, _ASKED_WITHIN_S, "the Ray cluster", "naming its nodes")
            self._report("placed", nodes=nodes)
            looking = asyncio.to_thread(check_nodes, placement.nodes(), self.run_dir, self.model_path, self._start_s)
            await within(looking, self._start_s + _REASON_S, "the Ray cluster", "being looked at", key=START_S)

    async def _start_data_plane(self) -> None:
        plane = self.recipe.data_plane
        nodes = asyncio.to_thread(ray_cluster.alive_nodes)
        alive = await within(nodes, _ASKED_WITHIN_S, "the Ray cluster", "naming its nodes")
        units = derived.storage_units(self.recipe, len(alive))

        async def stop() -> None:
            await dataplane.drain_clears(self._patience_s)
            await asyncio.to_thread(dataplane.stop)

        self._stops.append(("data plane", stop))
        await within(
            asyncio.to_thread(
                dataplane.start,
                storage_units=units,
                send_recv_timeout_s=plane.send_recv_timeout_s,
                max_attempts=plane.max_attempts,
                start_timeout_s=self._start_s,
            ),
            self._start_s + _REASON_S,
            "TransferQueue",
            "starting",
            key=START_S,
        )
        named = asyncio.to_thread(dataplane.actors, units)
        self._data_plane_actors = await within(named, _ASKED_WITHIN_S, "TransferQueue", "naming its actors")

    async def _start_actors(self, model_path: Path) -> None:
        recipe = self.recipe
        deadline_s = recipe.engine.start_timeout_s
        self.policy = PolicyWorkers([self._make_worker(model_path, number) for number in range(recipe.engine.workers)])
        for name, actor in zip(self.policy.names, self.policy.actors, strict=True):
            self._stops.append((name, self._actor_stop(actor, graceful=actor.stop)))
        waits: list[Awaitable[None]] = [self.policy.start(deadline_s)]
        if self._training:
            self.trainer = self._make_trainer(trainer_config(self.recipe, model_path, self.run_dir))
            self._stops.append(("trainer", self._actor_stop(self.trainer)))
            waits.append(self._trainer_ready(deadline_s))
        if recipe.token_capture.enabled:
            self.finalizers = finalizers = self._finalizer_pool(model_path)
            self._stops.append(("finalizers", lambda: finalizers.stop(self._patience_s)))
            waits.append(finalizers.start(deadline_s))
        else:
            request_s = recipe.finalizer.timeout_s / FINALIZER_REQUESTS
            self.finalizers = EchoFinalizer(self.run_dir, bos_of(model_path), request_s)
        await asyncio.gather(*waits)

    async def _trainer_ready(self, timeout_s: float) -> None:
        await within(self.trainer.ready.remote(), timeout_s, "the trainer", "loading the model", key=PARTS_S)
        if self.recipe.train.ranks > 1:
            others = await within(
                self.trainer.others.remote(), timeout_s, "the trainer", "naming its ranks", key=PARTS_S
            )
            self._further_ranks = {f"trainer rank {rank}": actor for rank, actor in enumerate(others, start=1)}

    def _make_worker(self, model_path: Path, number: int) -> WorkerActor:
        from workbench.serving.worker import PolicyWorkerActor

        made: WorkerActor = PolicyWorkerActor.options(
            **self.placement.options(WORKER, number),
            max_concurrency=WORKER_CONCURRENCY,
            runtime_env={"env_vars": {WORKER_TOKEN: os.environ[WORKER_TOKEN]}},
        ).remote(worker_config(self.recipe, model_path, number))
        return made

    def _finalizer_pool(self, model_path: Path) -> FinalizerPool:
        # Only where calls are captured: without capture nothing of that package is imported.
        from workbench.finalizer.actor import FinalizerActor

        recipe = self.recipe
        replays = self._training and recipe.train.router_replay.mode != "none"
        return FinalizerPool(
            lambda number: FinalizerActor.options(**self.placement.options(FINALIZER, number)).remote(
                str(self.run_dir),
                str(model_path),
                deadline_s=recipe.finalizer.timeout_s / FINALIZER_REQUESTS,
                routes=recipe.train.router_replay.model_dump() if replays else None,
            ),
            recipe.finalizer.actors,
            timeout_s=recipe.finalizer.timeout_s,
            replace_timeout_s=recipe.deadlines.replace_s,
            report=self._report,
        )

    async def _run_probe(self) -> None:
        self.probe = await self.policy.probe(self._start_s)

    async def _run_echo_probe(self) -> None:
        probing = probe_echo(self.gateway_url, "policy")
        self.probe = await within(probing, self._start_s, "the gateway", "the start-up probe", key=START_S)

    async def _start_gateway(self) -> None:
        recipe = self.recipe
        gateway = await within(
            asyncio.to_thread(
                GatewayProcess.start,
                {
                    "ledger_dir": str(self.run_dir / "ledger"),
                    "refused_path": str(self.run_dir / REFUSED_FILE),
                    "worker_url": self.policy.urls,
                    **recipe.gateway.model_dump(),
                    "model": "policy",
                    "sampling": recipe.sampling.model_dump(),
                    "capture_enabled": recipe.token_capture.enabled,
                },
                start_timeout_s=self._start_s,
            ),
            self._start_s + _REASON_S,
            "the gateway",
            "starting",
            key=START_S,
        )
        self.gateway = gateway
        self.gateway_url = gateway.url

        async def stop() -> None:
            await asyncio.to_thread(gateway.stop)

        self._stops.append(("gateway", stop))
        self.control = ControlClient(gateway.url, os.environ[CONTROL_TOKEN], timeout_s=recipe.deadlines.control_s)
        self._stops.append(("control client", self.control.close))

    async def prove(self, version: int) -> SyncProof:
        """Prove that sampler and trainer agree on the weights of `version`. Raises WeightSyncError."""
        if self._proof_ids is None:
            # In a thread: reading a tokenizer takes long enough for every rollout to notice.
            self._proof_ids = await asyncio.to_thread(proof_ids, self.model_path)
        return await prove_weights(
            self.policy,
            self.trainer,
            self._proof_ids,
            version=version,
            timeout_s=self.recipe.train.sync_timeout_s,
            max_mean_abs_delta=self.recipe.proof.max_mean_abs_delta,
        )

    def heartbeats(self) -> dict[str, Heartbeat]:
        """For every part that nothing can stand in for: its name, and a call that fails when it is dead.

        A part that is busy answers later. Finalizers are not among them: their pool replaces them.
        """
        beats: dict[str, Heartbeat] = {
            "the gateway": self._gateway_beat,
            **self.policy.heartbeats(),
        }
        actors = self._data_plane_actors | self._further_ranks
        if self._training:
            actors["the trainer"] = self.trainer
        return beats | {name: partial(_ask_ready, actor) for name, actor in actors.items()}

    async def _gateway_beat(self) -> None:
        self.gateway.check()

    def _make_trainer(self, config: dict[str, Any]) -> TrainerActor:
        places = [self.placement.options(RANK, number) for number in range(self.recipe.train.ranks)]
        if len(places) > 1:
            from workbench.train.ranks import TrainerRanksActor

            made: TrainerActor = TrainerRanksActor.options(**places[0]).remote(config, len(places), places[1:])
        else:
            from workbench.train import trainer

            made = trainer.TrainerActor.options(**places[0]).remote(config)
        return made

    def _actor_stop(self, actor: Actor, graceful: Asked[[], None] | None = None) -> Callable[[], Awaitable[None]]:
        async def stop() -> None:
            import ray

            if graceful is not None:
                # A part that is already dead, or too stuck to stop itself, is killed below all the same.
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(self._patience_s):
                        await graceful.remote()
            await asyncio.to_thread(ray.kill, actor)

        return stop

    async def _stop(self) -> None:
        """Stop everything that was started; a part that fails to stop never keeps the next one running."""
        self._on_phase("stopping")
        while self._stops:
            name, stop = self._stops.pop()
            try:
                async with asyncio.timeout(self.recipe.deadlines.stop_s):
                    await asyncio.shield(asyncio.ensure_future(stop()))
            except TimeoutError:
                self._on_phase(f"{name} did not stop within deadlines.stop_s={self.recipe.deadlines.stop_s:g}")
            except Exception as error:
                self._on_phase(f"stopping {name} failed: {type(error).__name__}: {error}")


def _ask_ready(actor: Actor) -> Awaitable[object]:
    return actor.__ray_ready__.remote()
