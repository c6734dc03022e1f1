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


SPEAKERS: dict[str, Speaker] = {"responses": speak_responses, "messages": speak_messages}
