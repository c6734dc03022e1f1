"""Add up: one call, one line `Answer: N`. The single-turn task, for chains of length one.

Reward: the form (0.5), how near the sum is (0.2), and whether it is right (0.3).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from workbench.campaign.environments.answer_form import read_answer
from workbench.campaign.environments.base import (
    AgentResult,
    Message,
    Reward,
    Task,
    say_once,
    take_options,
    weigh,
)
from workbench.errors import RecipeError

LABEL = "Answer"
WEIGHTS = {"form": 0.5, "near": 0.2, "right": 0.3}


class AddUp:
    """Option: `high`, the largest of the two numbers."""

    name = "add_up"
    min_calls = 1
    components = tuple(WEIGHTS)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.high: int = take_options(self.name, options or {}, high=9)["high"]
        if self.high < 1:
            raise RecipeError(f"environment.options.high: expected at least 1, got {self.high}")

    def task(self, seed: int) -> Task:
        rng = random.Random(f"{self.name}:{seed}")
        return Task(f"{self.name}-{seed}", seed, {"a": rng.randint(0, self.high), "b": rng.randint(0, self.high)})

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        messages: list[Message] = [
            {"role": "system", "content": f"You answer every question with one short line, like this:\n{LABEL}: 7"},
            {
                "role": "user",
                "content": f"What is {task.data['a']} + {task.data['b']}?\nAnswer in the form {LABEL}: 7",
            },
        ]
        return await say_once(client, model, messages)

    def reward(self, task: Task, result: AgentResult) -> Reward:
        answers = [message["content"] for message in result.transcript if message["role"] == "assistant"]
        if not answers:
            return Reward(0.0, dict.fromkeys(WEIGHTS, 0.0))
        reading = read_answer(LABEL, answers[-1])
        miss = abs(reading.number - task.data["a"] - task.data["b"]) if reading.number is not None else None
        components = {
            "form": reading.form,
            "near": 0.0 if miss is None else max(0.0, 1.0 - miss / (2 * self.high)),
            "right": 1.0 if miss == 0 else 0.0,
        }
        return weigh(components, WEIGHTS)
