"""Say it briefly: one call, and the fewer words come back the better, but not none.

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
    say_once,
    take_options,
)
from workbench.errors import RecipeError

TOPICS = ("the sea", "a tree", "rain", "bread", "a road", "the moon", "a bird", "snow")


class SayBriefly:
    """Option: `words`, the number of words from which on an answer earns nothing."""

    name = "say_briefly"
    min_calls = 1

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.words: int = take_options(self.name, options or {}, words=9)["words"]
        if self.words < 2:
            raise RecipeError(f"environment.options.words: expected at least 2, got {self.words}")

    def task(self, seed: int) -> Task:
        return Task(f"{self.name}-{seed}", seed, {"topic": random.Random(f"{self.name}:{seed}").choice(TOPICS)})

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        messages: list[Message] = [{"role": "user", "content": f"Say a word about {task.data['topic']}."}]
        return await say_once(client, model, messages)

    def reward(self, task: Task, result: AgentResult) -> Reward:
        """1 for one word, falling evenly to 0 at `words`; 0 for an empty answer."""
        count = len(result.transcript[-1]["content"].split()) if result.response is not None else 0
        brief = max(0.0, 1.0 - (count - 1) / (self.words - 1)) if count else 0.0
        return Reward(round(brief, 9), {"brief": round(brief, 9)})
