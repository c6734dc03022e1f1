"""Chat: OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.gateway.dialects.base import Dialect, given
from workbench.gateway.dialects.unread import check_chat
from workbench.gateway.refusals import Refused
from workbench.gateway.sse import Frame, encode
from workbench.wire.fingerprints import request_envelope

# What reaches the prompt through the chat template beside the messages and the tools.
PROMPT_OPTIONS = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_special_tokens",
    "reasoning_effort",
    "mm_processor_kwargs",
    "response_format",
)


class ChatDialect(Dialect):
    """OpenAI chat completions."""

    name = "chat"
    path = "/v1/chat/completions"
    max_tokens_field = "max_tokens"

    def check(self, body: Mapping[str, Any]) -> None:
        check_chat(body.get("messages"))

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise Refused(400, "`messages` must be a list of at least one message object.", param="messages")
        envelope = request_envelope(None, body.get("tools"))
        return list(messages) if envelope is None else [dict(envelope), *messages]

    def prompt_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        options = given(body, PROMPT_OPTIONS)
        if options.get("response_format") == {"type": "text"}:
            del options["response_format"]
        return options

    def adapt(self, body: dict[str, Any]) -> list[str]:
        # A null says what leaving the field out says. Clients send both (`model_dump`), the worker takes fewer of them.
        body["messages"] = [
            {name: value for name, value in message.items() if value is not None} for message in body["messages"]
        ]
        return []

    def response_items(self, served: Mapping[str, Any]) -> list[dict[str, Any]]:
        choices = served.get("choices")
        message = choices[0].get("message") if isinstance(choices, list) and choices else None
        return [message] if isinstance(message, dict) else []

    def is_final(self, frame: Frame) -> bool:
        return frame.done or any(choice.get("finish_reason") for choice in _choices(frame))

    def is_error(self, frame: Frame) -> bool:
        return isinstance(frame.event, dict) and "error" in frame.event

    def assembler(self) -> ChatAssembler:
        return ChatAssembler()

    def refusal(self, refused: Refused) -> dict[str, Any]:
        return refused.openai_error()

    def error_frame(self, refused: Refused) -> bytes:
        return encode(self.refusal(refused))


class ChatAssembler:
    """Chunks of one chat completion → the completion."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: dict[str, Any] = {"finish_reason": None}
        self._usage: Any = None

    def feed(self, frame: Frame) -> None:
        if not isinstance(frame.event, dict):
            return
        for name in ("id", "created", "model"):
            self._head.setdefault(name, frame.event.get(name))
        self._usage = frame.event.get("usage") or self._usage
        for choice in _choices(frame):
            for name in ("finish_reason", "stop_reason"):
                if choice.get(name) is not None:
                    self._finish[name] = choice[name]
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._feed_delta(delta)

    def _feed_delta(self, delta: dict[str, Any]) -> None:
        for name in ("content", "reasoning", "reasoning_content", "refusal"):
            if delta.get(name):
                self._message[name] = (self._message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(
                part.get("index", 0), {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
            )
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments") or ""

    def served(self) -> dict[str, Any]:
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, **self._finish}],
            "usage": self._usage,
        }


def _choices(frame: Frame) -> list[dict[str, Any]]:
    choices = frame.event.get("choices") if isinstance(frame.event, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
