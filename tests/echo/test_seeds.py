"""Seeds: one conversation at one place is sampled with one seed, captured or echoed, in whatever dialect it is said."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest

from workbench.capture.transport import read_capturable
from workbench.config import load_recipe
from workbench.echo.client import EchoClient
from workbench.errors import EchoLost
from workbench.serving.sampling import SamplingPins, said_in

MESSAGES = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "7 \U0001f30d"}]


class Endpoint:
    """Stands where `AsyncOpenAI` stands and keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request):
        self.asked.append(request)
        message = SimpleNamespace(model_dump=lambda **_: {})
        choice = SimpleNamespace(model_extra={}, logprobs=None, message=message, finish_reason="stop")
        return SimpleNamespace(id="chatcmpl-1", choices=[choice], model_extra={})


async def echoed_seed(pins, rollout_id, **request):
    endpoint = Endpoint()
    client = EchoClient(endpoint, pins, lambda: 0, rollout_id)
    with pytest.raises(EchoLost):  # the answer is not what this is about
        await client.chat.completions.create(model="policy", messages=MESSAGES, **request)
    return endpoint.asked[0].get("seed")


def captured_seed(pins, rollout_id, **request):
    """As the worker makes it of the body that the gateway forwards."""
    body = orjson.dumps({"temperature": 1.0, "messages": MESSAGES, "model": "policy", **request})
    return pins.seed_of(rollout_id, said_in(read_capturable(body)))


@pytest.mark.asyncio
async def test_both_arms_sample_a_call_with_the_same_seed():
    pins = SamplingPins.of(load_recipe("ab_capture_vs_echo").sampling, 11)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    seeds = {
        await echoed_seed(pins, "echo.3.1.0"): captured_seed(pins, "capture.3.1.0"),
        await echoed_seed(pins, "echo.3.2.0"): captured_seed(pins, "capture.3.2.0"),
        await echoed_seed(pins, "echo.3.1.0", tools=tools): captured_seed(pins, "capture.3.1.0", tools=tools),
    }
    assert len(seeds) == 3 and all(echoed == captured for echoed, captured in seeds.items())
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.asyncio
async def test_without_seed_each_call_no_seed_is_sent():
    pins = SamplingPins.of(load_recipe("cpu_smoke").sampling, 11)
    assert await echoed_seed(pins, "echo.3.1.0") is None and captured_seed(pins, "capture.3.1.0") is None


def test_what_was_said_is_the_conversation_and_not_how_it_is_to_be_answered():
    one = said_in({"messages": MESSAGES, "model": "a", "temperature": 0.1, "stream": True})
    assert one == said_in({"model": "b", "messages": MESSAGES, "tools": None})
    assert one != said_in({"messages": MESSAGES[:1]}) and one != said_in({"input": MESSAGES})
    assert said_in({"system": "s", "messages": MESSAGES}) != one
