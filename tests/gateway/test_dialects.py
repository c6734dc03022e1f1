"""Every API, driven by its real client through a conversation with tools, is captured with the same parents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest
import pytest_asyncio
from dialogues import DIALOGUES, RESPONSES_TOOLS, RULES, SCRIPT
from tool_template import with_tool_template
from transformers import AutoTokenizer

from conftest import Stack, stack_in, until
from workbench.finalizer.verify import verify_and_linearize
from workbench.gateway.histories import Histories
from workbench.ledger import assemble_receipt

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 2048
FAULTS = [
    {"rollout": "slow.*", "text": "this takes its time to come out", "delay_s": 0.4},
    {"rollout": "raise.*", "text": "this breaks in the middle of its way out", "fault": "raise", "at": 6},
    {"rollout": "nan.*", "text": "not a number", "fault": "nan_logprob", "at": 1},
    {"rollout": "same.*", "text": "the same again"},
    {"rollout": "nothing.*", "text": "a required call that is cut before anybody can read it"},
]


def twins(model: Path) -> list[dict[str, Any]]:
    """Two replies with the same text and different tokens, and a third one."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole, letters = (
        [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
        for parts in (["hello"], "hello")
    )
    assert whole != letters
    spelled = [{"rollout": "twins.*", "token_ids": [*ids, tokenizer.eos_token_id]} for ids in (whole, letters)]
    return [*spelled, {"rollout": "twins.*", "text": "well"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("dialects")
    model = with_tool_template(folder / "model")
    lines = [*({"text": text} for text in SCRIPT), *FAULTS, *twins(model)]
    async with stack_in(folder, lines, model=model, window=WINDOW, max_tokens=96) as stack:
        yield stack


def claude(stack: Stack, rollout_id: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"{stack.url}/ng-rollout/{rollout_id}", api_key="unused", max_retries=0)


async def parents(stack: Stack, rollout_id: str) -> list[int | None]:
    """The manifest's parent links, as positions in it."""
    manifest = await stack.control.manifest(rollout_id)
    assert manifest.failures == []
    places = {record.model_call_id: place for place, record in enumerate(manifest.records)}
    return [None if record.parent_call_id is None else places[record.parent_call_id] for record in manifest.records]


async def drift(stack: Stack, rollout_id: str) -> list[str]:
    return [failure.detail for failure in (await stack.control.manifest(rollout_id)).failures]


@pytest.mark.parametrize("name", DIALOGUES)
async def test_every_dialect_gives_the_same_parents_and_one_verified_row(stack: Stack, name: str) -> None:
    rollout_id = f"whole.{name}"
    last = await DIALOGUES[name](f"{stack.url}/ng-rollout/{rollout_id}")
    assert await parents(stack, rollout_id) == [None, 0, 1, 2, 3]
    manifest = await stack.control.manifest(rollout_id)
    assert [record.mode for record in manifest.records] == ["text", *["token_in"] * 4]
    closed = await stack.control.freeze(rollout_id, response=last)
    assert closed["attribution"] == {
        "terminal": manifest.records[-1].model_call_id,
        "method": "response_id",
        "reason": "corroborated_by=content",
    }
    receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0, response=last)
    row = verify_and_linearize(receipt, await stack.sink.fetch([record.staging_key for record in manifest.records]))
    text = stack.worker.tokenizer.decode(row.token_ids)
    assert len(row.model_call_ids) == 5
    assert [text.count(said) for said in SCRIPT] == [1] * 5
    assert text.count("<tool_response>\nrain\n</tool_response>") == 3


async def test_a_conversation_renders_the_same_whatever_the_dialect(stack: Stack) -> None:
    """Also the system prompt and the tools' answers: only the tool list is spelled differently."""
    texts = set()
    for name in ("chat", "responses", "messages-stream"):
        rollout_id = f"render.{name}"
        await DIALOGUES[name](f"{stack.url}/ng-rollout/{rollout_id}")
        rows = await stack.sink.fetch(
            [record.staging_key for record in (await stack.control.manifest(rollout_id)).records]
        )
        ids = [token for row in rows for token in row.token_ids_delta.tolist()]
        texts.add(stack.worker.tokenizer.decode(ids).split("<|im_end|>", 1)[1])
    assert len(texts) == 1


async def test_the_last_events_leave_only_after_the_ledger_row(stack: Stack) -> None:
    store = stack.gateway.custodian.store
    events = await stack.agent("slow.responses").responses.create(model="policy", input="go", stream=True)
    seen = [(event.type, len(store.manifest("slow.responses").records)) async for event in events]
    assert seen.count(("response.output_text.delta", 0)) > 1
    assert [kind for kind, rows in seen if rows] == ["response.completed"]
    ask: Any = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "go"}]}
    async with claude(stack, "slow.messages") as client:
        events = await client.messages.create(**ask, stream=True)
        seen = [(event.type, len(store.manifest("slow.messages").records)) async for event in events]
    assert seen.count(("content_block_delta", 0)) > 1
    assert [kind for kind, rows in seen if rows] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("first", ["chat", "responses", "messages"])
@pytest.mark.parametrize("then", ["chat", "responses", "messages"])
@pytest.mark.parametrize("tools", [False, True])
async def test_a_switch_of_dialect_may_be_unresolved_and_is_never_wrong(
    stack: Stack, first: str, then: str, tools: bool
) -> None:
    rollout_id = f"same.{first}.{then}.{tools:d}"
    parameters: Any = {"type": "object", "properties": {}}
    offered: dict[str, Any] = {
        "chat": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "responses": [{"type": "function", "name": "f", "parameters": parameters}],
        "messages": [{"name": "f", "input_schema": parameters}],
    }
    turns: list[Any] = [{"role": "user", "content": "say something"}]
    for name in (first, then):
        body = {"model": "policy", "max_tokens": 32, "input" if name == "responses" else "messages": turns}
        body |= {"tools": offered[name]} if tools else {}
        path = {"chat": "chat/completions"}.get(name, name)
        answer = await stack.http.post(f"{stack.url}/ng-rollout/{rollout_id}/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        turns = [*turns, {"role": "assistant", "content": "the same again"}, {"role": "user", "content": "more"}]
    manifest = await stack.control.manifest(rollout_id)
    if first == then or not tools:
        root, child = manifest.records
        assert child.parent_call_id == root.model_call_id
    else:
        assert len(manifest.records) == 1
        assert await drift(stack, rollout_id) == ["dialect_changed"]


async def test_a_named_response_is_the_parent_among_calls_that_said_the_same(stack: Stack) -> None:
    """By content two calls with different tokens answer to this history; the name decides."""
    agent = stack.agent("twins.0")
    first = await agent.responses.create(model="policy", input="go")
    again = await agent.responses.create(model="policy", input="go")
    assert first.output_text == again.output_text == "hello"
    for previous in (again, first):
        await agent.responses.create(model="policy", input="more", previous_response_id=previous.id)
    assert await parents(stack, "twins.0") == [None, None, 1, 0]
    history: list[Any] = [{"role": "user", "content": "go"}, *first.output, {"role": "user", "content": "more"}]
    await agent.responses.create(model="policy", input=history)
    assert await drift(stack, "twins.0") == ["duplicate_output"]


async def test_an_unknown_response_or_a_conversation_is_refused_and_never_a_root(stack: Stack) -> None:
    agent = stack.agent("named.1")
    kept = await agent.responses.create(model="policy", input="go")
    unkept = await agent.responses.create(model="policy", input="go", store=False)
    asks: list[dict[str, Any]] = [
        {"previous_response_id": "resp_nobody"},
        {"previous_response_id": unkept.id},
        {"previous_response_id": ""},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
        {"background": True},
        {"prompt": {"id": "pmpt_1"}},
        {"extra_body": {"n": 2}},
        {"extra_body": {"best_of": 2}},
        {"extra_body": {"previous_input_messages": [{"role": "user"}]}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "custom", "name": "free"}]},
    ]
    for ask in asks:
        with pytest.raises(openai.BadRequestError) as refused:
            await agent.responses.create(model="policy", input="more", **ask)
        assert refused.value.param == next(iter(ask.get("extra_body") or ask)), ask
    with pytest.raises(openai.BadRequestError):
        await stack.agent("named.2").responses.create(model="policy", input="more", previous_response_id=kept.id)
    manifest = await stack.control.manifest("named.1")
    assert (len(manifest.records), manifest.failures) == (2, [])
    assert (await stack.control.manifest("named.2")).records == []


@pytest.mark.parametrize("name", ["responses", "responses-stream", "responses-sync", "responses-chained"])
async def test_a_conversation_is_stored_once_however_it_is_sent(stack: Stack, name: str) -> None:
    rollout_id = f"stored.{name}"
    last = await DIALOGUES[name](f"{stack.url}/ng-rollout/{rollout_id}")
    directory = stack.gateway.custodian.store.directory
    lines = [orjson.loads(line) for line in (directory / f"{rollout_id}.responses.jsonl").read_bytes().splitlines()]
    assert [line["after"] for line in lines] == [None, *(line["id"] for line in lines[:-1])]
    # A question, a call, its answer; what was said; a question, two calls, their answers; what was said; and so on.
    assert sum(len(line["items"]) for line in lines) == len(Histories(directory).items(rollout_id, last["id"]) or ())
    more = await stack.agent(rollout_id).responses.create(
        model="policy", input="more", previous_response_id=last["id"], instructions=RULES, tools=RESPONSES_TOOLS
    )
    assert more.output_text
    assert await parents(stack, rollout_id) == [None, 0, 1, 2, 3, 4]


async def test_a_named_response_without_custody_is_served_and_unresolved(stack: Stack) -> None:
    agent = stack.agent("nan.named")
    first = await agent.responses.create(model="policy", input="go")
    second = await agent.responses.create(model="policy", input="more", previous_response_id=first.id)
    assert second.output_text
    failures = (await stack.control.manifest("nan.named")).failures
    assert [failure.reason for failure in failures] == ["worker_capture_failed", "unresolved_parent"]


async def nothing(agent: openai.AsyncOpenAI, **ask: Any) -> Any:
    """A response without an output item: a required tool call that was cut."""
    cut: Any = {"tools": RESPONSES_TOOLS, "tool_choice": "required", "max_output_tokens": 3}
    answer = await agent.responses.create(model="policy", **cut, **ask)
    assert (answer.status, answer.output) == ("incomplete", [])
    return answer


async def test_a_response_without_any_item_is_continued_by_its_name(stack: Stack) -> None:
    rollout_id, tools = "nothing.named", {"tools": RESPONSES_TOOLS}
    agent = stack.agent(rollout_id)
    first = await nothing(agent, input="go")
    second = await nothing(agent, input="again", previous_response_id=first.id)
    third = await agent.responses.create(model="policy", input="more", previous_response_id=second.id, **tools)
    await agent.responses.create(model="policy", input="less", previous_response_id=third.id, **tools)
    # Named after others had continued it: a branch, and still no root.
    await agent.responses.create(model="policy", input="other", previous_response_id=first.id, **tools)
    assert await parents(stack, rollout_id) == [None, 0, 1, 2, 0]
    manifest = await stack.control.manifest(rollout_id)
    assert manifest.failures == []
    receipt = assemble_receipt(
        manifest, rollout_id=rollout_id, reward=1.0, declared_response_id=manifest.records[3].response_id
    )
    row = verify_and_linearize(receipt, await stack.sink.fetch([record.staging_key for record in manifest.records]))
    assert list(row.model_call_ids) == [record.model_call_id for record in manifest.records[:4]]


async def test_a_turn_that_left_no_item_is_a_branch_and_no_ambiguity(stack: Stack) -> None:
    """Who sends the items again has nothing to send for it, and so goes on from the turn before."""
    rollout_id = "nothing.sent"
    agent = stack.agent(rollout_id)
    history: list[Any] = [{"role": "user", "content": "go"}]
    await nothing(agent, input=history)
    history.append({"role": "user", "content": "again"})
    said = await agent.responses.create(model="policy", input=history, tools=RESPONSES_TOOLS)
    history += [*said.output, {"role": "user", "content": "more"}]
    await nothing(agent, input=history)
    history.append({"role": "user", "content": "please"})
    await agent.responses.create(model="policy", input=history, tools=RESPONSES_TOOLS)
    assert await parents(stack, rollout_id) == [None, None, 1, 1]
    assert (await stack.control.manifest(rollout_id)).failures == []


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        [],
        3,
        [3],
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}],
        [{"type": "web_search_call", "id": "w"}],
        [{"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "status": "incomplete"}],
    ],
)
async def test_input_that_the_ledger_cannot_follow_is_refused(stack: Stack, given: Any) -> None:
    answer = await stack.http.post(f"{stack.url}/ng-rollout/input/v1/responses", json={"input": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


async def test_sampling_belongs_to_the_recipe_in_every_dialect(stack: Stack) -> None:
    ask: Any = {"extra_body": {"temperature": 0.2, "top_p": 0.5, "top_k": 3}}
    include: Any = ["message.output_text.logprobs"]
    answer = await stack.agent("pins").responses.create(
        model="policy", input="go", top_logprobs=3, include=include, truncation="auto", max_output_tokens=9999, **ask
    )
    assert not answer.output[0].content[0].logprobs
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with claude(stack, "pins") as client:
        turns: Any = [{"role": "user", "content": "go"}]
        await client.messages.create(model="policy", max_tokens=2000, messages=turns, thinking=thinking, **ask)
    rows = await stack.sink.fetch([record.staging_key for record in (await stack.control.manifest("pins")).records])
    for row in rows:
        sampling = row.extras["sampling"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, 0)
    metrics = (await stack.http.get(f"{stack.url}/metrics")).text
    for kind, name in (
        ("overridden", "temperature"),
        ("overridden", "truncation"),
        ("overridden", "thinking"),
        ("overridden", "max_output_tokens"),
        ("stripped", "top_logprobs"),
        ("stripped", "include"),
    ):
        assert f'workbench_{kind}_fields_total{{field="{name}"}}' in metrics


async def test_errors_are_those_of_each_api(stack: Stack) -> None:
    turns: Any = [{"role": "user", "content": "word " * WINDOW}]
    with pytest.raises(openai.BadRequestError) as openai_refused:
        await stack.agent("errors").responses.create(model="policy", input=turns)
    assert openai_refused.value.code == "context_length_exceeded"
    async with claude(stack, "errors") as client:
        with pytest.raises(anthropic.BadRequestError, match="context length") as refused:
            await client.messages.create(model="policy", max_tokens=5, messages=turns)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.create(model="policy", max_tokens=5, messages=[])
        await stack.control.freeze("errors")
        with pytest.raises(anthropic.ConflictError, match="frozen"):
            await client.messages.create(model="policy", max_tokens=5, messages=[{"role": "user", "content": "a"}])


async def test_a_stream_that_breaks_raises_in_each_client_and_poisons(stack: Stack) -> None:
    with pytest.raises(openai.APIError):
        events = await stack.agent("raise.responses").responses.create(model="policy", input="go", stream=True)
        [event async for event in events]
    async with claude(stack, "raise.messages") as client:
        turns: Any = [{"role": "user", "content": "go"}]
        with pytest.raises(anthropic.APIStatusError):
            events = await client.messages.create(model="policy", max_tokens=50, messages=turns, stream=True)
            [event async for event in events]
    for rollout_id in ("raise.responses", "raise.messages"):
        await until(lambda name=rollout_id: stack.gateway.custodian.store.manifest(name).failures, "the row is there")
        (failure,) = (await stack.control.manifest(rollout_id)).failures
        assert failure.reason == "worker_capture_failed"


async def test_a_changed_system_prompt_is_another_history(stack: Stack) -> None:
    turns: Any = [{"role": "user", "content": "go"}]
    ask: Any = {"model": "policy", "max_tokens": 32}
    async with claude(stack, "same.system") as client:
        answer = await client.messages.create(**ask, messages=turns, system="Be brief.")
        longer = [*turns, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
        await client.messages.create(**ask, messages=longer, system="Be long.")
        await client.messages.create(**ask, messages=longer, system="Be brief.")
    manifest = await stack.control.manifest("same.system")
    assert await drift(stack, "same.system") == ["tools_changed"]
    assert [record.parent_call_id for record in manifest.records] == [None, manifest.records[0].model_call_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_same_bytes_and_no_second_row(stack: Stack, stream: bool) -> None:
    rollout_id = f"again.{stream:d}"
    route = f"{stack.url}/ng-rollout/{rollout_id}/v1"
    turns = [{"role": "user", "content": "go"}]
    first = await stack.http.post(f"{route}/responses", json={"input": turns, "store": True})
    asks = {
        "responses": {"input": "more", "previous_response_id": first.json()["id"], "stream": stream},
        "messages": {"model": "policy", "messages": turns, "max_tokens": 9, "stream": stream},
    }
    for path, ask in asks.items():
        answers = [
            await stack.http.post(f"{route}/{path}", json=ask, headers={"idempotency-key": path}) for _ in range(2)
        ]
        assert answers[0].status_code == 200
        assert answers[0].content == answers[1].content
    assert await parents(stack, rollout_id) == [None, 0, None]
