"""Several gateway processes on one port and one ledger: a rollout's calls land on any of them, and nothing shows it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from conftest import CONTROL, WORKER, Stack, until
from workbench.errors import ComponentDied
from workbench.gateway.client import ControlClient
from workbench.gateway.process import GatewayProcess
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN
from workbench.ledger import LedgerStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROCESSES, ROLLOUTS, CALLS, AT_ONCE = 4, 200, 6, 16
ASK = [{"role": "user", "content": "say something"}]


@dataclass
class Shared:
    """One gateway of several processes. `http` makes a connection for every request, so that any of them may get it."""

    process: GatewayProcess
    ledger: Path
    http: httpx.AsyncClient

    async def post(
        self, rollout_id: str, messages: list[dict[str, Any]] = ASK, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        url = f"{self.process.url}/ng-rollout/{rollout_id}/v1/chat/completions"
        return await self.http.post(url, json={"model": "policy", "messages": messages, **body}, headers=headers)

    async def metrics(self) -> dict[str, float]:
        text = (await self.http.get(f"{self.process.url}/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^(workbench_\S+) (\S+)$", text, re.MULTILINE)}

    def steps(self, rollout_id: str, kind: str) -> list[dict[str, Any]]:
        path = self.ledger / f"{rollout_id}.replay.jsonl"
        lines = map(orjson.loads, path.read_bytes().splitlines()) if path.exists() else ()
        return [line for line in lines if line["kind"] == kind]


@contextlib.asynccontextmanager
async def gateway_of(processes: int, stack: Stack, ledger: Path) -> AsyncIterator[Shared]:
    settings = {"ledger_dir": str(ledger), "worker_url": stack.worker.url, "workers": processes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTROL_TOKEN, CONTROL)
        patch.setenv(WORKER_TOKEN, WORKER)
        process = await asyncio.to_thread(GatewayProcess.start, settings)
    async with httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        yield Shared(process, ledger, http)
    await asyncio.to_thread(process.stop)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    async with gateway_of(PROCESSES, stack, tmp_path_factory.mktemp("ledger")) as shared:
        yield shared


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_row_is_lost_and_no_call_is_falsely_unresolved(shared: Shared) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def play(rollout_id: str) -> list[str]:
        served: list[str] = []
        messages = ASK
        async with slots:
            for _ in range(CALLS):
                answer = await shared.post(rollout_id, messages)
                assert answer.status_code == 200, answer.text
                said = answer.json()
                served.append(said["id"])
                messages = [*messages, said["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        return served

    before = Counter(await shared.metrics())
    rollouts = [f"many.{number}" for number in range(ROLLOUTS)]
    served = await asyncio.gather(*map(play, rollouts))
    store = LedgerStore(shared.ledger)
    processes: Counter[str] = Counter()
    hops = 0
    for rollout_id, ids in zip(rollouts, served, strict=True):
        manifest = store.manifest(rollout_id)
        assert manifest.failures == []
        assert [record.response_id for record in manifest.records] == ids
        calls = [record.model_call_id for record in manifest.records]
        assert [record.parent_call_id for record in manifest.records] == [None, *calls[:-1]]
        handled = [step["gateway"] for step in shared.steps(rollout_id, "begun")]
        processes.update(handled)
        hops += sum(one != other for one, other in itertools.pairwise(handled))
    assert len(processes) == PROCESSES, "every process has taken calls"
    assert hops > ROLLOUTS, "rollouts go from process to process"
    counted = Counter(await shared.metrics())
    live = counted["workbench_live_calls"]
    counted.subtract(before)  # the other tests' calls went through the same processes
    assert counted['workbench_admissions_total{mode="text"}'] == ROLLOUTS
    assert counted['workbench_admissions_total{mode="token_in"}'] == ROLLOUTS * (CALLS - 1)
    assert counted["workbench_commits_total"] == counted["workbench_staging_seconds_count"] == ROLLOUTS * CALLS
    assert live == 0


async def test_of_equal_keyed_requests_at_all_processes_one_is_the_call(shared: Shared) -> None:
    key, rollout_id = {"idempotency-key": "k"}, "slow.joined"
    asked = [shared.post(rollout_id, headers=key, stream=True) for _ in range(4 * PROCESSES)]
    answers = {(answer.status_code, answer.content) for answer in await asyncio.gather(*asked)}
    assert len(answers) == 1
    assert len(LedgerStore(shared.ledger).manifest(rollout_id).records) == 1
    assert len(shared.steps(rollout_id, "begun")) == 1


async def test_freeze_at_one_process_closes_the_rollout_at_all(shared: Shared) -> None:
    await shared.post("closed")
    async with ControlClient(shared.process.url, CONTROL) as control:
        await control.freeze("closed")
    refused = await asyncio.gather(*(shared.post("closed") for _ in range(4 * PROCESSES)))
    assert {answer.status_code for answer in refused} == {409}


async def test_a_named_response_is_known_to_every_process(shared: Shared) -> None:
    url = f"{shared.process.url}/ng-rollout/named/v1/responses"
    named: dict[str, str] = {}
    for _ in range(2 * PROCESSES):
        answer = await shared.http.post(url, json={"model": "policy", "input": "go", **named})
        assert answer.status_code == 200, answer.text
        named = {"previous_response_id": answer.json()["id"]}
    manifest = LedgerStore(shared.ledger).manifest("named")
    calls = [record.model_call_id for record in manifest.records]
    assert [record.parent_call_id for record in manifest.records] == [None, *calls[:-1]]


async def test_a_dead_process_is_noticed_and_its_call_gets_its_row_from_another(stack: Stack, tmp_path: Path) -> None:
    async with gateway_of(2, stack, tmp_path) as shared:
        await _lose_one_process(stack, shared)


async def _lose_one_process(stack: Stack, shared: Shared) -> None:
    asked = asyncio.create_task(shared.post("held"))
    await until(lambda: stack.worker.capture.board.live_calls, "the call is under way")
    (begun,) = shared.steps("held", "begun")
    pid = int((shared.ledger / f"{begun['gateway']}.gateway").read_text())
    assert pid in shared.process.pids
    assert (await shared.metrics())["workbench_live_calls"] == 1
    shared.process.check()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await asked
    await until(lambda: not shared.process.alive(), "its parent sees it")
    with pytest.raises(ComponentDied, match=rf"process {shared.process.pids.index(pid) + 1} of 2 .*{pid}"):
        shared.process.check()
    again = await shared.post("held", headers={"x-stainless-retry-count": "1"})
    assert again.status_code == 200
    async with ControlClient(shared.process.url, CONTROL) as control:
        manifest = await control.freeze("held")
    (record,), (failure,) = manifest["manifest"]["records"], manifest["manifest"]["failures"]
    assert record["response_id"] == again.json()["id"]
    assert failure["reason"] == "request_finished_without_staged_coordinates"
    assert failure["model_call_id"] == begun["call"]
    assert (await shared.metrics())["workbench_live_calls"] == 0
