"""Worker: one policy, served over HTTP by its inference engine, with every tagged call captured.

    start: engine (vLLM in a child process, or scripted) → serving app → capture gate → uvicorn in this event loop
    update_weights: hold new calls → wait until none runs, or pause those that do → load and repack → reset the prefix
                    cache → version := new
`PolicyServer` is a plain async class; `PolicyWorker` is the Ray actor around it, staging into TransferQueue.
Invariants: a call's version is the one at its admission; no call straddles two versions but where that is asked for;
nothing is sampled after an update that failed in the engine; when this process dies, killed too, the engine's
processes end with it.
Not here: what a worker is told (settings), how a call is captured (engine, splice, core), what the start-up probe asks
(probe).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from workbench import dataplane
from workbench.errors import CaptureError, ComponentDied, DeadlineExceeded, SetupError, WeightSyncError
from workbench.part_logs import own_log
from workbench.serving.door import OF_ITS_NODE, WORKER_TOKEN_ENV, Door
from workbench.serving.gate import GatedEngine, GenerationGate
from workbench.serving.settings import WorkerConfig

if TYPE_CHECKING:
    from workbench.capture.attach import Capture
    from workbench.capture.core import StagingSink, StagingSource

STOP_TIMEOUT_S = 10.0
HEADER_BYTES = 16 * 2**20
"""What a request's headers may have where h11 reads them (without httptools, which has no limit). An admission names
the calls of its chain, about 80 bytes each; h11's own 64 KiB are full after 800."""


class PolicyServer:
    """One engine, its serving app and, where the settings say so, the capture around it, in the running event loop.

    `sink` stages captured calls, `source` reads them back when a parent's ids are not in memory; without capture both
    may be None. The bearer token that requests must carry is read from the environment variable WORKBENCH_WORKER_TOKEN.
    """

    def __init__(
        self, config: WorkerConfig, sink: StagingSink | None = None, source: StagingSource | None = None
    ) -> None:
        self.config = config
        self.url = ""
        self._version = 0
        self._token = os.environ.get(WORKER_TOKEN_ENV, "")
        self.gate = GenerationGate()
        self.capture: Capture | None = None
        """What records tagged calls; None where capture is off, and then nothing of that package is imported."""
        if config.capture_enabled:
            from workbench.capture.attach import Capture

            if sink is None:
                raise SetupError("A capturing worker needs a sink to stage calls in.")
            self.capture = Capture(config, sink, source, self.weight_version)
        self.engine: Any = None
        """The engine underneath, uncaptured; None before `start` and after `stop`."""
        self.tokenizer: Any = None
        self._paused = False
        """Whether the engine was asked to pause and has not gone on since; it may be paused then."""
        self._http: Any = None
        self._serving: asyncio.Task[None] | None = None

    def weight_version(self) -> int:
        """Version of the weights that the engine runs; 0 at start, then what `update_weights` was given."""
        return self._version

    def status(self) -> dict[str, Any]:
        """What `GET /workbench/status` answers."""
        status = {"pid": os.getpid(), "weight_version": self._version, "running_generations": self.gate.running}
        return status | (self.capture.status() if self.capture else {})

    async def start(self) -> str:
        """Start engine and HTTP server; returns the base URL.

        Raises `SetupError` for settings or a machine that cannot work, `DeadlineExceeded` after `start_timeout_s`.
        """
        if not self._token:
            raise SetupError(f"The worker needs its bearer token in the environment variable {WORKER_TOKEN_ENV}.")
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                app = await self._start_engine()
        except TimeoutError as error:
            _kill_children()
            raise DeadlineExceeded(
                f"The {self.config.engine} engine was not ready within {self.config.start_timeout_s:g} s. Next: raise "
                f"engine.start_timeout_s, or look at how far it came: {own_log()}."
            ) from error
        await self._serve(app)
        return self.url

    async def _start_engine(self) -> Any:
        config = self.config
        self.tokenizer = await asyncio.to_thread(_load_tokenizer, config)
        if config.engine == "scripted":
            return self._start_scripted()
        from workbench.serving import vllm_runtime

        arguments = await asyncio.to_thread(vllm_runtime.parse_serving_arguments, config)
        self.engine = await asyncio.to_thread(vllm_runtime.start_engine, config, arguments)
        await self.engine.collective_rpc("workbench_die_with", args=(os.getpid(),))
        if config.capture_routes and vllm_runtime.on_cpu():
            await vllm_runtime.record_routes(self.engine)
            if self.capture is not None:
                self.capture.take_routes = functools.partial(vllm_runtime.take_routes, self.engine)
        await self.engine.update_weight_version(str(self._version))
        stops = vllm_runtime.stop_token_ids(self.engine, self.tokenizer)
        return await vllm_runtime.build_app(self._wrap(self.engine, stops), arguments)

    def _start_scripted(self) -> Any:
        from workbench.serving.scripted import Script, ScriptedEngine
        from workbench.serving.scripted_app import ScriptedApp
        from workbench.serving.scripted_dialects import ScriptedDialects

        if self.config.script_path is None:
            raise SetupError("The scripted engine needs a script: set engine.script_path.")
        self.engine = ScriptedEngine(self.tokenizer)
        client = self._wrap(self.engine, {self.tokenizer.eos_token_id})
        script = Script(self.config.script_path)
        chat = ScriptedApp(client, script, self.config.served_model_name, self.config.max_model_len)
        chat.app.routes.extend(ScriptedDialects(chat).routes())
        return chat.app

    def _wrap(self, engine: Any, stops: set[int]) -> Any:
        if self.capture is None:
            return GatedEngine(engine, self.gate)
        return self.capture.wrap_engine(engine, self.gate, self.tokenizer, stops)

    async def _serve(self, app: Any) -> None:
        import uvicorn

        class QuietServer(uvicorn.Server):
            # Signals belong to the process, which may be a notebook or a Ray worker.
            @contextlib.contextmanager
            def capture_signals(self) -> Any:
                yield

        config = self.config
        inner = app if self.capture is None else self.capture.wrap_app(app)
        door = Door(inner, token=self._token, status=self.status, takes_tagged=self.capture is not None)
        listener = _listen(config.host, config.port)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        settings = uvicorn.Config(
            door,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,
            log_config=None,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        self._http = QuietServer(settings)
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
                raise ComponentDied("The worker's HTTP server ended before it listened.")
            await asyncio.sleep(0.01)

    async def probe(self) -> dict[str, Any]:
        """Hold a two-turn conversation with this worker and check what was captured. Raises `ProbeFailed`."""
        if self.capture is None:
            return {"capture_enabled": False}
        from workbench.capture.probe import run_probe

        return await run_probe(self, self.capture)

    async def update_weights(
        self, path: str, version: int, hold: bool = False, straddle: bool = False
    ) -> dict[str, float]:
        """Load the safetensors folder `path` as weight version `version`; returns the seconds each part took.

        New calls wait meanwhile, and with `hold` until `resume`, so that the new weights can be proved before anything
        is sampled from them. Running calls end first; with `straddle` they are paused and go on with the new weights,
        their prompts and what they had sampled computed again, and nothing of that leaves before `resume`. How many
        there were is `straddling` then. Raises `WeightSyncError` when loading fails or the prefix cache was not reset,
        `DeadlineExceeded` when running calls do not end within `quiet_timeout_s`, or pausing or loading takes longer
        than `load_timeout_s`, `ComponentDied` when the engine is gone. After a failure that the engine had a part in
        all calls stay held until an update succeeds.
        """
        if version <= self._version:
            raise WeightSyncError(f"Weight version {version} came after {self._version}; versions only grow.")
        if self.config.engine == "vllm":
            _check_folder(path)
        began = time.perf_counter()
        async with self.gate.alone(self.config.quiet_timeout_s, stay_closed=hold, straddle=straddle):
            timings = {"straddling": float(self.gate.running)} if straddle else {}
            if self.config.engine == "vllm":
                self.check_alive()
                self.gate.in_doubt = True
                if straddle:
                    await self._pause()
            timings["quiet_s"] = time.perf_counter() - began
            if self.config.engine == "vllm":
                timings |= await self._load(path, version)
            self._version = version
            self.gate.in_doubt = False
        return timings | {"total_s": time.perf_counter() - began}

    async def _pause(self) -> None:
        """Freeze running calls between two steps of the engine; should loading fail they stay frozen."""
        self._paused = True
        try:
            async with asyncio.timeout(self.config.load_timeout_s):
                await self.engine.pause_generation(mode="keep", clear_cache=False)
        except TimeoutError as error:
            raise DeadlineExceeded(f"The engine did not pause within {self.config.load_timeout_s:g} s.") from error

    def resume(self) -> None:
        """Let calls sample again after `update_weights(…, hold=True)`."""
        self.gate.open()

    def check_alive(self) -> None:
        """Raise ComponentDied when the engine is gone."""
        if self.config.engine == "vllm" and (self.engine is None or self.engine.errored):
            raise ComponentDied(
                f"The engine of the policy worker is gone. Next: its last words, if it had any: {own_log()}."
            )

    async def _load(self, path: str, version: int) -> dict[str, float]:
        try:
            async with asyncio.timeout(self.config.load_timeout_s):
                timings = await self._reload(path)
                await self.engine.update_weight_version(str(version))
                if self._paused:
                    await self.engine.resume_generation()
                    self._paused = False
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"The engine did not load {path} within {self.config.load_timeout_s:g} s; its weights are in doubt."
            ) from error
        return timings

    async def _reload(self, path: str) -> dict[str, float]:
        try:
            (timings, *_) = await self.engine.collective_rpc("workbench_reload", args=(str(path),))
        except Exception as error:
            self.check_alive()
            raise WeightSyncError(f"The engine could not load {path}: {error}") from error
        # With requests still holding blocks the engine would keep old keys and values and only warn about it.
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise WeightSyncError(f"The engine kept its prefix cache after loading {path}; its answers would be stale.")
        return timings

    async def score(self, token_ids: list[list[int]]) -> list[list[float]]:
        """Log-prob (nats) of every token after the first of each sequence, at temperature 1; never captured."""
        if self.config.engine == "scripted":
            raise CaptureError("The scripted engine has no model, so it cannot score tokens; skip the proof with it.")
        from workbench.serving import vllm_runtime

        self.check_alive()
        if self.gate.held:
            # Calls are kept back for exactly this: the new weights are scored before anything is sampled from them.
            return await vllm_runtime.score(self.engine, token_ids)
        async with self.gate.call():
            return await vllm_runtime.score(self.engine, token_ids)

    async def stop(self) -> None:
        """Stop serving and end the engine; harmless when it was not started."""
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.wait([self._serving], timeout=STOP_TIMEOUT_S)
            self._serving.cancel()
        if self.capture is not None:
            await self.capture.close(STOP_TIMEOUT_S)
        engine, self.engine = self.engine, None
        if engine is not None and self.config.engine == "vllm":
            from workbench.serving import vllm_runtime

            await asyncio.to_thread(vllm_runtime.shutdown, engine, STOP_TIMEOUT_S)


def _check_folder(path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise WeightSyncError(f"No weights at {path}: expected a folder with config.json and safetensors files.")


def _load_tokenizer(config: WorkerConfig) -> Any:
    if config.engine == "scripted":
        # What tokenizer.json says, without the import of torch that the choice of a class costs.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(config.model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model_path)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Named TCP on purpose: asyncio switches Nagle's delay off only for sockets that say so, and with it every exchange
    # takes 40 ms longer.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"The worker cannot listen on {host}:{port}: {error.strerror}. Next: set engine.port=0."
        ) from error
    listener.listen(1024)
    return listener


def _kill_children() -> None:
    """End the processes of an engine that did not become ready; it has no other handle yet."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class PolicyWorker:
    """What a Ray actor does around `PolicyServer`, staging into TransferQueue. Takes `WorkerConfig` as a mapping.

    Give it WORKBENCH_WORKER_TOKEN (and the data plane's limits) through `runtime_env={"env_vars": …}`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        settings = WorkerConfig.model_validate(config)
        if settings.host == OF_ITS_NODE:
            settings = settings.model_copy(update={"host": ray.util.get_node_ip_address()})
        if not settings.capture_enabled:
            self._server = PolicyServer(settings)
            return
        from workbench.capture.staging import TransferQueueSink, TransferQueueSource

        # The setting bounds a staging; the sink's own bound only has to lie behind it.
        sink = TransferQueueSink(max(60.0, settings.sink_timeout_s))
        self._server = PolicyServer(settings, sink, TransferQueueSource())

    async def start(self) -> str:
        """Base URL of the worker once it serves. Raises ComponentDied or DeadlineExceeded without a data plane."""
        if self._server.capture is not None:
            # Now, and not while the first call waits for its acknowledgement.
            await dataplane.connect(self._server.config.start_timeout_s)
        return await self._server.start()

    async def probe(self) -> dict[str, Any]:
        return await self._server.probe()

    async def update_weights(
        self, path: str, version: int, hold: bool = False, straddle: bool = False
    ) -> dict[str, float]:
        return await self._server.update_weights(path, version, hold, straddle)

    async def resume(self) -> None:
        self._server.resume()

    async def score(self, token_ids: list[list[int]]) -> list[list[float]]:
        return await self._server.score(token_ids)

    async def weight_version(self) -> int:
        return self._server.weight_version()

    async def status(self) -> dict[str, Any]:
        return self._server.status()

    async def check_alive(self) -> None:
        """Raise ComponentDied when the engine is gone."""
        self._server.check_alive()

    async def facts(self, call_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Sampled tokens and finish reason of those of the calls that were captured lately."""
        return {} if self._server.capture is None else self._server.capture.board.facts(call_ids)

    async def stop(self) -> None:
        await self._server.stop()


PolicyWorkerActor = ray.remote(PolicyWorker)
"""`PolicyWorkerActor.options(num_cpus=1).remote(config)`; its calls run side by side."""
