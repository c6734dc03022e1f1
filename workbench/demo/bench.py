"""Bench: a real gateway over a real policy worker, in this event loop, with a scripted engine and staging in memory.

    agent (any OpenAI client) ──▶ gateway ──▶ worker (capture core, splice, scripted engine) ──▶ MemorySink
                                     └▶ ledger/            finalise: verify, rows, parts ──▶ a run directory
For notebooks and demonstrations: it starts in a second and needs neither a model nor Ray. Everything that is about
custody is the product's own; what is replaced is the model (a script says what it samples), TransferQueue (a
dictionary) and training (there is none). Invariant: what `finalise` leaves is an ordinary run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import orjson
import uvicorn

from workbench import runs
from workbench.capture.staging import MemorySink
from workbench.errors import SetupError, StagingError
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome, RowSummary
from workbench.finalizer.parts import write_group
from workbench.gateway.app import Gateway
from workbench.gateway.client import ControlClient
from workbench.gateway.settings import WORKER_TOKEN, GatewaySettings
from workbench.gateway.sockets import listen
from workbench.ledger import assemble_receipt
from workbench.runs.vocabulary import load_vocabulary
from workbench.runs.writer import RunWriter
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import RolloutManifest, StagedCall

TOKENIZER = Path(__file__).resolve().parent / "tokenizer"
Storage = dict[str, StagedCall | StagingError]


class Bench:
    """What runs on the bench. `path` is the run directory, `url` the gateway's address; made by `open_bench`."""

    def __init__(self, path: Path, gateway: Gateway, worker: PolicyServer, sink: MemorySink, url: str) -> None:
        self.path = path
        self.gateway = gateway
        self.worker = worker
        self.sink = sink
        self.url = url
        self.http = openai.DefaultAsyncHttpxClient(timeout=30.0, trust_env=False)
        self.control = ControlClient(url, gateway.control_token)
        self._writer = RunWriter(path)
        self._writer.status(run=path.name, status="running")
        (path / "vocabulary.json").write_bytes(load_vocabulary(TOKENIZER / "tokenizer.json").dump())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the scripted policy."""
        return self.worker.tokenizer

    def agent(self, rollout_id: str) -> openai.AsyncOpenAI:
        """A client as any agent would make it: the base URL is all it knows."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/ng-rollout/{rollout_id}/v1", api_key="unused", max_retries=0, http_client=self.http
        )

    async def say(self, rollout_id: str, messages: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """One chat request of a rollout; returns the served object as JSON."""
        answer = await self.agent(rollout_id).chat.completions.create(
            model="policy",
            messages=messages,  # type: ignore[arg-type]
            **options,
        )
        return answer.model_dump(mode="json", exclude_unset=True)

    async def finish(self, rollout_id: str, response: dict[str, Any] | None, reward: float = 1.0) -> RolloutOutcome:
        """Freeze a rollout and assemble its receipt, with the scored response as witness."""
        closed = await self.control.freeze(rollout_id, response=response)
        manifest = RolloutManifest.model_validate(closed["manifest"])
        receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=reward, response=response)
        return RolloutOutcome(
            rollout_id=rollout_id,
            index=0,
            receipt=receipt,
            failures=manifest.failures,
            detail=closed.get("nearest"),
            reward=reward,
        )

    async def fetch(self, outcomes: Sequence[RolloutOutcome]) -> Storage:
        """The staged calls of these rollouts by key, as a finalizer reads them: one batch."""
        keys = [r.staging_key for o in outcomes if o.receipt is not None for r in o.receipt.manifest]
        return dict(zip(keys, await self.sink.fetch(keys), strict=True))

    async def finalise(
        self,
        group_id: str,
        outcomes: Sequence[RolloutOutcome],
        damage: Callable[[Storage], None] | None = None,
    ) -> list[RowSummary]:
        """Verify a group and write it into the run directory. `damage` may spoil what storage gave back before that."""
        placed = [outcome.model_copy(update={"index": index}) for index, outcome in enumerate(outcomes)]
        request = FinalizationRequest(group_id=group_id, weight_version=0, rollouts=placed)
        staged = await self.fetch(placed)
        if damage is not None:
            damage(staged)
        assembly = assemble(request, staged, self.tokenizer.bos_token_id)
        write_group(self.path, request, staged, assembly)
        rows = [row.model_dump(mode="json") for row in assembly.summaries]
        self._writer.group(
            {"group_id": group_id, "step": 1, "weight_version": 0, **assembly.metrics.rates(), "rollouts": rows}
        )
        return assembly.summaries

    @property
    def run(self) -> runs.Run:
        """The run directory, opened."""
        return runs.open(self.path)

    async def close(self) -> None:
        self._writer.status(status="done")
        self._writer.close()
        await self.http.aclose()
        await self.control.close()


@contextlib.asynccontextmanager
async def open_bench(
    script: Sequence[dict[str, Any]],
    *,
    path: Path | None = None,
    sink: MemorySink | None = None,
    **worker: Any,
) -> AsyncIterator[Bench]:
    """Start a bench; it stops when the block ends.

    `script` holds the lines of the scripted engine (see `workbench.serving.scripted`). `path` is where the run goes,
    None for a temporary directory that stays until the process ends. `worker` are settings of `WorkerConfig`.
    """
    path = path or Path(tempfile.mkdtemp(prefix="workbench-bench-")) / "bench"
    path.mkdir(parents=True, exist_ok=True)
    lines = path / "script.jsonl"
    lines.write_bytes(b"".join(_line(number, line) for number, line in enumerate(script, start=1)))
    sink = sink if sink is not None else MemorySink()
    config = WorkerConfig(
        model_path=str(TOKENIZER),
        engine="scripted",
        script_path=str(lines),
        sampling={"temperature": 1.0, "max_tokens": 160},
        **{"max_model_len": 512, "sink_timeout_s": 5.0, **worker},
    )
    token = secrets.token_hex(16)
    with _in_environment(WORKER_TOKEN, token):
        policy = PolicyServer(config, sink, sink)
    url = await policy.start()
    settings = GatewaySettings(
        ledger_dir=str(path / "ledger"), worker_url=url, sampling={"temperature": 1.0, "max_tokens": 160}
    )
    gateway = Gateway(settings, secrets.token_hex(16), token)
    try:
        async with _served(gateway.app()) as address:
            bench = Bench(path, gateway, policy, sink, address)
            try:
                yield bench
            finally:
                await bench.close()
                await gateway.close()
    finally:
        await policy.stop()


def _line(number: int, line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line) + b"\n"
    except TypeError as error:
        raise SetupError(f"Line {number} of the script cannot be written as JSON ({error}): {line!r:.200}") from error


@contextlib.contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the process, which may be a notebook's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def _served(app: Any) -> AsyncIterator[str]:
    (listener,) = listen("127.0.0.1", 0, 1)
    server = _QuietServer(uvicorn.Config(app, log_level="error", lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
