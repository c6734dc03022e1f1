"""Messages: the Anthropic Messages API.

What a client sends is not always what the model reads: cache marks and billing headers never reach the prompt, so the
items leave them out, or a mark that moves on with the conversation would make every turn another history. System
messages between the turns count as instructions: a serving app may move them to the head of the prompt, and a child
whose head is another than its parent's must not be spliced onto it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from workbench.gateway.dialects.base import Dialect, given
from workbench.gateway.dialects.unread import check_messages
from workbench.gateway.refusals import Refused
from workbench.gateway.sse import Frame, encode
from workbench.wire.fingerprints import request_envelope

_BILLING = "x-anthropic-billing-header"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class MessagesDialect(Dialect):
    """Anthropic messages."""

    name = "messages"
    path = "/v1/messages"
    max_tokens_field = "max_tokens"

    def check(self, body: Mapping[str, Any]) -> None:
        check_messages(body.get("messages"), body.get("system"))

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise Refused(400, "`messages` must be a list of at least one message object.", param="messages")
        instructions = _instructions(body.get("system"))
        between = [message for message in messages if message.get("role") == "system"]
        if between:
            instructions = [*_blocks(instructions), *_without_marks(between)]
        envelope = request_envelope(instructions, _without_marks(body.get("tools")))
        turns = [_without_marks(message) for message in messages if message.get("role") != "system"]
        return turns if envelope is None else [dict(envelope), *turns]

    def prompt_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        options = given(body, ("chat_template_kwargs", "output_config"))
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "disabled":
            options["thinking"] = "disabled"
        return options

    def adapt(self, body: dict[str, Any]) -> list[str]:
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and thinking.get("budget_tokens") is not None:
            # A budget ends the thinking by force: tokens that the policy did not choose.
            body["thinking"] = {"type": "adaptive"}
            return ["thinking"]
        return []

    def response_items(self, served: Mapping[str, Any]) -> list[dict[str, Any]]:
        content = served.get("content")
        return [{"role": "assistant", "content": content}] if isinstance(content, list) else []

    def is_final(self, frame: Frame) -> bool:
        event = _event(frame)
        if event.get("type") == "message_delta":
            delta = event.get("delta")
            return isinstance(delta, dict) and bool(delta.get("stop_reason"))
        return event.get("type") == "message_stop"

    def is_error(self, frame: Frame) -> bool:
        return "error" in _event(frame)

    def assembler(self) -> MessagesAssembler:
        return MessagesAssembler()

    def refusal(self, refused: Refused) -> dict[str, Any]:
        kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        error = {"type": kind, "message": refused.message, "code": refused.code, "param": refused.param}
        return {"type": "error", "error": error}

    def error_frame(self, refused: Refused) -> bytes:
        return encode(self.refusal(refused), "error")


class MessagesAssembler:
    """Events of one message → the message."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, str] = {}

    def feed(self, frame: Frame) -> None:
        event = _event(frame)
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._message = dict(event["message"])
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            self._blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(event.get("delta"), dict):
            self._feed_delta(index, event["delta"])
        elif kind == "message_delta":
            self._message |= {name: value for name, value in (event.get("delta") or {}).items() if value is not None}
            self._message["usage"] = (self._message.get("usage") or {}) | (event.get("usage") or {})

    def _feed_delta(self, index: int, delta: dict[str, Any]) -> None:
        if delta.get("type") == "input_json_delta":
            self._arguments[index] = self._arguments.get(index, "") + (delta.get("partial_json") or "")
            return
        block = self._blocks.setdefault(index, {"type": "text"})
        for name in ("text", "thinking", "signature"):
            if delta.get(name):
                block[name] = (block.get(name) or "") + delta[name]

    def served(self) -> dict[str, Any]:
        content = []
        for index, block in sorted(self._blocks.items()):
            spelled = self._arguments.get(index)
            content.append({**block, "input": _parsed(spelled)} if spelled else block)
        return {**self._message, "content": content}


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        # A call that was cut short: whatever a client makes of it, it is not this, and the next turn won't resolve.
        return arguments


def _instructions(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [
        _without_marks(block)
        for block in system
        if not (isinstance(block, dict) and str(block.get("text") or "").startswith(_BILLING))
    ]


def _blocks(instructions: Any) -> list[Any]:
    if isinstance(instructions, list):
        return instructions
    return [{"type": "text", "text": instructions}] if instructions else []


def _without_marks(value: Any) -> Any:
    """The same without cache marks, at any depth."""
    if isinstance(value, dict):
        if value.get("type") == "tool_use":
            # What the model wrote as arguments is left alone.
            return {name: inner for name, inner in value.items() if name != "cache_control"}
        return {name: _without_marks(inner) for name, inner in value.items() if name != "cache_control"}
    return [_without_marks(inner) for inner in value] if isinstance(value, list) else value


def _event(frame: Frame) -> dict[str, Any]:
    return frame.event if isinstance(frame.event, dict) else {}
