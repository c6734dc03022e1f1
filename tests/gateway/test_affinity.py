"""Several policy workers behind one gateway: a rollout stays with one of them, and goes with it.

Each worker has a staging store of its own here: a call that came to the other worker would not find its parent.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from conftest import CONTROL, WORKER, gateway_over
from workbench import models
from workbench.capture.staging import MemorySink
from workbench.gateway.client import ControlClient
from workbench.gateway.settings import WORKER_TOKEN
from workbench.gateway.upstream import Upstream
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer

ASK = [{"role": "user", "content": "say something"}]
ROLLOUTS, TURNS = 24, 3


@contextlib.asynccontextmanager
async def workers(folder: Path, number: int) -> AsyncIterator[list[tuple[PolicyServer, MemorySink]]]:
    script = folder / "script.jsonl"
    script.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in ("first", "second", "third")))
    config = WorkerConfig(model_path=str(models.build("tiny")), engine="scripted", script_path=str(script))
    started: list[tuple[PolicyServer, MemorySink]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WORKER_TOKEN, WORKER)
        for _ in range(number):
            sink = MemorySink()
            started.append((PolicyServer(config, sink, sink), sink))
    for worker, _ in started:
        await worker.start()
    try:
        yield started
    finally:
        for worker, _ in started:
            await worker.stop()


async def play(http: httpx.AsyncClient, url: str, rollout_id: str, turns: int) -> list[int]:
    """Statuses of a conversation; it ends with the first refusal."""
    messages: list[dict[str, Any]] = ASK
    statuses = []
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        answer = await http.post(f"{url}/ng-rollout/{rollout_id}/v1/chat/completions", json=body)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            break
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    return statuses


async def test_all_calls_of_a_rollout_go_to_one_worker_and_a_dead_ones_rollouts_end_with_it(tmp_path: Path) -> None:
    async with (
        workers(tmp_path, 2) as started,
        gateway_over([worker.url for worker, _ in started], tmp_path / "ledger") as (url, gateway),
        ControlClient(url, CONTROL) as control,
        httpx.AsyncClient(timeout=30.0) as http,
    ):
        names = [f"run.{group}.{index}.0" for group in range(ROLLOUTS // 4) for index in range(4)]
        for name in names:
            assert await play(http, url, name, TURNS) == [200] * TURNS
            manifest = await control.manifest(name)
            assert [record.mode for record in manifest.records] == ["text", *["token_in"] * (TURNS - 1)]
            assert not manifest.failures
            homes = [
                bool(await holds(sink, [record.staging_key for record in manifest.records])) for _, sink in started
            ]
            assert homes.count(True) == 1, "all of its calls are with one worker, and none with the other"
        home = {name: gateway.upstream.worker_of(name) for name in names}
        assert set(home.values()) == {worker.url for worker, _ in started}, "both have rollouts"

        dead, _ = started[1]
        await dead.stop()
        late = [f"late.{number}.0.0" for number in range(8)]
        for name in late:
            gone = gateway.upstream.worker_of(name) == dead.url
            assert await play(http, url, name, 1) == [502 if gone else 200]
            manifest = await control.manifest(name)
            assert [f.reason for f in manifest.failures] == (
                ["request_finished_without_staged_coordinates"] if gone else []
            )
        assert len({gateway.upstream.worker_of(name) for name in late}) == 2


async def holds(sink: MemorySink, keys: list[str]) -> int:
    """How many of these calls are in the store: all or none, in these tests."""
    found = sum(not isinstance(row, Exception) for row in await sink.fetch(keys))
    assert found in (0, len(keys))
    return found


def test_every_gateway_process_finds_the_same_worker_and_rollouts_are_spread_evenly() -> None:
    urls = [f"http://10.0.0.{number}:8000" for number in range(8)]
    one, other = Upstream(urls, None), Upstream(urls, None)
    names = [f"run.{group}.{index}.0" for group in range(200) for index in range(8)]
    assert [one.worker_of(name) for name in names] == [other.worker_of(name) for name in names]
    counts = [sum(one.worker_of(name) == url for name in names) for url in urls]
    assert min(counts) > 150 and max(counts) < 250, counts
