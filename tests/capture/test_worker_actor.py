"""The policy worker as a Ray actor: it stages into TransferQueue, and nothing of it outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest
from capture.scripted_worker import TOKEN, Agent, close_clients, text_of

from workbench import dataplane, models
from workbench.capture.staging import TransferQueueSource
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.wire import StagedCall

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(240)]

USER = {"role": "user", "content": "Hello, who are you?"}
GONE_WITHIN_S = 10.0


class Remote:
    """What `Agent` needs of a server that lives in another process."""

    def __init__(self, url: str) -> None:
        self.url = url


async def test_killed_worker_leaves_staged_rows_and_no_process(tq: Any) -> None:
    from workbench.serving.worker import PolicyWorkerActor

    config = {
        "model_path": str(models.build("tiny")),
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_gib": 0.25,
        "sampling": {"max_tokens": 12},
        "cache_bytes": 0,
    }
    environment = {WORKER_TOKEN_ENV: TOKEN, **dataplane.environment(5.0, 1)}
    actor = PolicyWorkerActor.options(num_cpus=1, runtime_env={"env_vars": environment}).remote(config)
    url = await asyncio.wait_for(actor.start.remote(), 150)
    found = await asyncio.wait_for(actor.probe.remote(), 60)
    assert found["prefix_stable"] is True

    agent = Agent(Remote(url), "run.0.0.0")  # type: ignore[arg-type]
    first, response, _ = await agent.call([USER])
    said = {"role": "assistant", "content": text_of(response)}
    second, _, outcome = await agent.call([USER, said, USER], first, stream=True)
    assert outcome["failure"] is None
    # Without memory of its own the worker read the parent back from TransferQueue.
    assert (await actor.status.remote())["prefix_fetches"] == 2
    timings = await asyncio.wait_for(actor.update_weights.remote(config["model_path"], 1), 60)
    assert timings["repacked"] >= 1
    assert await actor.weight_version.remote() == 1
    (scores,) = await actor.score.remote([[1, 5, 9, 13]])
    assert len(scores) == 3

    server = psutil.Process((await actor.status.remote())["pid"])
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 2
    await close_clients()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < deadline, f"still running: {[p for p in family if p.is_running()]}"
        await asyncio.sleep(0.1)

    rows = await TransferQueueSource().fetch(agent.chains[second])
    assert [type(row) for row in rows] == [StagedCall, StagedCall]
    assert rows[1].prev_len == rows[0].cum_len
    await TransferQueueSource().clear(agent.chains[second])
