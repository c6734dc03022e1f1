"""Misbehave: any environment, played by agents that do what agents out there do.

The inner agent is not changed and does not know: it is handed a client whose `chat.completions.create` now and then
sends one request twice, asks a side question, overfills the window, rewrites an earlier answer, or streams. Each
rollout commits at most one fault of the first four, drawn from its own seeded rng; streaming is drawn for every call.

What each leaves behind: retry → a dead sibling; branch → a side branch; overflow → a refused call after a chain that
still trains; edit → a call without a parent, so a masked rollout with its cause.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, cast

from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from workbench.campaign.environments.base import AgentResult, Environment, Message, Reward, Task
from workbench.recipe_schema import Misbehave

FAULTS = ("retry", "branch", "overflow", "edit")


class Misbehaving:
    """An environment around another one. `window_tokens` is the model's window, which an overflow must exceed."""

    def __init__(self, inner: Environment, shares: Misbehave, window_tokens: int) -> None:
        self.name = inner.name
        self.min_calls = inner.min_calls
        self.inner = inner
        self.components = getattr(inner, "components", None)
        self._shares = shares
        self._window_tokens = window_tokens

    def lacking(self) -> str:
        """What the environment inside lacks on this machine."""
        return str(getattr(self.inner, "lacking", str)())

    def task(self, seed: int) -> Task:
        return self.inner.task(seed)

    def reward(self, task: Task, result: AgentResult) -> Reward:
        return self.inner.reward(task, result)

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        fault = self._draw(rng)
        # A retry may hit the first call already; the others need an answer to stand on, where the task has two calls.
        first = 0 if fault == "retry" else min(1, self.min_calls - 1)
        completions = _Completions(
            client, fault, rng.randrange(first, self.min_calls), self._shares.stream, self._window_tokens, rng
        )
        # Only `chat.completions.create` is used by agents here, so this is the whole client to them.
        result = await self.inner.run(cast(AsyncOpenAI, _Client(completions)), model, task, rng)
        if not isinstance(result, AgentResult):  # whoever asked says what is wrong with it
            return result
        return dataclasses.replace(result, misbehaved=fault if completions.committed else None)

    def _draw(self, rng: random.Random) -> str | None:
        drawn = rng.random()
        for fault in FAULTS:
            drawn -= getattr(self._shares, fault)
            if drawn < 0:
                return fault
        return None


class _Client:
    def __init__(self, completions: _Completions) -> None:
        self.chat = _Chat(completions)


class _Chat:
    def __init__(self, completions: _Completions) -> None:
        self.completions = completions


class _Completions:
    """Stands where `client.chat.completions` stood; one a rollout."""

    def __init__(
        self, client: AsyncOpenAI, fault: str | None, at_call: int, stream: float, window: int, rng: random.Random
    ) -> None:
        self._client = client
        self._fault = fault
        self._at_call = at_call
        self._stream = stream
        self._window = window
        self._rng = rng
        self._calls = 0
        self._edited: dict[int, str] = {}
        self.committed = False

    async def create(self, *, model: str, messages: list[Message], **settings: Any) -> ChatCompletion:
        messages = [dict(message) for message in messages]
        if self._calls == self._at_call and self._fault is not None:
            await self._commit(model, messages, settings)
        self._calls += 1
        for position, text in self._edited.items():
            messages[position]["content"] = text
        return await self._ask(model, messages, settings)

    async def _commit(self, model: str, messages: list[Message], settings: dict[str, Any]) -> None:
        """Do the rollout's one fault; those that change the history change `messages`."""
        if self._fault == "retry":
            await self._ask(model, messages, settings)
        elif self._fault == "branch":
            side = [*messages, {"role": "user", "content": "By the way, in a word: how sure are you?"}]
            await self._ask(model, side, settings)
        elif self._fault == "overflow":
            # Every repetition is at least one token, so the prompt is longer than the window whatever the tokenizer.
            messages[-1]["content"] += " and so on" * self._window
        elif self._fault == "edit":
            answers = [p for p, message in enumerate(messages) if message["role"] == "assistant"]
            if not answers:
                return
            # The edit stays for the calls to come, as with an agent that shortens its memory.
            self._edited[answers[-1]] = f"(shortened) {(messages[answers[-1]]['content'] or '')[:3]}"
        self.committed = True

    async def _ask(self, model: str, messages: list[Message], settings: dict[str, Any]) -> ChatCompletion:
        request: dict[str, Any] = {"model": model, "messages": messages, **settings}
        if self._rng.random() < self._stream:
            state = ChatCompletionStreamState()
            async for chunk in await self._client.chat.completions.create(stream=True, **request):
                state.handle_chunk(chunk)
            # Not its `get_final_completion`, which refuses an answer that was cut by length.
            return state.current_completion_snapshot
        return await self._client.chat.completions.create(**request)
