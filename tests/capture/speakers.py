"""Agents of several turns with each API's own client, through a gateway process, for the tests with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from workbench.gateway.process import GatewayProcess
from workbench.gateway.settings import CONTROL_TOKEN

TURNS = 4
USER = {"role": "user", "content": "Hello 123, who are you?"}
NEXT = {"role": "user", "content": "Tell me more \U0001f30d, please."}

Speaker = Callable[[str, bool], Awaitable[dict[str, Any]]]


async def through_gateway(
    worker_url: str, ledger: Path, monkeypatch: pytest.MonkeyPatch, speak: Speaker, rollout_id: str, stream: bool
) -> dict[str, Any]:
    """Hold one rollout's conversation through a gateway process of its own; returns the last served object."""
    monkeypatch.setenv(CONTROL_TOKEN, "control-token-of-the-tests")
    settings = {"ledger_dir": str(ledger), "worker_url": worker_url, "sampling": {"max_tokens": 12}}
    gateway = await asyncio.to_thread(GatewayProcess.start, settings)
    try:
        return await speak(f"{gateway.url}/ng-rollout/{rollout_id}", stream)
    finally:
        await asyncio.to_thread(gateway.stop)


async def speak_responses(url: str, stream: bool) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        items: list[Any] = [USER]
        for _ in range(TURNS):
            asked: Any = {"model": "policy", "input": items, "instructions": "Be brief."}
            if stream:
                async with client.responses.stream(**asked) as events:
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            items = [*items, *answer.output, NEXT]
        return answer.model_dump(mode="json")


async def speak_messages(url: str, stream: bool) -> dict[str, Any]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        turns: list[Any] = [USER]
        for _ in range(TURNS):
            asked: Any = {"model": "policy", "messages": turns, "max_tokens": 12, "system": "Be brief."}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            turns = [*turns, {"role": "assistant", "content": answer.content}, NEXT]
        return answer.model_dump(mode="json")


PARAMETERS: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CHOICES: Any = (None, "required", "auto", {"type": "function", "function": {"name": "weather"}}, "none", "required")


async def speak_chat(url: str, stream: bool) -> dict[str, Any]:
    """Six turns with a tool, chosen in every way that there is; calls that are cut short come as they come."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
        for choice in CHOICES:
            asked: Any = {"model": "policy", "messages": messages, "tools": TOOLS}
            asked |= {} if choice is None else {"tool_choice": choice}
            if stream:
                answer = await _streamed(await client.chat.completions.create(**asked, stream=True))
            else:
                answer = (await client.chat.completions.create(**asked)).model_dump(mode="json")
            turn = answer["choices"][0]["message"]
            calls = turn.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"} for call in calls]
            messages = [*messages, turn, *(results or [NEXT])]
        return answer


async def _streamed(chunks: Any) -> dict[str, Any]:
    """The completion that a script puts together out of chunks."""
    head: dict[str, Any] = {}
    text, calls = "", {}
    async for chunk in chunks:
        head["id"] = chunk.id
        for delta in (choice.delta for choice in chunk.choices):
            text += delta.content or ""
            for part in delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"arguments": ""}})
                if part.function.name:
                    call["function"]["name"] = part.function.name
                call["function"]["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": text or None, "tool_calls": list(calls.values()) or None}
    return head | {"choices": [{"message": message}]}


SPEAKERS: dict[str, Speaker] = {"responses": speak_responses, "messages": speak_messages, "chat": speak_chat}
