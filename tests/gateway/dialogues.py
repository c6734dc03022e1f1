"""One conversation with a tool, told in every API by its real client: what an agent does, turn by turn.

`DIALOGUES` names the ways to hold it. Each takes the gateway's base address of a rollout and returns the last served
object as JSON; all of them say the same, so all must give the same parents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai

RULES = "You are terse."
QUESTIONS = ("what is the weather in Rome?", "and what follows?", "anything else?")
ANSWER = "rain"
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SCRIPT = (
    'I look.\n<tool_call>{"name": "search", "arguments": {"query": "Rome", "days": [1, 2]}}</tool_call>',
    "It rains.",
    '<tool_call>{"name": "search", "arguments": {"query": "né"}}</tool_call>'
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    "Nothing \U0001f327 more.",
    "Good bye.",
)
"""What the model says: a call with text before it, an answer, two calls at once, two answers."""

CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "search", "parameters": PARAMETERS, "strict": None}]
MESSAGES_TOOLS: Any = [{"name": "search", "input_schema": PARAMETERS}]


async def chat(url: str, stream: bool) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": RULES}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
                if stream:
                    async with client.chat.completions.stream(**asked) as events:
                        answer = await events.get_final_completion()
                else:
                    answer = await client.chat.completions.create(**asked)
                message = answer.choices[0].message.model_dump(mode="json", exclude_unset=True)
                messages.append({name: message.get(name) for name in ("role", "content", "tool_calls")})
                calls = message.get("tool_calls") or []
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": ANSWER} for call in calls]
                if not calls:
                    break
        return answer.model_dump(mode="json")


async def responses(url: str, stream: bool, chained: bool = False) -> dict[str, Any]:
    """`chained`: each request names the response before it and sends only what is new."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        items: list[Any] = []
        previous: dict[str, Any] = {}
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            while True:
                asked = {"model": "policy", "input": items, "instructions": RULES, "tools": RESPONSES_TOOLS, **previous}
                if stream:
                    async with client.responses.stream(**asked) as events:
                        answer = await events.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                if chained:
                    items, previous = [], {"previous_response_id": answer.id}
                else:
                    items += [item.model_dump(mode="json", exclude_unset=True) for item in answer.output]
                calls = [item for item in answer.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": call.call_id, "output": ANSWER} for call in calls]
                if not calls:
                    break
        return answer.model_dump(mode="json")


def responses_sync(url: str, stream: bool) -> dict[str, Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        items: list[Any] = []
        for question in QUESTIONS:
            items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
            while True:
                asked: dict[str, Any] = {"model": "policy", "input": items, "instructions": RULES}
                asked["tools"] = RESPONSES_TOOLS
                if stream:
                    with client.responses.create(**asked, stream=True) as events:
                        (answer,) = [event.response for event in events if event.type == "response.completed"]
                else:
                    answer = client.responses.create(**asked)
                items += answer.output
                calls = [item for item in answer.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": call.call_id, "output": ANSWER} for call in calls]
                if not calls:
                    break
        return answer.model_dump(mode="json")


async def messages(url: str, stream: bool) -> dict[str, Any]:
    """The cache mark moves to the newest message, as agents of this API have it."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        turns: list[Any] = []
        content: list[Any] = []
        for question in QUESTIONS:
            content.append({"type": "text", "text": question})
            while True:
                content[-1]["cache_control"] = {"type": "ephemeral"}
                turns.append({"role": "user", "content": content})
                asked: dict[str, Any] = {
                    "model": "policy",
                    "messages": turns,
                    "max_tokens": 64,
                    "tools": MESSAGES_TOOLS,
                    "system": [{"type": "text", "text": RULES}],
                }
                if stream:
                    async with client.messages.stream(**asked) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(**asked)
                del content[-1]["cache_control"]
                turns.append({"role": "assistant", "content": answer.content})
                content = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": ANSWER}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                if not content:
                    break
        return answer.model_dump(mode="json")


def _told(
    tell: Callable[..., Any], stream: bool, threaded: bool = False, **options: Any
) -> Callable[[str], Awaitable[dict[str, Any]]]:
    async def told(url: str) -> dict[str, Any]:
        if threaded:
            return await asyncio.to_thread(tell, url, stream)
        return await tell(url, stream, **options)

    return told


DIALOGUES = {
    "chat": _told(chat, False),
    "chat-stream": _told(chat, True),
    "responses": _told(responses, False),
    "responses-stream": _told(responses, True),
    "responses-chained": _told(responses, False, chained=True),
    "responses-chained-stream": _told(responses, True, chained=True),
    "responses-sync": _told(responses_sync, False, threaded=True),
    "responses-sync-stream": _told(responses_sync, True, threaded=True),
    "messages": _told(messages, False),
    "messages-stream": _told(messages, True),
}
