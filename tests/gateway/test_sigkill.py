"""The gateway is killed at each step of a call: the right row, or the right cause.

Each rollout is a first call that went well and a second one in which its gateway process dies. Then a new gateway
starts on the ledger, or, where the gateway had several processes, the others go on; and either the SDK's own retry
reaches one of them, or the agent gives up and the first response is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio
from gate import ACKNOWLEDGEMENT, COMPLETION, FRAMES, REQUEST, Gate
from openai.types.chat import ChatCompletion

from conftest import CONTROL, WORKER, Stack, listening, until
from workbench.finalizer.verify import LinearizedRow, verify_and_linearize
from workbench.gateway.client import ControlClient
from workbench.gateway.process import GatewayProcess
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.wire import RolloutManifest, RolloutReceipt, StagedCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "say something"}]
RETRY = {"x-stainless-retry-count": "1"}
NO_COMPLETION = "request_finished_without_staged_coordinates"


@dataclass
class Killed:
    """A gateway process between agents and a worker that both stay."""

    stack: Stack
    gate: Gate
    worker_url: str
    ledger: Path
    workers: int = 1
    port: int = 0
    running: list[GatewayProcess] = field(default_factory=list)

    async def start(self) -> None:
        settings = {
            "ledger_dir": str(self.ledger),
            "worker_url": self.worker_url,
            "port": self.port,
            "workers": self.workers,
        }
        self.running.append(await asyncio.to_thread(GatewayProcess.start, settings))
        # Always on the same port, as an agent knows one address.
        self.port = int(self.url.rsplit(":", 1)[1])

    @property
    def url(self) -> str:
        return self.running[-1].url

    def steps(self, rollout_id: str) -> list[dict[str, Any]]:
        path = self.ledger / f"{rollout_id}.replay.jsonl"
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]

    async def kill(self, rollout_id: str) -> None:
        """Kill the process that has the newest call of a rollout."""
        begun = [step for step in self.steps(rollout_id) if step["kind"] == "begun"]
        pid = int((self.ledger / f"{begun[-1]['gateway']}.gateway").read_text())
        assert pid in self.running[-1].pids
        os.kill(pid, signal.SIGKILL)
        # Not before its last thread is gone: until then it may still hold its locks.
        gone = os.WEXITED | os.WNOHANG | os.WNOWAIT
        await until(lambda: os.waitid(os.P_PID, pid, gone) is not None, "the process is dead")
        if self.workers == 1:
            await asyncio.to_thread(self.running.pop().stop)

    async def recover(self) -> None:
        """A new gateway, where there was no other process."""
        if self.workers == 1:
            await self.start()

    def agent(self, rollout_id: str, **options: Any) -> openai.AsyncOpenAI:
        base_url = f"http://127.0.0.1:{self.port}/ng-rollout/{rollout_id}/v1"
        return openai.AsyncOpenAI(base_url=base_url, api_key="unused", **options)

    def manifest(self, rollout_id: str) -> RolloutManifest:
        return LedgerStore(self.ledger).manifest(rollout_id)

    async def finalise(self, rollout_id: str, scored: Any) -> tuple[RolloutManifest, RolloutReceipt]:
        response = scored.model_dump(mode="json", exclude_unset=True)
        async with ControlClient(self.url, CONTROL) as control:
            await control.freeze(rollout_id, response=response)
            manifest = await control.manifest(rollout_id)
        return manifest, assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0, response=response)

    async def row(self, receipt: RolloutReceipt) -> LinearizedRow:
        rows = await self.stack.sink.fetch([record.staging_key for record in receipt.manifest])
        assert all(isinstance(row, StagedCall) for row in rows)
        return verify_and_linearize(receipt, rows)


@contextlib.asynccontextmanager
async def gateway_to_kill(stack: Stack, ledger: Path, workers: int) -> AsyncIterator[Killed]:
    gate = Gate(stack.worker.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTROL_TOKEN, CONTROL)
        patch.setenv(WORKER_TOKEN, WORKER)
        async with listening(gate.app) as worker_url:
            killed = Killed(stack, gate, worker_url, ledger, workers)
            await killed.start()
            yield killed
            gate.release()
            await asyncio.to_thread(killed.running[-1].stop)
    await gate.http.aclose()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def killed(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Killed]:
    async with gateway_to_kill(stack, tmp_path_factory.mktemp("ledger"), 1) as killed:
        yield killed


RETRIED_ELSEWHERE = [(REQUEST, False), (ACKNOWLEDGEMENT, True)]
GIVEN_UP_ELSEWHERE = [(COMPLETION, False), (FRAMES, True)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def several(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Killed]:
    """Loses a process a test; at the end one is left."""
    workers = len(RETRIED_ELSEWHERE) + len(GIVEN_UP_ELSEWHERE) + 1
    async with gateway_to_kill(stack, tmp_path_factory.mktemp("ledger"), workers) as killed:
        yield killed


async def first_call(killed: Killed, rollout_id: str) -> tuple[Any, list[dict[str, Any]]]:
    """One call that went well, and the messages of the next."""
    async with killed.agent(rollout_id) as agent:
        first = await agent.chat.completions.create(model="policy", messages=ASK)  # type: ignore[call-overload]
    said = {"role": "assistant", "content": first.choices[0].message.content}
    return first, [*ASK, said, {"role": "user", "content": "and then?"}]


async def kill_at(killed: Killed, place: str, rollout_id: str) -> None:
    """Kill a call's process once it is held at `place`; of frames, once it has passed one on."""
    reached = killed.gate.reached[place]
    await until(lambda: killed.gate.reached[place] > reached, f"the call is at {place}")
    if place == FRAMES:
        await until(lambda: any(step["kind"] == "content" for step in killed.steps(rollout_id)), "a frame has left")
    await killed.kill(rollout_id)
    killed.gate.release()


LOST = {REQUEST: 1, COMPLETION: 1, ACKNOWLEDGEMENT: 0}
"""Before staging, after it, and answered without a row: how many calls are lost for good."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", LOST)
async def test_the_sdks_retry_finds_the_new_gateway(killed: Killed, place: str, stream: bool) -> None:
    await retry_after_a_kill(killed, place, stream)


@pytest.mark.parametrize(("place", "stream"), RETRIED_ELSEWHERE)
async def test_the_sdks_retry_finds_another_process(several: Killed, place: str, stream: bool) -> None:
    await retry_after_a_kill(several, place, stream)


async def retry_after_a_kill(killed: Killed, place: str, stream: bool) -> None:
    rollout_id = f"retry.{place}.{stream}"
    _, messages = await first_call(killed, rollout_id)
    killed.gate.hold(place)
    async with killed.agent(rollout_id, max_retries=8) as agent:
        asked = asyncio.create_task(say(agent, messages, stream))
        await kill_at(killed, place, rollout_id)
        await killed.recover()
        try:
            second = await asked
        except openai.APIConnectionError:
            # An SDK does not retry a stream that had begun; an agent may.
            assert stream and place == ACKNOWLEDGEMENT
            second = await say(agent, messages, stream, RETRY)
    manifest, receipt = await killed.finalise(rollout_id, second)
    assert len(manifest.records) == 2
    assert [failure.reason for failure in manifest.failures] == [NO_COMPLETION] * LOST[place]
    assert not receipt.capture_poisoned
    row = await killed.row(receipt)
    assert row.model_call_ids == [record.model_call_id for record in manifest.records]


async def say(
    agent: openai.AsyncOpenAI, messages: Any, stream: bool, headers: dict[str, str] | None = None
) -> ChatCompletion:
    if not stream:
        return await agent.chat.completions.create(model="policy", messages=messages, extra_headers=headers)
    async with agent.chat.completions.stream(model="policy", messages=messages, extra_headers=headers) as events:
        return await events.get_final_completion()


@pytest.mark.parametrize(
    ("place", "stream"),
    [*itertools.product((REQUEST, COMPLETION, ACKNOWLEDGEMENT), (False, True)), (FRAMES, True)],
)
async def test_an_agent_that_gives_up_is_scored_on_what_it_has(killed: Killed, place: str, stream: bool) -> None:
    await give_up_after_a_kill(killed, place, stream)


@pytest.mark.parametrize(("place", "stream"), GIVEN_UP_ELSEWHERE)
async def test_a_freeze_at_another_process_finds_the_lost_call(several: Killed, place: str, stream: bool) -> None:
    await give_up_after_a_kill(several, place, stream)


async def give_up_after_a_kill(killed: Killed, place: str, stream: bool) -> None:
    rollout_id = f"gives_up.{place}.{stream}"
    first, messages = await first_call(killed, rollout_id)
    killed.gate.hold(place)
    async with killed.agent(rollout_id, max_retries=0) as agent:
        asked = asyncio.create_task(say(agent, messages, stream))
        await kill_at(killed, place, rollout_id)
        with pytest.raises(Exception):  # noqa: B017 - the SDK lets errors of its HTTP client through in mid-stream
            await asked
    await killed.recover()
    manifest, receipt = await killed.finalise(rollout_id, first)
    assert len(manifest.records) == 1
    (failure,) = manifest.failures
    # What an agent may have read cannot be called a request without a completion.
    seen = stream and place in (FRAMES, ACKNOWLEDGEMENT)
    assert failure.reason == ("worker_capture_failed" if seen else NO_COMPLETION)
    assert receipt.capture_poisoned is seen
    if not seen:
        assert (await killed.row(receipt)).model_call_ids == [manifest.records[0].model_call_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_ledger_row_the_retry_is_a_replay(killed: Killed, stream: bool) -> None:
    rollout_id = f"after_row.{stream}"
    _, messages = await first_call(killed, rollout_id)
    killed.gate.hold(COMPLETION)
    async with killed.agent(rollout_id, max_retries=0, timeout=0.3) as agent:
        with pytest.raises(openai.APITimeoutError):
            await say(agent, messages, stream)
    killed.gate.release()
    await until(lambda: len(killed.manifest(rollout_id).records) == 2, "the call has its row")
    await killed.kill(rollout_id)
    await killed.recover()
    async with killed.agent(rollout_id) as agent:
        second = await say(agent, messages, stream, RETRY)
    manifest, receipt = await killed.finalise(rollout_id, second)
    assert (len(manifest.records), manifest.failures) == (2, [])
    assert manifest.records[1].response_id == second.id
    assert len((await killed.row(receipt)).model_call_ids) == 2


async def test_what_was_seen_of_a_lost_stream_cannot_come_back_as_a_seeded_history(killed: Killed) -> None:
    rollout_id = "seen.first"
    killed.gate.hold(FRAMES)
    async with killed.agent(rollout_id, max_retries=0) as agent:
        asked = asyncio.create_task(say(agent, ASK, True))
        await kill_at(killed, FRAMES, rollout_id)
        with contextlib.suppress(Exception):
            await asked
    await killed.start()
    async with killed.agent(rollout_id) as agent:
        history = [*ASK, {"role": "assistant", "content": "fi"}, *ASK]
        answer = await agent.chat.completions.create(model="policy", messages=history)  # type: ignore[call-overload]
    manifest, receipt = await killed.finalise(rollout_id, answer)
    assert manifest.records == []
    assert [failure.reason for failure in manifest.failures] == ["worker_capture_failed", "unresolved_parent"]
    assert receipt.capture_poisoned
