"""Agent's wire: bytes between agent and endpoint per trained token, in the token-echo arm and in the capture arm.

The same scripted conversations of a tool-less agent in both arms, bodies only (headers are alike): requests and
responses, not streamed. In the echo arm every response brings its prompt's ids, its own ids and log-probs along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai

from benchmarks.measure import Figure, Growth
from workbench.demo.bench import Bench, open_bench
from workbench.echo.client import EchoClient
from workbench.serving.sampling import SamplingPins

ROLLOUTS, TURNS = 4, 6
SIZES = (2, 4, 8, 16)
LINES = [
    {"text": "I look at the range first and halve it each time. Guess: 10"},
    {"text": "Higher, so it lies between eleven and twenty. Guess: 15"},
    {"text": "Lower than fifteen leaves four numbers. Guess: 12"},
]


class CountedBytes:
    """Counts the bodies that go through an HTTP client; both ways."""

    def __init__(self) -> None:
        self.count = 0
        self.ids = 0
        self.http = openai.DefaultAsyncHttpxClient(
            timeout=60.0, trust_env=False, event_hooks={"response": [self._take]}
        )

    async def _take(self, response: Any) -> None:
        answer = await response.aread()
        self.count += len(response.request.content) + len(answer)
        self.ids += answer.count(b'token_ids"')


async def play(create: Callable[..., Any], number: int, turns: int = TURNS) -> int:
    """One conversation; returns the tokens that were sampled."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {number}: a number from 1 to 20?"}]
    sampled = 0
    for _ in range(turns):
        answer = await create(model="policy", messages=messages, max_tokens=64)
        sampled += answer.usage.completion_tokens
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "higher"}]
    return sampled


async def arm(bench: Bench, *, echo: bool, turns: int = TURNS) -> tuple[float, int]:
    """Bytes per trained token of one arm, and how many bodies held token ids."""
    counted, sampled = CountedBytes(), 0
    for number in range(ROLLOUTS):
        url = f"{bench.worker.url}/v1" if echo else f"{bench.url}/ng-rollout/wire{turns}.0.{number}.0/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=bench.worker._token, max_retries=0, http_client=counted.http)
        pins, rollout_id = SamplingPins(max_tokens=64), f"wire{turns}.0.{number}.0"
        asked: Any = EchoClient(client, pins, lambda: 0, rollout_id) if echo else client
        sampled += await play(asked.chat.completions.create, number, turns)
    await counted.http.aclose()
    return counted.count / sampled, counted.ids


async def _both() -> list[Figure | Growth]:
    async with open_bench(LINES, max_model_len=2_048) as bench:
        echoed, _ = await arm(bench, echo=True)
        captured, ids = await arm(bench, echo=False)
        grown = {echo: [(await arm(bench, echo=echo, turns=turns))[0] for turns in SIZES] for echo in (True, False)}
    note = f"{ROLLOUTS} conversations of {TURNS} turns"
    return [
        Figure("agent's wire, token-echo arm", echoed, "bytes a trained token", note=note),
        Figure("agent's wire, capture arm", captured, "bytes a trained token", note=note),
        Figure("agent's wire, capture arm: bodies with token ids", float(ids), "bodies", at_most=0.0),
        Figure("agent's wire: echo arm over capture arm", echoed / captured, "×"),
        *(
            Growth(
                f"agent's wire, {'token-echo' if echo else 'capture'} arm",
                "turns of a conversation",
                [float(turns) for turns in SIZES],
                grown[echo],
                note="Every request holds the whole conversation, so bytes a token grow with the number of turns.",
                unit="bytes a trained token",
            )
            for echo in (True, False)
        ),
    ]


def measure() -> list[Figure | Growth]:
    """Both arms on one bench."""
    return asyncio.run(_both())
