"""Published agent frameworks, with a loop of tools over six model turns: every call on one verified chain.

They build histories in their own ways (objects, dumps with and without nulls, renamed fields); none of that is ours to
choose. One rollout each, in every API that the framework speaks here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessage
from tool_template import with_tool_template

from conftest import Stack, stack_in
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import assemble_receipt

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = "Use the tools."
QUESTION = "How warm is it in Rome and in Oslo?"
TOLD = "21 degrees"


def call(**arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'weather', 'arguments': arguments})}</tool_call>"


TURNS = (
    "I look.\n" + call(city="Rome"),
    call(city="Oslo"),
    call(city="Zürich") + call(city="Bern"),
    "Once more.\n" + call(city="Rome"),
    call(city="Oslo"),
    "It is 21 degrees \U0001f31e everywhere.",
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("frameworks")
    script = [
        *({"rollout": "text.*", "text": text} for text in ("one", "two", "three", "four", "five", "six")),
        *({"text": text} for text in TURNS),
    ]
    model = with_tool_template(folder / "model")
    async with stack_in(folder, script, model=model, window=2048, max_tokens=96) as running:
        yield running


async def assert_one_verified_chain(stack: Stack, rollout_id: str, calls: int = len(TURNS)) -> None:
    """The manifest is the calls that were made, each the child of the one before it, and they verify as one row."""
    manifest = await stack.control.manifest(rollout_id)
    assert manifest.failures == []
    assert [record.mode for record in manifest.records] == ["text", *["token_in"] * (calls - 1)]
    made = [record.model_call_id for record in manifest.records]
    assert [record.parent_call_id for record in manifest.records] == [None, *made[:-1]]
    receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0)
    row = verify_and_linearize(receipt, await stack.sink.fetch([record.staging_key for record in manifest.records]))
    assert row.model_call_ids == made
    text = stack.worker.tokenizer.decode(row.token_ids)
    said = TURNS if calls == len(TURNS) and TURNS[0] in text else ()
    assert all(text.count(turn) >= 1 for turn in said)


async def openai_agents(url: str, stream: bool, api: str) -> str:
    import agents

    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    model_of = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """How warm it is in a city."""
        return TOLD

    agent = agents.Agent("asker", instructions=RULES, tools=[weather], model=model_of("policy", client))
    if stream:
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        answer = streamed.final_output
    else:
        answer = (await agents.Runner.run(agent, QUESTION)).final_output
    await client.close()
    return answer


async def pydantic_ai(url: str, stream: bool, api: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any
    client: Any
    if api == "messages":
        client = anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0)
        model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
    else:
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        model_of = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
        model = model_of("policy", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions=RULES)

    @agent.tool_plain
    def weather(city: str) -> str:
        """How warm it is in a city."""
        return TOLD

    async def watch(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    async with client:
        # With somebody who watches its events the framework asks for streams.
        return (await agent.run(QUESTION, event_stream_handler=watch if stream else None)).output


Loop = Callable[[str, bool, str], Awaitable[str]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("loop", "api"),
    [
        (openai_agents, "chat"),
        (openai_agents, "responses"),
        (pydantic_ai, "chat"),
        (pydantic_ai, "responses"),
        (pydantic_ai, "messages"),
    ],
)
async def test_every_call_of_a_frameworks_tool_loop_is_on_one_verified_chain(
    stack: Stack, loop: Loop, api: str, stream: bool
) -> None:
    rollout_id = f"{loop.__name__}.{api}.{stream:d}"
    answer = await loop(f"{stack.url}/ng-rollout/{rollout_id}", stream, api)
    assert answer == TURNS[-1]
    await assert_one_verified_chain(stack, rollout_id)


def _parts(message: ChatCompletionMessage) -> dict[str, Any]:
    turn = message.model_dump(exclude_none=True)
    return turn | {"content": [{"type": "text", "text": turn["content"]}]} if turn.get("content") else turn


def _bare(message: ChatCompletionMessage, nothing: Any) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": message.content or nothing}
    return turn | ({"tool_calls": [c.model_dump() for c in message.tool_calls]} if message.tool_calls else {})


HABITS: dict[str, Callable[[ChatCompletionMessage], Any]] = {
    "object": lambda message: message,
    "dump": lambda message: message.model_dump(),
    "dump-json": lambda message: message.model_dump(mode="json"),
    "without-nulls": lambda message: message.model_dump(exclude_none=True),
    "without-unset": lambda message: message.model_dump(exclude_unset=True),
    "content-null": lambda message: _bare(message, None),
    "content-empty": lambda message: _bare(message, ""),
    "content-parts": _parts,
}
"""Ways in which scripts put the model's turn back into their messages."""


@pytest.mark.parametrize("tools", [True, False], ids=["calls", "text"])
@pytest.mark.parametrize("habit", HABITS)
async def test_however_a_script_sends_a_turn_back_it_is_the_same_turn(stack: Stack, habit: str, tools: bool) -> None:
    """With `tools` the model calls them, else it only talks and the script answers with tool messages all the same."""
    rollout_id = f"{'calls' if tools else 'text'}.{habit}"
    agent = stack.agent(rollout_id)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    offered: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    choice: Any = {"tool_choice": "auto"} if habit.startswith("content") else {}
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}]
    for turn in range(len(TURNS)):
        answer = await agent.chat.completions.create(model="policy", messages=messages, tools=offered, **choice)
        message = answer.choices[0].message
        messages.append(HABITS[habit](message))
        calls = message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": TOLD} for call in calls]
        if not calls:
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": TOLD})
    await assert_one_verified_chain(stack, rollout_id)
