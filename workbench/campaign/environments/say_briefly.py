"""Say it briefly: the fewer words come back the better, but not none; once, or a few times in one conversation.

The one task here that a model can get better at without knowing anything: all it takes is to end its turn earlier. A
random model does that within a few optimiser steps, so the whole road can be seen to learn in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from workbench.campaign.environments.base import (
    AgentResult,
    Message,
    Reward,
    Task,
    WindowFull,
    ended_full,
    say,
    take_options,
)
from workbench.errors import RecipeError

TOPICS = ("the sea", "a tree", "rain", "bread", "a road", "the moon", "a bird", "snow")


class SayBriefly:
    """Options: `words`, the number of words from which on an answer earns nothing; `turns` (1 to 8), how often it is
    asked."""

    name = "say_briefly"
    components = ("brief",)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        taken = take_options(self.name, options or {}, words=9, turns=1)
        self.words: int = taken["words"]
        self.turns: int = taken["turns"]
        self.min_calls = self.turns
        if self.words < 2:
            raise RecipeError(f"environment.options.words: expected at least 2, got {self.words}")
        if not 1 <= self.turns <= 8:
            raise RecipeError(f"environment.options.turns: expected 1 to 8, got {self.turns}")

    def task(self, seed: int) -> Task:
        return Task(f"{self.name}-{seed}", seed, {"topic": random.Random(f"{self.name}:{seed}").choice(TOPICS)})

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        messages: list[Message] = []
        response: dict[str, Any] | None = None
        for turn in range(self.turns):
            asked = "Say a word" if turn == 0 else "Say another word"
            messages.append({"role": "user", "content": f"{asked} about {task.data['topic']}."})
            try:
                _, response = await say(client, model, messages)
            except WindowFull as full:
                return ended_full(response, messages, full)
        return AgentResult(response, messages)

    def reward(self, task: Task, result: AgentResult) -> Reward:
        """The mean over its answers: 1 for one word, falling evenly to 0 at `words`; 0 for an empty one."""
        counts = [len(said["content"].split()) for said in result.transcript if said["role"] == "assistant"]
        each = [max(0.0, 1.0 - (count - 1) / (self.words - 1)) if count else 0.0 for count in counts]
        brief = round(sum(each) / self.turns, 9) if result.response is not None else 0.0
        return Reward(brief, {"brief": brief})
