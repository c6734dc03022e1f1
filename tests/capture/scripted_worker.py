"""A scripted policy server in the test's own event loop, and a client that plays the gateway's part against it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from workbench.capture.staging import MemorySink
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import CaptureAdmission, StagedCall
from workbench.wire.headers import ADMISSION_HEADER, ROLLOUT_HEADER

TOKEN = "worker-token-of-the-tests"
USER = {"role": "user", "content": "hello there"}
NEXT = {"role": "user", "content": "say hello"}
DEADLINE_S = 10.0


class Agent:
    """Plays gateway and agent of one rollout: admits calls, asks for coordinates, keeps the parent chain."""

    def __init__(self, server: PolicyServer, rollout_id: str, path: str = "/v1/chat/completions") -> None:
        self.server = server
        self.rollout_id = rollout_id
        self.path = path
        self.http = httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60.0)
        _clients.append(self.http)
        self.coords: dict[str, dict[str, Any]] = {}
        self.chains: dict[str, list[str]] = {}

    def admission(self, parent: str | None = None, call_id: str | None = None) -> CaptureAdmission:
        call_id = call_id or uuid.uuid4().hex
        if parent is None:
            return CaptureAdmission(rollout_id=self.rollout_id, model_call_id=call_id, mode="text")
        before = self.coords[parent]
        return CaptureAdmission(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            parent_call_id=parent,
            prev_len=before["cum_len"],
            mode="token_in",
            staging_chain=self.chains[parent],
            parent_chain_hash=before["chain_hash"],
        )

    def headers(self, admission: CaptureAdmission) -> dict[str, str]:
        return {ROLLOUT_HEADER: self.rollout_id, ADMISSION_HEADER: admission.to_header()}

    async def call(
        self, messages: list[dict[str, Any]], parent: str | None = None, **body: Any
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """One call. Returns its id, the response (a streamed one put together) and the coordinates message."""
        admission = self.admission(parent)
        request = {"model": "policy", "messages": messages, **body}
        if body.get("stream"):
            response = await self._streamed(request, admission)
        else:
            answer = await self.http.post(self.path, json=request, headers=self.headers(admission))
            assert answer.status_code == 200, answer.text
            response = answer.json()
        outcome = await self.outcome(admission.model_call_id)
        assert outcome is not None
        self.remember(admission, outcome)
        return admission.model_call_id, response, outcome

    async def _streamed(self, request: dict[str, Any], admission: CaptureAdmission) -> dict[str, Any]:
        text, finish, frames = "", None, 0
        async with self.http.stream("POST", self.path, json=request, headers=self.headers(admission)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    frames += 1
                    choice = (orjson.loads(line[6:])["choices"] or [{}])[0]
                    text += (choice.get("delta") or {}).get("content") or ""
                    finish = choice.get("finish_reason") or finish
        message = {"role": "assistant", "content": text}
        return {"choices": [{"message": message, "finish_reason": finish}], "frames": frames}

    def remember(self, admission: CaptureAdmission, outcome: dict[str, Any]) -> None:
        coords = outcome["coords"]
        self.coords[admission.model_call_id] = coords
        if coords["disposition"] == "staged":
            self.chains[admission.model_call_id] = [*admission.staging_chain, coords["staging_key"]]

    async def outcome(self, call_id: str) -> dict[str, Any] | None:
        answer = await self.http.get(f"/workbench/capture/{call_id}")
        return answer.json() if answer.status_code == 200 else None


_clients: list[httpx.AsyncClient] = []


async def close_clients() -> None:
    """Close every agent's connections; each serving context does it at its end."""
    while _clients:
        await _clients.pop().aclose()


def text_of(response: dict[str, Any]) -> str:
    return response["choices"][0]["message"]["content"]


@contextlib.asynccontextmanager
async def serving(
    model: Path, script: str | Path, monkeypatch: Any, **settings: Any
) -> AsyncIterator[tuple[PolicyServer, MemorySink]]:
    """A started scripted server with an in-memory sink."""
    monkeypatch.setenv(WORKER_TOKEN_ENV, TOKEN)
    sink = settings.pop("sink", None) or MemorySink()
    config = WorkerConfig(model_path=str(model), engine="scripted", script_path=str(script), **settings)
    async with started(config, sink) as server:
        yield server, sink


@contextlib.asynccontextmanager
async def started(config: WorkerConfig, sink: MemorySink) -> AsyncIterator[PolicyServer]:
    """A server of these settings, started; stopped, with its clients, in the end."""
    server = PolicyServer(config, sink, sink)
    await server.start()
    try:
        yield server
    finally:
        await close_clients()
        await server.stop()


def write_script(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "script.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    return path


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def rows_of(sink: MemorySink, agent: Agent, call_id: str) -> list[StagedCall]:
    rows = await sink.fetch(agent.chains[call_id])
    assert all(isinstance(row, StagedCall) for row in rows)
    return rows  # type: ignore[return-value]


def joined(rows: list[StagedCall], column: str) -> list[Any]:
    return np.concatenate([getattr(row, column) for row in rows]).tolist()


async def until(condition: Any) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the awaited state never came"
        await asyncio.sleep(0.01)
