"""Echo client: an OpenAI client to the agent, which asks for token ids on the way and keeps them for the driver.

    create(messages) ─▶ + recipe's sampling, return_token_ids, logprobs ─▶ the endpoint
    response ─▶ ids and log-probs taken out into `calls` ─▶ the agent sees what it would have seen without them
Only `chat.completions.create` is offered, streaming or not: it is what our environments use.
Not here: which calls become the row (calls, rows).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from workbench.echo.calls import EchoedCall
from workbench.errors import EchoLost
from workbench.serving.sampling import SamplingPins, said_in

#: Fields of a request that the recipe's sampling settings replace, and that the SDK has no parameter for.
_EXTRA = ("top_k", "min_p", "repetition_penalty")
_OWNED = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "n", "max_completion_tokens",
)  # fmt: skip


class EchoClient:
    """Stands where the agent's `AsyncOpenAI` stood; one a rollout. `calls` are its answered requests, in order."""

    def __init__(
        self, client: AsyncOpenAI, sampling: SamplingPins, weight_version: Callable[[], int], rollout_id: str
    ) -> None:
        self.calls: list[EchoedCall] = []
        self.chat = _Chat(_Completions(client, sampling, weight_version, rollout_id, self.calls))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the token-echo arm echoes chat.completions only, this agent asked for {name!r}")


class _Chat:
    def __init__(self, completions: _Completions) -> None:
        self.completions = completions


class _Completions:
    def __init__(
        self,
        client: AsyncOpenAI,
        sampling: SamplingPins,
        weight_version: Callable[[], int],
        rollout_id: str,
        calls: list[EchoedCall],
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._weight_version = weight_version
        self._rollout_id = rollout_id
        self._calls = calls

    async def create(self, *, messages: Any, **settings: Any) -> Any:
        """As the SDK's. Raises `EchoLost` naming the field when a response comes without ids or log-probs."""
        version = self._weight_version()
        history = [dict(message) for message in messages]
        answer = await self._client.chat.completions.create(messages=messages, **self._asking(messages, settings))
        if settings.get("stream"):
            return self._stream(answer, history, version)
        self._keep(answer, _Taken.of(answer), history, version)
        return answer

    def _asking(self, messages: Any, settings: dict[str, Any]) -> dict[str, Any]:
        pins = self._sampling.pinned()
        body = dict(settings.get("extra_body") or {}) | {name: pins[name] for name in _EXTRA}
        asked = settings.get("max_completion_tokens") or settings.get("max_tokens") or self._sampling.max_tokens
        limits = [limit for limit in (asked, self._sampling.max_tokens) if limit is not None]
        kept = {name: value for name, value in settings.items() if name not in _OWNED}
        kept |= {name: pins[name] for name in ("temperature", "top_p")}
        kept |= {"max_tokens": min(limits)} if limits else {}
        # What the policy worker does for a captured call, with the same outcome: both arms sample with one seed.
        seed = self._sampling.seed_of(self._rollout_id, said_in({"messages": messages, **settings}))
        kept |= {"seed": seed} if seed is not None else {}
        return kept | {"logprobs": True, "extra_body": body | {"return_token_ids": True}}

    async def _stream(self, chunks: Any, history: list[dict[str, Any]], version: int) -> AsyncIterator[Any]:
        state, taken = ChatCompletionStreamState(), _Taken()
        async for chunk in chunks:
            taken.take(chunk)
            state.handle_chunk(chunk)
            yield chunk
        self._keep(state.current_completion_snapshot, taken, history, version)

    def _keep(self, answer: ChatCompletion, taken: _Taken, history: list[dict[str, Any]], version: int) -> None:
        choice = answer.choices[0]
        self._calls.append(
            EchoedCall(
                call_id=answer.id,
                messages=history,
                answer=choice.message.model_dump(mode="json", exclude_none=True),
                prompt_ids=np.array(taken.required(answer.id, "prompt_token_ids"), dtype=np.uint64),
                sampled_ids=np.array(taken.required(answer.id, "token_ids"), dtype=np.uint64),
                logprobs=np.array(taken.required(answer.id, "logprobs"), dtype=np.float32),
                finish_reason=choice.finish_reason,
                weight_version=version,
            )
        )


class _Taken:
    """The fields taken out of one response, chunk by chunk."""

    def __init__(self) -> None:
        self._fields: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, answer: ChatCompletion) -> _Taken:
        taken = cls()
        taken.take(answer)
        return taken

    def take(self, part: Any) -> None:
        """Move ids and log-probs from a completion or a chunk of one to here."""
        self._add("prompt_token_ids", (part.model_extra or {}).pop("prompt_token_ids", None))
        for choice in part.choices:
            self._add("token_ids", (choice.model_extra or {}).pop("token_ids", None))
            content = choice.logprobs.content if choice.logprobs is not None else None
            self._add("logprobs", None if content is None else [step.logprob for step in content])
            choice.logprobs = None

    def _add(self, name: str, values: list[Any] | None) -> None:
        if values is not None:
            self._fields.setdefault(name, []).extend(values)

    def required(self, call_id: str, name: str) -> list[Any]:
        if name not in self._fields:
            raise EchoLost(
                f"Response {call_id} came without {name!r}; the token-echo arm trains on what responses bring along. "
                "Next: look for a proxy that strips fields, or switch token_capture.enabled on."
            )
        return self._fields[name]
