"""A gateway over a scripted policy worker, both serving real HTTP in the test's event loop, once a module.

The worker is the real one (capture core, transport, splice) with a scripted engine and an in-memory sink; tests choose
their replies by the pattern of their rollout id.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import pytest_asyncio
import uvicorn

from workbench import models
from workbench.capture.staging import MemorySink
from workbench.gateway.app import Gateway
from workbench.gateway.client import ControlClient
from workbench.gateway.patience import patient
from workbench.gateway.settings import WORKER_TOKEN, GatewaySettings
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer

CONTROL = "control-token-of-the-tests"
WORKER = "worker-token-of-the-tests"
WINDOW = 512

SCRIPT = [
    {"text": "first"},
    {"text": "second"},
    {"text": "third"},
    {"rollout": "nan.*", "text": "not a number", "fault": "nan_logprob", "at": 1},
    {"rollout": "held", "text": "this does not come out while anybody waits for it", "delay_s": 600.0},
    {"rollout": "held", "text": "and this at once"},
    {"rollout": "slow.*", "text": "this takes its time to come out", "delay_s": 0.6},
]


@dataclass
class Stack:
    """One gateway and what stands behind it."""

    url: str
    gateway: Gateway
    worker: PolicyServer
    sink: MemorySink
    control: ControlClient
    http: httpx.AsyncClient

    def agent(self, rollout_id: str) -> openai.AsyncOpenAI:
        return self.client(f"/ng-rollout/{rollout_id}/v1")

    def client(self, path: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + path, api_key="unused", max_retries=0, http_client=self.http)


class Quiet(uvicorn.Server):
    """A server in the test's own loop that stops when it is told to: uvicorn looks ten times a second whether it should
    and waits a tenth of a second more, which is most of the time of a test that starts two."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.connections and not state.tasks, "the server's connections are closed")


@contextlib.asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an ASGI app on a free port. `options` are uvicorn's."""
    options = {"log_level": "error", "lifespan": "off", "timeout_keep_alive": 120, "log_config": None, **options}
    listener = socket.create_server(("127.0.0.1", 0))
    server = Quiet(uvicorn.Config(app, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started, "the server listens")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.told.set()
        await task


@contextlib.asynccontextmanager
async def gateway_over(worker_url: str, ledger: Path, **settings: Any) -> AsyncIterator[tuple[str, Gateway]]:
    checked = GatewaySettings(ledger_dir=str(ledger), worker_url=worker_url, **settings)
    gateway = Gateway(checked, CONTROL, WORKER)
    async with listening(gateway.app(), http=patient(checked.client_timeout_s), ws="none") as url:
        try:
            yield url, gateway
        finally:
            await gateway.close()


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def stack_in(
    folder: Path,
    script: list[dict[str, Any]],
    *,
    model: Path | None = None,
    window: int = WINDOW,
    max_tokens: int = 64,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A worker that says `script`, with the tiny model's tokenizer where no `model` is given, and a gateway over it."""
    path = folder / "script.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, script)))
    sampling = {"temperature": 1.0, "max_tokens": max_tokens}
    config = WorkerConfig(
        model_path=str(model or models.build("tiny")),
        engine="scripted",
        script_path=str(path),
        max_model_len=window,
        sampling=sampling,
    )
    sink = MemorySink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WORKER_TOKEN, WORKER)
        worker = PolicyServer(config, sink, sink)
    worker_url = await worker.start()
    async with (
        gateway_over(worker_url, folder / "ledger", sampling=sampling, **settings) as (url, gateway),
        ControlClient(url, CONTROL) as control,
        httpx.AsyncClient(timeout=30.0) as http,
    ):
        yield Stack(url, gateway, worker, sink, control, http)
    await worker.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with stack_in(tmp_path_factory.mktemp("stack"), SCRIPT, max_body_bytes=64 * 1024) as stack:
        yield stack


async def say(agent: openai.AsyncOpenAI, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    answer = await agent.chat.completions.create(model="policy", messages=messages, **options)
    return answer.model_dump(mode="json", exclude_unset=True)


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]["message"]


def follow(messages: list[dict[str, Any]], answer: dict[str, Any], text: str = "and then?") -> list[dict[str, Any]]:
    return [*messages, message_of(answer), {"role": "user", "content": text}]
