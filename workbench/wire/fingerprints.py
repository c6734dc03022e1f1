"""Fingerprints: hash what a conversation says, so that three API dialects saying the same hash the same.

In: the items of a chat, responses or messages request or response. Out: SHA-256 hex (or "" where nothing is hashed).
    assistant fingerprint   only what the model authored; finds the recorded call that a request continues
    conversation digest     every item; proves that the context before it was not rewritten
Invariant: every field is tagged and length-delimited, so no two different conversations share hash input.
Not here: which recorded call wins (`workbench.ledger`).

Reasoning items are left out of the assistant fingerprint: harnesses need not echo them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from workbench.errors import FingerprintError

FINGERPRINT_VERSION = 2
"""Stamped on every row; rows of another version never match."""

REQUEST_ENVELOPE_ROLE = "_ng_request_envelope"

_ASSISTANT_DOMAIN = b"nemo-gym-lineage"
_CONVERSATION_DOMAIN = b"nemo-gym-lineage-context"
_TEXT_TYPES = frozenset({"", "text", "input_text", "output_text"})
_TOOL_TYPES = frozenset({"tool_use", "tool_result"})

Item = Mapping[str, Any]


def assistant_fingerprint(items: Sequence[Item] | None) -> str:
    """Hash of the model-authored items in order, "" when there are none.

    Raises FingerprintError for an item that is no object and for model-authored content that cannot be hashed.
    """
    digest = hashlib.sha256(_ASSISTANT_DOMAIN)
    authored = 0
    for item in _objects(items):
        if is_model_authored(item):
            authored += 1
            _add_authored(digest, content_parts(item), tool_calls(item))
    return digest.hexdigest() if authored else ""


def conversation_digest(items: Sequence[Item] | None) -> str:
    """Hash of every item in order: role, content, tool calls and tool results.

    Raises FingerprintError for an item that is no object or whose content cannot be hashed.
    """
    digest = hashlib.sha256(_CONVERSATION_DOMAIN)
    for item in _objects(items):
        _add_item(digest, item, content_parts(item), tool_calls(item))
    return digest.hexdigest()


class ConversationHasher:
    """Both hashes of a conversation that grows item by item; `copy` is where two continuations part."""

    def __init__(self) -> None:
        self._assistant = hashlib.sha256(_ASSISTANT_DOMAIN)
        self._conversation = hashlib.sha256(_CONVERSATION_DOMAIN)
        self._authored = 0

    def add(self, item: Item) -> None:
        """Add the next item. Raises FingerprintError as `conversation_digest` does; the hasher is then of no use."""
        (item,) = _objects([item])
        parts, calls = content_parts(item), tool_calls(item)
        _add_item(self._conversation, item, parts, calls)
        if is_model_authored(item):
            self._authored += 1
            _add_authored(self._assistant, parts, calls)

    def copy(self) -> ConversationHasher:
        """Another hasher of the same conversation so far."""
        other = object.__new__(ConversationHasher)
        other._assistant = self._assistant.copy()
        other._conversation = self._conversation.copy()
        other._authored = self._authored
        return other

    @property
    def assistant(self) -> str:
        """What `assistant_fingerprint` gives for the items so far."""
        return self._assistant.hexdigest() if self._authored else ""

    @property
    def conversation(self) -> str:
        """What `conversation_digest` gives for the items so far."""
        return self._conversation.hexdigest()


def _add_authored(digest: Any, parts: list[tuple[str, str]], calls: list[tuple[str, str, str]]) -> None:
    _fields(digest, b"\x00\x01", parts)
    _fields(digest, b"\x02\x03\x04", calls)


def _add_item(digest: Any, item: Item, parts: list[tuple[str, str]], calls: list[tuple[str, str, str]]) -> None:
    _fields(digest, b"\x00", [(str(item.get("role") or item.get("type") or ""),)])
    _fields(digest, b"\x01\x02", parts)
    _fields(digest, b"\x03\x04\x05", calls)
    _fields(digest, b"\x06\x07", tool_results(item))


def request_envelope(instructions: Any, tools: Any) -> Item | None:
    """The item that a request's items begin with when it has instructions or tools, else None.

    It makes a changed tool list or system prompt change the conversation digest. An Anthropic `system` counts as
    instructions.
    """
    if not instructions and not tools:
        return None
    content = json.dumps({"instructions": instructions, "tools": tools}, sort_keys=True, default=str)
    return {"role": REQUEST_ENVELOPE_ROLE, "content": content}


def is_model_authored(item: Item) -> bool:
    """True for role `assistant` and for responses `function_call` items."""
    return item.get("role") == "assistant" or item.get("type") == "function_call"


def content_parts(item: Item) -> list[tuple[str, str]]:
    """`(type, payload)` of every content part; empty text contributes nothing."""
    content = item.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [("text", content)] if content else []
    if not isinstance(content, list):
        raise FingerprintError(f"content must be text, a list or null, got {type(content).__name__}")
    parts = []
    for block in content:
        if isinstance(block, str):
            block = {"text": block}
        elif not isinstance(block, dict):
            raise FingerprintError(f"a content block must be text or an object, got {type(block).__name__}")
        kind, block_text = str(block.get("type") or ""), block.get("text")
        if kind in _TOOL_TYPES:
            continue
        if kind in _TEXT_TYPES and isinstance(block_text, str):
            if block_text:
                parts.append(("text", block_text))
        elif kind:
            parts.append((kind, canonical_json(block)))
        else:
            raise FingerprintError(
                f"a content block has neither a type nor a text; its keys are {sorted(map(str, block))}"
            )
    return parts


def tool_calls(item: Item) -> list[tuple[str, str, str]]:
    """`(id, name, canonical arguments)` of every tool call, whichever dialect it is written in."""
    calls = []
    if item.get("type") == "function_call":
        name = str(item.get("name", ""))
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
        calls.append((_first(item, "call_id", "id"), name, canonical_arguments(item.get("arguments"))))
    for block in _blocks(item, "tool_use"):
        calls.append((_first(block, "id"), str(block.get("name", "")), canonical_arguments(block.get("input"))))
    for call in _list(item.get("tool_calls"), "tool_calls"):
        call = _object(call, "a tool call")
        function = _object(call.get("function"), "a tool call's function")
        calls.append(
            (_first(call, "id"), str(function.get("name", "")), canonical_arguments(function.get("arguments")))
        )
    return calls


def tool_results(item: Item) -> list[tuple[str, str]]:
    """`(call id, output)` of every tool result; an output that is no string becomes canonical JSON."""
    results = []
    if item.get("type") == "function_call_output":
        results.append((_first(item, "call_id", "id"), _text_or_json(item.get("output"))))
    elif item.get("role") == "tool":
        results.append((_first(item, "tool_call_id"), _text_or_json(item.get("content"))))
    for block in _blocks(item, "tool_result"):
        results.append((_first(block, "tool_use_id", "id"), _text_or_json(block.get("content"))))
    return results


def canonical_arguments(value: Any) -> str:
    """Tool arguments for comparison: null → "", JSON text or a value → canonical JSON, other text stripped."""
    if value is None:
        return ""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value.strip()
    return canonical_json(value)


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, UTF-8 as orjson writes it. Raises FingerprintError for what JSON cannot hold."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode("utf-8")
    except TypeError as error:
        raise FingerprintError(f"not JSON: {error}") from error


def _fields(digest: Any, tags: bytes, rows: Iterable[tuple[str, ...]]) -> None:
    try:
        encoded = [(tag, value.encode("utf-8")) for row in rows for tag, value in zip(tags, row, strict=True)]
    except UnicodeEncodeError as error:
        raise FingerprintError(f"not valid Unicode text: {error}") from error
    digest.update(b"".join(b"%c%b%b" % (tag, len(value).to_bytes(8, "big"), value) for tag, value in encoded))


def _objects(items: Sequence[Item] | None) -> Iterator[Item]:
    for position, item in enumerate(items or ()):
        if not isinstance(item, dict):
            raise FingerprintError(f"item {position} must be an object, got {type(item).__name__}")
        yield item


def _blocks(item: Item, kind: str) -> Iterator[Item]:
    content = item.get("content")
    if isinstance(content, list):
        yield from (block for block in content if isinstance(block, dict) and block.get("type") == kind)


def _list(value: Any, what: str) -> Sequence[Any]:
    if value and not isinstance(value, list):
        raise FingerprintError(f"{what} must be a list, got {type(value).__name__}")
    return value or ()


def _object(value: Any, what: str) -> Item:
    if value and not isinstance(value, dict):
        raise FingerprintError(f"{what} must be an object, got {type(value).__name__}")
    return value or {}


def _first(item: Item, *keys: str) -> str:
    return str(next((item[key] for key in keys if item.get(key)), ""))


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)
