"""The whole road on real parts: agents, gateway, vLLM, TransferQueue, finalizer, run store.

A tap below the capture records what the engine ran. Whatever the agents did (retried, branched, overflowed, streamed,
were cut by length), a stored row equals the engine's prompt and sampled ids of its terminal call, id for id.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
from capture.test_engine import Tap

from workbench import dataplane, models, runs
from workbench.campaign.environments import make_environment
from workbench.campaign.rollouts import RolloutPlan, RolloutPlayer
from workbench.campaign.verify import verify_run
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.config import load_recipe
from workbench.finalizer.actor import Finalizer
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.gateway.client import ControlClient
from workbench.gateway.process import GatewayProcess
from workbench.gateway.settings import CONTROL_TOKEN
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import Cause

pytestmark = [
    pytest.mark.engine,
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

# SmolLM2's answers are about five tokens and end by themselves; 6 cuts some of them and leaves others.
SAMPLING = {"temperature": 1.0, "max_tokens": 6}


class Road:
    """Everything between an agent and a stored row, in this process where a tap must reach it."""

    def __init__(self, server: PolicyServer, gateway: GatewayProcess, run_dir: Path) -> None:
        self.tap = Tap(server.engine)
        self.run_dir = run_dir
        self.model = server.config.model_path
        self._gateway = gateway
        self.url = gateway.url
        self._control = ControlClient(gateway.url, "control-token")
        self._numbers = itertools.count()

    async def play(self, count: int, **misbehave: float) -> tuple[str, list[RolloutOutcome]]:
        """Play one group whose agents all commit the given fault; returns its id and outcomes, not yet finalised."""
        group = next(self._numbers)
        shares = [f"environment.misbehave.{fault}={share}" for fault, share in misbehave.items()]
        recipe = load_recipe("cpu_smollm2", ["model.max_model_len=512", *shares])
        player = RolloutPlayer(
            gateway_url=self._gateway.url,
            control=self._control,
            environment=(environment := make_environment(recipe)),
            model="policy",
            timeout_s=120.0,
            request_timeout_s=60.0,
            seed=group,
        )
        try:
            task = environment.task(group)
            plans = [RolloutPlan(self.run_dir.name, group, index, 0, task) for index in range(count)]
            return f"g{group}", list(await asyncio.gather(*(player.play(plan) for plan in plans)))
        finally:
            await player.close()

    async def finalize(self, group_id: str, outcomes: list[RolloutOutcome]) -> FinalizedGroup:
        request = FinalizationRequest(group_id=group_id, weight_version=0, rollouts=outcomes)
        finalizer = Finalizer(str(self.run_dir), self.model)
        await finalizer.ready()
        answer = await finalizer.finalize(request.model_dump(mode="json"))
        await finalizer.stop()
        return FinalizedGroup.model_validate(answer)

    def assert_row_is_what_ran(self, outcome: RolloutOutcome) -> int:
        """The stored row equals the tap's prompt and sampled ids of the terminal call; returns its length."""
        assert outcome.receipt is not None
        terminal = outcome.receipt.terminal_model_call_id
        tokens = runs.open(self.run_dir).tokens(outcome.rollout_id)
        ran = self.tap.prompts[terminal] + self.tap.sampled[terminal]
        assert tokens["token_id"].to_list() == ran, f"{outcome.rollout_id}: the row is not what the engine ran"
        return len(ran)

    def chain(self, outcome: RolloutOutcome) -> list[str]:
        """The call ids from the terminal to its root, by the receipt's parent links."""
        assert outcome.receipt is not None
        parents = {record.model_call_id: record.parent_call_id for record in outcome.receipt.manifest}
        chain, call = [], outcome.receipt.terminal_model_call_id
        while call is not None:
            chain.append(call)
            call = parents[call]
        return chain

    async def close(self) -> None:
        await self._control.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def road(tq: Any, tmp_path_factory: Any) -> AsyncIterator[Road]:
    patch = pytest.MonkeyPatch()
    patch.setenv(WORKER_TOKEN_ENV, "worker-token")
    patch.setenv(CONTROL_TOKEN, "control-token")
    run_dir = tmp_path_factory.mktemp("reports") / "road"
    run_dir.mkdir()
    (run_dir / "events.jsonl").touch()
    await dataplane.connect()
    config = WorkerConfig(
        model_path=str(models.build("smollm2-135m")),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_gib=1.0,
        sampling=SAMPLING,
    )
    server = PolicyServer(config, TransferQueueSink(), TransferQueueSource())
    settings = {"ledger_dir": str(run_dir / "ledger"), "sampling": SAMPLING}
    gateway = None
    try:
        url = await server.start()
        gateway = await asyncio.to_thread(GatewayProcess.start, settings | {"worker_url": url})
        road = Road(server, gateway, run_dir)
        # The front end is waiting in the untapped read already; one call wakes it up.
        await server.score([[1, 2, 3]])
        yield road
        await road.close()
    finally:
        if gateway is not None:
            await asyncio.to_thread(gateway.stop)
        await server.stop()
        patch.undo()


async def test_stored_rows_equal_what_the_engine_ran_whatever_the_agents_did(road: Road) -> None:
    faults: list[dict[str, float]] = [
        {"stream": 0.0}, {"stream": 1.0}, {"retry": 1.0, "stream": 0.5}, {"branch": 1.0, "stream": 0.5},
        {"overflow": 1.0, "stream": 0.5},
    ]  # fmt: skip
    rows = 0
    for fault in faults:
        group_id, outcomes = await road.play(3, **fault)
        group = await road.finalize(group_id, outcomes)
        assert [row.cause for row in group.rows] == [None, None, None], (fault, group.rows)
        assert group.metrics.rates()["token_in_rate_after_roots"] is not None
        for outcome in outcomes:
            assert road.assert_row_is_what_ran(outcome) > 0
            assert outcome.receipt is not None
            # A right guess may end the game at its second turn, so the chain has two calls or three.
            on_chain = len(road.chain(outcome))
            assert 2 <= on_chain <= 3 or "overflow" in fault, fault
            assert (outcome.ended_early or "").startswith("window full: ") == ("overflow" in fault)
            assert len(outcome.receipt.manifest) - on_chain == (1 if {"retry", "branch"} & set(fault) else 0), fault
            rows += 1
    calls = runs.open(road.run_dir).calls
    finish_reasons = set(calls["finish_reason"].drop_nulls())
    assert rows == 15
    assert finish_reasons == {"stop", "length"}
    # Side branches and retries are stored too, beside the chains they left.
    assert calls.filter(~calls["on_chain"]).height >= 6
    report = verify_run(road.run_dir)
    assert report.ok, report
    assert await dataplane.tags(dataplane.STAGING, deadline_s=10) == {}


async def test_the_engines_own_words_for_a_full_window_have_its_code_in_every_api(road: Road) -> None:
    def words(count: int) -> Any:
        return [{"role": "user", "content": "a" + " a" * count}]

    url = f"{road.url}/ng-rollout/road.full"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        short = await client.chat.completions.create(model="policy", messages=words(9), max_tokens=1)
        fills = 512 - short.usage.prompt_tokens + 9  # type: ignore[union-attr]
        for count, stream in itertools.product((fills, fills + 1, 9000), (False, True)):
            with pytest.raises(openai.BadRequestError) as chat:
                await client.chat.completions.create(model="policy", messages=words(count), stream=stream)
            with pytest.raises(openai.BadRequestError) as responses:
                await client.responses.create(model="policy", input=words(count), stream=stream)
            assert chat.value.code == responses.value.code == "context_length_exceeded", (count, stream)
            assert " Next: end the conversation here" in str(chat.value), (count, stream)
            async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as claude:
                with pytest.raises(anthropic.BadRequestError) as messages:
                    await claude.messages.create(model="policy", max_tokens=9, messages=words(count), stream=stream)
            assert messages.value.body["error"]["code"] == "context_length_exceeded", (count, stream)  # type: ignore[index]
        with pytest.raises(openai.BadRequestError) as other:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": [{"type": "no"}]}]
            )
        assert other.value.code != "context_length_exceeded"


async def test_what_the_engine_would_serve_as_an_empty_message_is_refused(road: Road) -> None:
    async with openai.AsyncOpenAI(base_url=f"{road.url}/v1", api_key="unused", max_retries=0) as untagged:

        async def tokens(message: Any) -> int:
            asked: Any = {"model": "policy", "messages": [message], "max_tokens": 1}
            answer = await untagged.chat.completions.create(**asked)
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        empty = await tokens({"role": "user", "content": ""})
        assert await tokens({"role": "user", "text": "a long question, which nobody reads"}) == empty
    unread = ({"role": "user", "text": "a long question, which nobody reads"}, {"role": "User", "content": "hi"})
    async with openai.AsyncOpenAI(
        base_url=f"{road.url}/ng-rollout/road.unread/v1", api_key="unused", max_retries=0
    ) as agent:
        for message in unread:
            asked: Any = {"model": "policy", "messages": [message]}
            with pytest.raises(openai.BadRequestError, match=r"Message 0 .* Next: ") as refused:
                await agent.chat.completions.create(**asked)
            assert refused.value.code == "content_not_read"


async def test_an_edited_history_is_masked_with_its_cause_and_the_group_keeps_n_rows(road: Road) -> None:
    group_id, outcomes = await road.play(2, edit=1.0)
    group = await road.finalize(group_id, outcomes)
    assert [row.cause for row in group.rows] == [Cause.UNRESOLVED_PARENT] * 2
    assert [row.sample_mask for row in group.rows] == [0, 0]
    assert len(group.train_keys) == 2
    assert all("assistant_text_changed" in str(row.detail) for row in group.rows)


async def test_one_corrupted_token_in_staging_fails_that_rollout_alone(road: Road) -> None:
    group_id, outcomes = await road.play(3)
    receipt = outcomes[1].receipt
    assert receipt is not None
    record = receipt.manifest[1]
    await flip_one_token(record.staging_key)
    group = await road.finalize(group_id, outcomes)
    assert [row.sample_mask for row in group.rows] == [1, 0, 1]
    assert (group.rows[1].cause, group.rows[1].call_id) == (Cause.CORRUPT_DIGEST, record.model_call_id)
    for index in (0, 2):
        road.assert_row_is_what_ran(outcomes[index])


async def flip_one_token(key: str) -> None:
    """Put the staged row back with its first id changed by one, as a faulty store would."""
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    row = await dataplane.get(dataplane.STAGING, [key], deadline_s=10)
    columns: dict[str, Any] = {}
    for name in row.keys():  # noqa: SIM118 - a TensorDict is not a dict
        value = row[name][0].clone()
        if name == "token_ids":
            value[0] += 1
        columns[name] = torch.nested.as_nested_tensor([value], layout=torch.jagged)
    listed = await dataplane.tags(dataplane.STAGING, deadline_s=10)
    await tq.async_kv_batch_put(
        keys=[key], partition_id=dataplane.STAGING, fields=TensorDict(columns, batch_size=[1]), tags=[listed[key]]
    )
    again = await dataplane.get(dataplane.STAGING, [key], deadline_s=10)
    assert not np.array_equal(again["token_ids"][0].numpy(), row["token_ids"][0].numpy())
