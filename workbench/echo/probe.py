"""Echo probe: one request at start-up that proves that ids and log-probs come back through everything in between."""

from __future__ import annotations

import openai

from workbench.echo.client import EchoClient
from workbench.errors import EchoLost, ProbeFailed
from workbench.serving.sampling import SamplingPins

REQUEST_TIMEOUT_S = 60.0


async def probe_echo(gateway_url: str, model: str) -> dict[str, object]:
    """Ask for one short answer. Raises `ProbeFailed` naming the field that was lost on the way."""
    async with openai.AsyncOpenAI(
        base_url=f"{gateway_url.rstrip('/')}/v1",
        api_key="unused",
        timeout=REQUEST_TIMEOUT_S,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(timeout=REQUEST_TIMEOUT_S, trust_env=False),
    ) as client:
        echo = EchoClient(client, SamplingPins(max_tokens=8), lambda: 0, "probe.0.0.0")
        try:
            await echo.chat.completions.create(model=model, messages=[{"role": "user", "content": "Count to 3."}])
        except (EchoLost, openai.OpenAIError) as error:
            raise ProbeFailed(f"The token-echo arm's probe failed: {error}") from error
    (call,) = echo.calls
    if call.sampled_ids.size != call.logprobs.size or not call.sampled_ids.size:
        raise ProbeFailed(
            f"The token-echo arm's probe got {call.sampled_ids.size} sampled ids and {call.logprobs.size} log-probs."
        )
    return {
        "capture_enabled": False,
        "prompt_tokens": int(call.prompt_ids.size),
        "sampled_tokens": int(call.sampled_ids.size),
    }
