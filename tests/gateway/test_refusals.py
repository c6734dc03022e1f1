"""Refusals: the one code that agents go on from, in the worker's words and in each API's own form."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import orjson
import pytest

from conftest import WINDOW, Stack
from workbench.gateway.refusals import CONTEXT_LENGTH_EXCEEDED, from_worker

FULL = [
    # vLLM 0.32, of a prompt as text, of its tokens, of what is left for an answer, in the engine, and of responses.
    "This model's maximum context length is 512 tokens. However, your prompt contains 9000 characters (more than 8192 "
    "characters, which is the upper bound for 512 input tokens). Please reduce the length of the input prompt. "
    "(parameter=input_text, value=9000)",
    "This model's maximum context length is 512 tokens. However, your prompt contains at least 513 input tokens, which "
    "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=513)",
    "Input length (600) exceeds model's maximum context length (512).",
    "The decoder prompt (length 600) is longer than the maximum model length of 512. Make sure that `max_model_len` is "
    "no smaller than the number of text tokens.",
    "The decoder prompt (length 512) plus the number of requested output tokens (at least 1) is longer than the "
    "maximum model length of 512. Make sure that `max_model_len` is no smaller than the number of text tokens.",
    "The engine prompt length 512 exceeds the max_model_len 512. Please reduce prompt.",
    "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
]
OTHERS = [
    "max_tokens=900 cannot be greater than max_model_len=512. Please request fewer output tokens.",
    "1 validation error: {'type': 'string_type', 'loc': ('body', 'messages', 1), 'input': 'my context length is 3'}",
    "The prompt cannot be empty",
    "Unexpected message role: This model's maximum context length is 512 tokens. However, your prompt contains",
]


@pytest.mark.parametrize(("message", "full"), [*((said, True) for said in FULL), *((said, False) for said in OTHERS)])
def test_a_full_window_is_told_from_everything_else_that_a_worker_refuses(message: str, full: bool) -> None:
    body = orjson.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
    refused = from_worker(400, body)
    words, _, next_step = refused.message.partition(" Next: ")
    assert (refused.status, words) == (400, message)
    assert (refused.code == CONTEXT_LENGTH_EXCEEDED) == bool(next_step) == full


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/ng-rollout/refused.full", ""])
async def test_a_full_window_has_its_code_in_every_api_and_on_every_route(
    stack: Stack, route: str, stream: bool
) -> None:
    long: Any = [{"role": "user", "content": "word " * WINDOW}]
    client = stack.client(f"{route}/v1")
    with pytest.raises(openai.BadRequestError) as chat:
        await client.chat.completions.create(model="policy", messages=long, stream=stream)
    with pytest.raises(openai.BadRequestError) as responses:
        await client.responses.create(model="policy", input=long, stream=stream)
    assert chat.value.code == responses.value.code == CONTEXT_LENGTH_EXCEEDED
    assert " Next: end the conversation here" in str(chat.value) and " Next: " in str(responses.value)
    async with anthropic.AsyncAnthropic(base_url=f"{stack.url}{route}", api_key="unused", max_retries=0) as claude:
        with pytest.raises(anthropic.BadRequestError) as messages:
            await claude.messages.create(model="policy", max_tokens=9, messages=long, stream=stream)
    error = messages.value.body["error"]  # type: ignore[index]
    assert (error["type"], error["code"]) == ("invalid_request_error", CONTEXT_LENGTH_EXCEEDED)
    assert " Next: end the conversation here" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_for_no_token_is_no_full_window(stack: Stack) -> None:
    ask: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as refused:
        await stack.agent("refused.none").chat.completions.create(model="policy", messages=ask, max_tokens=0)
    assert refused.value.code == "not_capturable"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_for_another_reason_passes_as_it_came(stack: Stack) -> None:
    answer = await stack.http.post(f"{stack.url}/v1/chat/completions", json={"model": "policy", "messages": 7})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == 400
