"""Unread: what a request says where the engine does not look, so that the model would see an empty message.

A serving app takes messages of any role and with any keys and leaves out what it does not know: a user message whose
text stands in `text` is served, and trained, as an empty one. Here it is refused, with its place and the next step.

In: the messages or items of a request as an agent sent them. Out: nothing, or `Refused` (400, `content_not_read`).
Invariant: what an API allows passes, an empty answer of the model too, and nothing is looked at but what decides this,
for a history is looked at again with each of its turns. Not here: all else that makes a request none (the worker).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.gateway.refusals import Refused

CODE = "content_not_read"
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESPONSES_ROLES = ("system", "developer", "user", "assistant")
MESSAGES_ROLES = ("user", "assistant", "system")
_TEXT_PARTS = ("text", "input_text", "output_text")
# What an assistant's message may say instead of content. Nothing at all is an empty answer, as the model may give one.
_SAYS_ELSE = ("tool_calls", "function_call", "refusal", "audio", "reasoning", "reasoning_content", "thinking")
# Where content stands by mistake, in what may do without.
_MISPLACED = ("text", "output_text", "output", "message", "contents", "parts", "body", "value", "answer", "result")
_MOST_KEYS, _LONGEST_KEY = 8, 24


def check_chat(messages: Any) -> None:
    """Messages of a chat completion."""
    for index, message in _objects(messages):
        role = message.get("role")
        if role not in CHAT_ROLES:
            raise _role(f"message {index}", role, CHAT_ROLES, "messages")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(f"of message {index}", content, "messages")
        elif content is None and role == "assistant":
            if not any(message.get(name) for name in _SAYS_ELSE):
                _check_misplaced(f"message {index} (assistant)", message, "content", "messages")
        elif not isinstance(content, str) and not (role == "function" and "content" in message):
            raise _no_content(f"message {index} ({role})", message, "content", "messages")
        if role == "tool" and message.get("tool_call_id") is None:
            raise _lacks(
                f"message {index} (tool)", message, "tool_call_id", "the id of the call it answers", "messages"
            )


def check_responses(items: Any) -> None:
    """Items of a response's input."""
    for index, item in _objects(items):
        what, kind = f"input item {index}", item.get("type", "message")
        if kind == "message":
            role, content = item.get("role"), item.get("content")
            if role not in RESPONSES_ROLES:
                raise _role(what, role, RESPONSES_ROLES, "input")
            if isinstance(content, list):
                _check_parts(f"of input item {index}", content, "input")
                if role == "assistant" and any(_says(part) for part in content[1:]):
                    raise _refusal(
                        f"{what} (assistant) has {len(content)} content parts, of which the engine reads the first "
                        "alone. Next: join their texts into one part.",
                        "input",
                    )
            elif not isinstance(content, str):
                raise _no_content(f"{what} ({role})", item, "content", "input")
        elif kind == "function_call_output":
            if item.get("output") is None:
                raise _no_content(f"{what} ({kind})", item, "output", "input")
            if item.get("call_id") is None:
                raise _lacks(f"{what} ({kind})", item, "call_id", "the id of the call it answers", "input")
        elif kind == "function_call":
            for name in ("name", "arguments"):
                if item.get(name) is None:
                    raise _lacks(f"{what} ({kind})", item, name, "what the model called", "input")
        elif kind == "reasoning" and not (item.get("content") or item.get("summary")):
            _check_misplaced(f"{what} ({kind})", item, "content", "input")


def check_messages(messages: Any, system: Any) -> None:
    """Messages of the Anthropic API, and the system prompt beside them."""
    if isinstance(system, list):
        _check_parts("of `system`", system, "system")
    for index, message in _objects(messages):
        role, content = message.get("role"), message.get("content")
        if role not in MESSAGES_ROLES:
            raise _role(f"message {index}", role, MESSAGES_ROLES, "messages")
        if isinstance(content, list):
            _check_parts(f"of message {index}", content, "messages")
            for place, block in _objects(content):
                _check_block(f"part {place} of message {index}", block)
        elif not isinstance(content, str):
            raise _no_content(f"message {index} ({role})", message, "content", "messages")


def _check_block(what: str, block: Mapping[str, Any]) -> None:
    match block.get("type"):
        case "image" if block.get("source") is None:
            raise _no_content(f"{what} (image)", block, "source", "messages")
        case "tool_use":
            for name in ("name", "input"):
                if block.get(name) is None:
                    raise _lacks(f"{what} (tool_use)", block, name, "what the model called", "messages")
        case "tool_result":
            if block.get("tool_use_id") is None:
                told = "the id of the call it answers"
                raise _lacks(f"{what} (tool_result)", block, "tool_use_id", told, "messages")
            content = block.get("content")
            if content is None:
                _check_misplaced(f"{what} (tool_result)", block, "content", "messages")
            elif isinstance(content, list):
                _check_parts(f"of the tool result in {what}", content, "messages")
                for place, part in _objects(content):
                    if part.get("type") not in ("text", "image", "tool_reference"):
                        raise _refusal(
                            f"part {place} of the tool result in {what} is of type {_short(part.get('type'))}, which "
                            "the engine leaves out; expected text or image. Next: send it as text.",
                            "messages",
                        )


def _check_parts(where: str, parts: list[Any], param: str) -> None:
    for place, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and not isinstance(part.get("text"), str):
            raise _no_content(f"part {place} {where} ({part['type']})", part, "text", param)


def _check_misplaced(what: str, item: Mapping[str, Any], name: str, param: str) -> None:
    for key, value in item.items():
        if value and (key in _MISPLACED or (key != name and key.casefold() == name)):
            raise _no_content(what, item, name, param)


def _says(part: Any) -> bool:
    return bool(part.get("text") or part.get("refusal")) if isinstance(part, dict) else bool(part)


def _objects(values: Any) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Those that can be looked into; a list that is none, and what is no object in it, is refused elsewhere."""
    return ((i, value) for i, value in enumerate(values if isinstance(values, list) else ()) if isinstance(value, dict))


def _role(what: str, role: Any, known: tuple[str, ...], param: str) -> Refused:
    meant = role.strip().lower() if isinstance(role, str) else None
    instead = meant if meant in known else "one of these"
    return _refusal(
        f"{what} has the role {_short(role)}; expected one of {', '.join(known)}: a chat template may leave any other "
        f"out. Next: use {instead}.",
        param,
    )


def _no_content(what: str, item: Mapping[str, Any], name: str, param: str) -> Refused:
    came = _keys(item) if item.get(name) is None else f"{type(item[name]).__name__} there"
    return _refusal(
        f"{what} has no text or list as its `{name}`, so the model would see nothing of it; got {came}. Next: put "
        f"what it says into `{name}`, an empty text where it says nothing.",
        param,
    )


def _lacks(what: str, item: Mapping[str, Any], name: str, told: str, param: str) -> Refused:
    return _refusal(f"{what} has no `{name}`, {told}; got {_keys(item)}. Next: add it.", param)


def _refusal(message: str, param: str) -> Refused:
    return Refused(400, message[0].upper() + message[1:], CODE, param)


def _keys(item: Mapping[str, Any]) -> str:
    keys = [key[:_LONGEST_KEY] for key, value in item.items() if value is not None]
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"the keys {', '.join(keys[:_MOST_KEYS])}{more}" if keys else "no key with a value"


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 2 * _LONGEST_KEY else f"{said[: 2 * _LONGEST_KEY]}…"
