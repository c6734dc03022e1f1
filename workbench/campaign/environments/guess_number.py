"""Guess a number: the model guesses, is told `too low` or `too high`, and guesses again.

Data flow: seed → secret number → `turns` calls, each one line `Guess: N` → reward. A 135M model gets better at it in
two stages that the components show apart: first the form (0.6 of the reward), then guesses that the hints still allow
(0.3), and with that it comes near (0.1). Two turns are always played, so every rollout has a chain to splice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from workbench.campaign.environments.answer_form import Reading, read_answer
from workbench.campaign.environments.base import (
    AgentResult,
    Message,
    Reward,
    Task,
    WindowFull,
    ended_full,
    say,
    take_options,
    weigh,
)
from workbench.errors import RecipeError

LABEL = "Guess"
# A small model copies what it sees: with an example a fifth of its first answers have the form, without one none has,
# and then there is nothing to reinforce.
EXAMPLE_NUMBER = 7
EXAMPLE = f"{LABEL}: {EXAMPLE_NUMBER}"
ASK = f"Answer in the form {EXAMPLE}"
WEIGHTS = {"form": 0.6, "hints": 0.3, "near": 0.1}


class GuessNumber:
    """Options: `turns` (2 to 16), `low` and `high`, the range of the secret."""

    name = "guess_number"
    min_calls = 2
    components = tuple(WEIGHTS)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        taken = take_options(self.name, options or {}, turns=3, low=1, high=20)
        self.turns: int = taken["turns"]
        self.low: int = taken["low"]
        self.high: int = taken["high"]
        if not 2 <= self.turns <= 16:
            raise RecipeError(f"environment.options.turns: expected 2 to 16, got {self.turns}")
        if not 0 <= self.low < self.high:
            raise RecipeError(f"environment.options.high: expected 0 ≤ low < high, got {self.low} and {self.high}")

    def task(self, seed: int) -> Task:
        # Never the number of the example: copying it would be a right guess, and such tasks easier than the others.
        numbers = [number for number in range(self.low, self.high + 1) if number != EXAMPLE_NUMBER]
        secret = random.Random(f"{self.name}:{seed}").choice(numbers)
        return Task(f"{self.name}-{seed}", seed, {"secret": secret})

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        messages: list[Message] = [
            {"role": "system", "content": f"You answer every question with one short line, like this:\n{EXAMPLE}"},
            {"role": "user", "content": f"What is my number, from {self.low} to {self.high}?\n{ASK}"},
        ]
        response: dict[str, Any] | None = None
        for turn in range(self.turns):
            try:
                text, response = await say(client, model, messages)
            except WindowFull as full:
                return ended_full(response, messages, full)
            number = read_answer(LABEL, text).number
            # One right guess ends the game, but never before the second turn.
            if turn + 1 == self.turns or (number == task.data["secret"] and turn + 1 >= self.min_calls):
                break
            messages.append({"role": "user", "content": self._hint(number, task.data["secret"])})
        return AgentResult(response, messages)

    def _hint(self, number: int | None, secret: int) -> str:
        if number is None:
            return ASK
        if number == secret:
            return f"Right! Say it once more.\n{ASK}"
        return f"{number} is too {'low' if number < secret else 'high'}. What is my number?\n{ASK}"

    def reward(self, task: Task, result: AgentResult) -> Reward:
        """Means over the turns played; an answer outside the range, or none, counts 0 for hints and nearness."""
        secret = task.data["secret"]
        readings = [read_answer(LABEL, m["content"]) for m in result.transcript if m["role"] == "assistant"]
        if not readings:
            return Reward(0.0, dict.fromkeys(WEIGHTS, 0.0))
        last = readings[-1].number
        inside = last is not None and self.low <= last <= self.high
        components = {
            "form": sum(reading.form for reading in readings) / len(readings),
            "hints": self._hints_used(readings, secret),
            "near": 1.0 - abs(last - secret) / (self.high - self.low) if last is not None and inside else 0.0,
        }
        return weigh(components, WEIGHTS)

    def _hints_used(self, readings: list[Reading], secret: int) -> float:
        """Share of the guesses after the first that all hints so far allow."""
        low, high = self.low, self.high
        allowed = 0
        for position, reading in enumerate(readings):
            number = reading.number
            if number is None:
                continue
            if position > 0 and low <= number <= high:
                allowed += 1
            if number < secret:
                low = max(low, number + 1)
            elif number > secret:
                high = min(high, number - 1)
            else:
                low = high = secret
        return allowed / max(1, len(readings) - 1)
