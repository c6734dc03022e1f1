"""Fleet: start every part of a campaign in order, and leave nothing running when it ends.

    Ray → TransferQueue → policy worker ∥ trainer ∥ finalizers → probe → gateway
                                       (no trainer where nothing is trained: serve)

Invariants: each start has a deadline and names the part that missed it; whatever was started is stopped, in reverse
order and each within a deadline, also when a later part fails to start.
Not here: what the parts are used for (controller).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from workbench import dataplane
from workbench.actors import as_coroutine, within
from workbench.campaign import derived
from workbench.campaign.doctor import before_a_run
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
from workbench.places import make_ray_directory

WORKER_CONCURRENCY = 64
HURRIED_S = 2.0
# Its processes start one after the other and import torch first: 15 s alone, and two minutes on a busy machine.
_DATA_PLANE_STARTS_WITHIN_S = 180.0
# Fetch, publish, clear: together they end before the controller stops waiting, so that the one at fault is named.
FINALIZER_REQUESTS = 4


class Fleet:
    """The running parts of one campaign. Use as `async with Fleet(recipe, run_dir) as fleet`.

    After entry: `worker`, `trainer` (Ray actor handles), `finalizers` (their pool, or the echo finalizer),
    `control` (gateway control client),
    `gateway_url`, `probe` (the start-up probe's report) and `timings_s` (seconds a part took to start).
    `report(kind, **fields)` is told what happens to parts while they run.
    Without `training` there is no trainer (`trainer` is None), and nothing that only a trainer needs is asked for.
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
        self.run_dir = run_dir
        self._training = training
        # Ray's handles have the methods of the class behind them, as coroutines under `.remote`; no type says so.
        self.worker: Any = None
        self.trainer: Any = None
        self._report = report
        self.finalizers: FinalizerPool | EchoFinalizer
        self._data_plane_actors: dict[str, Any] = {}
        self.timings_s: dict[str, float] = {}
        self.probe: dict[str, Any] = {}
        self._proof_ids: list[list[int]] | None = None
        self._on_phase = on_phase
        self._patience_s = recipe.deadlines.stop_s / 2
        """How long a part may take to stop itself before it is killed."""
        self._stops: list[tuple[str, Callable[[], Awaitable[None]]]] = []

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, exc_type: object, error: BaseException | None, *_: object) -> None:
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
        for finding in before_a_run(self.recipe, training=self._training):
            if not finding.good:
                raise SetupError(f"{finding.what}: {finding.found}; {finding.cure}")

    async def _start_ray(self) -> None:
        import ray

        recipe, plane = self.recipe, self.recipe.data_plane
        if ray.is_initialized():
            raise SetupError("Ray is already running in this process. Next: ray.shutdown(), or start a new kernel.")
        temp_dir = str(make_ray_directory())

        def init() -> None:
            logging.getLogger("ray").setLevel(logging.ERROR)
            options: dict[str, Any] = {
                "log_to_driver": False,
                # Its start-up lines carry times and would stand in the notebook; what goes wrong is raised.
                "configure_logging": False,
                "include_dashboard": False,
                "runtime_env": {
                    "env_vars": {
                        **dataplane.environment(plane.send_recv_timeout_s, plane.max_attempts),
                        # Engine and trainer share this machine's processors: a thread that spins while it waits for
                        # its team would take them from the other.
                        "OMP_WAIT_POLICY": "PASSIVE",
                    }
                },
            }
            if recipe.ray.address == "local":
                options |= {"address": "local", "num_cpus": recipe.ray.num_cpus, "_temp_dir": temp_dir}
                options["_system_config"] = dict(dataplane.AS_URGENT_AS_WE_ARE)
                options["runtime_env"]["py_executable"] = dataplane.interpreter()
            else:
                options |= {"address": recipe.ray.address}
            try:
                ray.init(**options)
            except Exception as error:
                # Its own processes get 30 s from Ray, whatever we would give them, and then a bare Exception.
                said = " ".join(str(error).split()) or type(error).__name__
                raise ComponentDied(f"Ray did not start: {said} Next: try when the machine is less busy.") from error

        async def stop() -> None:
            await asyncio.to_thread(ray.shutdown)
            shutil.rmtree(temp_dir, ignore_errors=True)

        self._stops.append(("ray", stop))
        await within(asyncio.to_thread(init), 120.0, "Ray", "starting")

    async def _start_data_plane(self) -> None:
        plane = self.recipe.data_plane

        async def stop() -> None:
            await dataplane.drain_clears(self._patience_s)
            await asyncio.to_thread(dataplane.stop)

        self._stops.append(("data plane", stop))
        await within(
            asyncio.to_thread(
                dataplane.start,
                storage_units=plane.storage_units,
                send_recv_timeout_s=plane.send_recv_timeout_s,
                max_attempts=plane.max_attempts,
                start_timeout_s=_DATA_PLANE_STARTS_WITHIN_S,
            ),
            _DATA_PLANE_STARTS_WITHIN_S + 10.0,
            "TransferQueue",
            "starting",
        )
        self._data_plane_actors = await asyncio.to_thread(dataplane.actors, plane.storage_units)

    async def _start_actors(self, model_path: Path) -> None:
        from workbench.serving.worker import PolicyWorker

        worker_class: Any = PolicyWorker
        recipe = self.recipe
        deadline_s = recipe.engine.start_timeout_s
        config = self._worker_config(model_path)
        self.worker = worker_class.options(
            num_cpus=1,
            max_concurrency=WORKER_CONCURRENCY,
            runtime_env={"env_vars": {WORKER_TOKEN: os.environ[WORKER_TOKEN]}},
        ).remote(config)
        self._stops.append(("policy worker", self._actor_stop(self.worker, graceful="stop")))
        waits = [
            # The worker ends its own wait at deadline_s, with a better reason than ours.
            within(self.worker.start.remote(), deadline_s + 30.0, "the policy worker", "starting its engine")
        ]
        if self._training:
            self.trainer = self._make_trainer(self._trainer_config(model_path))
            self._stops.append(("trainer", self._actor_stop(self.trainer)))
            waits.append(within(self.trainer.ready.remote(), deadline_s, "the trainer", "loading the model"))
        if recipe.token_capture.enabled:
            self.finalizers = finalizers = self._finalizer_pool(model_path)
            self._stops.append(("finalizers", lambda: finalizers.stop(self._patience_s)))
            waits.append(finalizers.start(deadline_s))
        else:
            request_s = recipe.finalizer.timeout_s / FINALIZER_REQUESTS
            self.finalizers = EchoFinalizer(self.run_dir, bos_of(model_path), request_s)
        self.worker_url, *_ = await asyncio.gather(*waits)

    def _finalizer_pool(self, model_path: Path) -> FinalizerPool:
        # Only where calls are captured: without capture nothing of that package is imported.
        from workbench.finalizer.actor import FinalizerActor

        recipe = self.recipe
        replays = self._training and recipe.train.router_replay.mode != "none"
        return FinalizerPool(
            lambda: FinalizerActor.options(num_cpus=1).remote(
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

    def _worker_config(self, model_path: Path) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "model_path": str(model_path),
            "dtype": recipe.model.dtype,
            "max_model_len": recipe.model.max_model_len,
            "tool_call_parser": recipe.model.tool_call_parser,
            "reasoning_parser": recipe.model.reasoning_parser,
            "max_num_seqs": recipe.engine.max_num_seqs,
            "kv_cache_gib": recipe.engine.kv_cache_gib,
            "threads": recipe.engine.threads,
            "port": recipe.engine.port,
            "sampling": recipe.sampling.model_dump(exclude={"seed_each_call"})
            | {"seed": recipe.seed if recipe.sampling.seed_each_call else None},
            "sink_timeout_s": recipe.token_capture.sink_timeout_s,
            "cache_bytes": recipe.token_capture.cache_bytes,
            "capture_enabled": recipe.token_capture.enabled,
            "capture_routes": recipe.token_capture.routes,
            "seed": recipe.seed,
            "engine": recipe.engine.kind,
            "script_path": recipe.engine.script_path,
            "start_timeout_s": recipe.engine.start_timeout_s,
            "quiet_timeout_s": recipe.train.sync_timeout_s,
        }

    async def _run_probe(self) -> None:
        self.probe = await within(self.worker.probe.remote(), 120.0, "the policy worker", "the start-up probe")

    async def _run_echo_probe(self) -> None:
        self.probe = await within(probe_echo(self.gateway_url, "policy"), 120.0, "the gateway", "the start-up probe")

    async def _start_gateway(self) -> None:
        recipe = self.recipe
        gateway = await within(
            asyncio.to_thread(
                GatewayProcess.start,
                {
                    "ledger_dir": str(self.run_dir / "ledger"),
                    "worker_url": self.worker_url,
                    **recipe.gateway.model_dump(),
                    "model": "policy",
                    "sampling": recipe.sampling.model_dump(),
                    "capture_enabled": recipe.token_capture.enabled,
                },
            ),
            # It ends its own wait earlier, with a better reason than ours.
            90.0,
            "the gateway",
            "starting",
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
            self.worker,
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
            "the policy worker": lambda: self.worker.check_alive.remote(),
        }
        actors = self._data_plane_actors | ({"the trainer": self.trainer} if self.trainer is not None else {})
        return beats | {name: partial(_ask_ready, actor) for name, actor in actors.items()}

    async def _gateway_beat(self) -> None:
        self.gateway.check()

    def _trainer_config(self, model_path: Path) -> dict[str, Any]:
        recipe = self.recipe
        train = recipe.train.model_dump(
            include={
                "learning_rate", "weight_decay", "max_grad_norm", "micro_batch_tokens", "threads", "dtype",
                "advantage", "clip_low", "clip_high",
            }
        )  # fmt: skip
        loss, off_policy = recipe.train.loss, recipe.train.off_policy
        return train | {
            **loss.model_dump(),
            "constant_tokens": derived.constant_tokens(recipe),
            "kl_coef": recipe.train.kl.coefficient,
            "kl_estimator": recipe.train.kl.estimator,
            "off_policy": off_policy.policy,
            "router_replay": recipe.train.router_replay.mode,
            "max_lag": derived.max_lag(recipe),
            "model_path": str(model_path),
            "run_dir": str(self.run_dir),
            "publish_dtype": recipe.model.dtype,
            "temperature": recipe.sampling.temperature,
            "seed": recipe.seed,
        }

    def _make_trainer(self, config: dict[str, Any]) -> Any:
        if self.recipe.train.ranks > 1:
            from workbench.train.ranks import TrainerRanksActor

            return TrainerRanksActor.options(num_cpus=1).remote(config, self.recipe.train.ranks)
        from workbench.train.trainer import TrainerActor

        return TrainerActor.options(num_cpus=1).remote(config)

    def _actor_stop(self, actor: Any, graceful: str | None = None) -> Callable[[], Awaitable[None]]:
        async def stop() -> None:
            import ray

            if graceful is not None:
                # A part that is already dead, or too stuck to stop itself, is killed below all the same.
                with contextlib.suppress(Exception):
                    call = as_coroutine(getattr(actor, graceful).remote())
                    await asyncio.wait_for(call, self._patience_s)
            await asyncio.to_thread(ray.kill, actor)

        return stop

    async def _stop(self) -> None:
        """Stop everything that was started; a part that fails to stop never keeps the next one running."""
        self._on_phase("stopping")
        while self._stops:
            name, stop = self._stops.pop()
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(stop())), self.recipe.deadlines.stop_s)
            except Exception as error:
                self._on_phase(f"stopping {name} failed: {type(error).__name__}: {error}")


def _ask_ready(actor: Any) -> Awaitable[Any]:
    return actor.__ray_ready__.remote()
