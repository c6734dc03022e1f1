"""Items: digests of a call's conversation, item by item, so that a departure from it can be placed.

The ledger keeps one digest for a whole context, which says *that* a history changed. This sidecar keeps a digest per
item, with finer ones of text and tool calls, which say *how*, and each item's leaves, shortened, which say *where*. It
holds no tokens. A child's line carries only what it adds to its parent's, so n turns cost n lines and not n² items.
Losing a line costs a diagnosis, never custody: lines are not fsynced, and broken ones are skipped.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from workbench.errors import FingerprintError
from workbench.ledger.forms import forms_of
from workbench.ledger.journal import append_beside
from workbench.wire import conversation_digest
from workbench.wire.fingerprints import REQUEST_ENVELOPE_ROLE, canonical_arguments

# The second: a passage that the template opened in the prompt.
_THINKING = re.compile(r"<think>.*?</think>|^(?:(?!<think>).)*?</think>", re.DOTALL)
_CLOSED = "</think>"
_TAG = re.compile(r"</?think>")
_THINKING_BLOCKS = ("thinking", "redacted_thinking", "reasoning")

LEAF_CHARS = 2_000
"""What is kept of a leaf's text. A difference behind it is placed at its end."""


LeafKind = Literal["role", "content", "call", "result"]


class Leaf(NamedTuple):
    """One value of an item that counts for its digest. `path` leads to it in the item as it was sent; `digest` is of
    its whole value, `text` the beginning of it, `forms` of all of it where that is more."""

    kind: LeafKind
    path: str
    digest: str
    text: str
    forms: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: LeafKind, path: str, value: Any) -> Leaf:
        text = _as_text(value)
        forms = forms_of(text) if len(text) > LEAF_CHARS else ()
        return cls(kind, path, _short(value), text[:LEAF_CHARS], forms)


class ToolDigest(NamedTuple):
    """One tool call: its name, its arguments as they are compared, the same up to spelling, its id (digests but the
    name)."""

    name: str
    exact: str
    lenient: str
    call_id: str


class ItemDigest(NamedTuple):
    """One conversation item. `text` is of its visible text, `bare` of the same without thinking, stripped."""

    role: str
    digest: str
    text: str
    bare: str
    tools: tuple[ToolDigest, ...]
    thinking: int
    """Thinking in its content or its text: one for each passage, and one more where there is something in it."""
    leaves: tuple[Leaf, ...]

    @property
    def authored(self) -> bool:
        return self.role in ("assistant", "function_call", "reasoning")

    @classmethod
    def of(cls, item: Any) -> ItemDigest:
        """Never raises: an item that the contract cannot fingerprint gets a digest of its JSON."""
        try:
            digest = conversation_digest([item])
        except FingerprintError:
            digest = _short(item)
        fields = item if isinstance(item, Mapping) else {}
        text = visible_text(fields.get("content"))
        return cls(
            role=str(fields.get("role") or fields.get("type") or ""),
            digest=digest[:16],
            text=_short(text),
            bare=_short((_THINKING.sub("", text) if _CLOSED in text else text).strip()),
            tools=tuple(_tool_digests(fields)),
            thinking=_thinking(fields, text),
            leaves=tuple(Leaf.of(*leaf) for leaf in _leaves(fields)),
        )


@dataclass(frozen=True)
class CallItems:
    """The items of one served call: those of its request after the first `skip` (they are `parent`'s), then those of
    its response, which start at `response_at` in `items`."""

    model_call_id: str
    parent: str | None
    skip: int
    dialect: str
    prompt_options: str | None
    response_at: int
    items: tuple[ItemDigest, ...]

    @classmethod
    def of(
        cls,
        model_call_id: str,
        request_items: Sequence[Any],
        response_items: Sequence[Any],
        *,
        parent: str | None = None,
        skip: int = 0,
        dialect: str = "chat",
        prompt_options: str | None = None,
    ) -> CallItems:
        added = list(request_items)[skip:]
        return cls(
            model_call_id,
            parent,
            skip,
            dialect,
            prompt_options,
            len(added),
            tuple(ItemDigest.of(item) for item in [*added, *response_items]),
        )


_LINE = TypeAdapter(CallItems)


def write_items(path: Path, call: CallItems) -> None:
    """Append one line."""
    append_beside(path, orjson.dumps(call, default=list))


def read_items(path: Path) -> list[CallItems]:
    """Every readable line, in order; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    calls = []
    for line in lines:
        with contextlib.suppress(ValidationError):
            calls.append(_LINE.validate_json(line))
    return calls


def visible_text(content: Any) -> str:
    """The text of an item's content, its parts joined; empty where there is none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | Mapping))
    return "".join(part for part in parts if isinstance(part, str))


def _thinking(item: Mapping[str, Any], text: str) -> int:
    passages = [_TAG.sub("", passage) for passage in _THINKING.findall(text)] if _CLOSED in text else []
    blocks = sum(block.get("type") in _THINKING_BLOCKS for _, block in _blocks(item))
    return 2 * blocks + sum(1 + bool(passage.strip()) for passage in passages)


def _blocks(item: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    content = item.get("content")
    return [
        (i, block) for i, block in enumerate(content if isinstance(content, list) else ()) if isinstance(block, Mapping)
    ]


def _leaves(item: Mapping[str, Any]) -> Iterator[tuple[LeafKind, str, Any]]:
    """`(kind, path, value)` of what the digest is made of, in its order: role, content, tool calls, tool results."""
    role = "role" if item.get("role") else "type"
    yield "role", role, item.get(role) or ""
    content = item.get("content")
    envelope = _envelope(item)
    if envelope is not None:
        yield "content", "instructions", envelope.get("instructions")
        tools = envelope.get("tools")
        for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
            yield "content", f"tools[{index}]", tool
        return
    if isinstance(content, str) and content:
        yield "content", "content", content
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            yield "content", f"content[{index}]", part
        elif isinstance(part, Mapping) and part.get("type") not in ("tool_use", "tool_result"):
            text = part.get("text")
            if isinstance(text, str):
                # Empty text counts for nothing in a digest.
                if text:
                    yield "content", f"content[{index}].text", text
            else:
                yield "content", f"content[{index}]", part
    for call_id, name, arguments in _calls(item):
        yield "call", *call_id
        yield "call", *name
        yield "call", arguments.path, _arguments(arguments.value)
    if item.get("type") == "function_call_output":
        yield "result", "call_id", item.get("call_id") or item.get("id")
        yield "result", "output", item.get("output")
    elif item.get("role") == "tool":
        yield "result", "tool_call_id", item.get("tool_call_id")
    for index, block in _blocks(item):
        if block.get("type") == "tool_result":
            yield "result", f"content[{index}].tool_use_id", block.get("tool_use_id") or block.get("id")
            yield "result", f"content[{index}].content", block.get("content")


class _At(NamedTuple):
    path: str
    value: Any


def _calls(item: Mapping[str, Any]) -> Iterator[tuple[_At, _At, _At]]:
    """Id, name and arguments of each tool call in an item, in whatever dialect it is said."""
    if item.get("type") == "function_call":
        call_id = _At("call_id", item.get("call_id") or item.get("id"))
        yield call_id, _At("name", item.get("name")), _At("arguments", item.get("arguments"))
    for index, block in _blocks(item):
        if block.get("type") == "tool_use":
            call_id, name, arguments = (
                _At(f"content[{index}].{key}", block.get(key)) for key in ("id", "name", "input")
            )
            yield call_id, name, arguments
    calls = item.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            at = f"tool_calls[{index}].function."
            name, arguments = (_At(at + key, function.get(key)) for key in ("name", "arguments"))
            yield _At(f"tool_calls[{index}].id", call.get("id")), name, arguments


def _envelope(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a request envelope holds; None for any other item."""
    if item.get("role") != REQUEST_ENVELOPE_ROLE:
        return None
    try:
        envelope = orjson.loads(item.get("content") or "")
    except (orjson.JSONDecodeError, TypeError):
        return None
    return envelope if isinstance(envelope, Mapping) else None


def _arguments(value: Any) -> Any:
    """As the fingerprints compare them: JSON text and the value that it spells are the same."""
    try:
        return canonical_arguments(value)
    except FingerprintError:
        return value


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value)


def as_json(value: Any) -> str:
    """A value in JSON, for people and for comparison. Never raises: what orjson does not write (a number beyond 64
    bits, half a surrogate pair) the standard library spells, and what that does not either (nested too deeply) nobody.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str).decode()
    except TypeError:
        try:
            return json.dumps(value, sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError):
            return f"{type(value).__name__} that is no JSON"


def _tool_digests(item: Mapping[str, Any]) -> list[ToolDigest]:
    return [
        ToolDigest(str(name.value), _short(_arguments(said.value)), _short(_lenient(said.value)), _short(call_id.value))
        for call_id, name, said in _calls(item)
    ]


def _lenient(arguments: Any) -> Any:
    """Arguments up to spelling: nothing, an empty string and an empty object are the same, and so are 1 and 1.0."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = arguments.strip()
    if arguments in (None, "", {}):
        return {}
    try:
        return _same_numbers(arguments)
    except RecursionError:
        return arguments


def _same_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _same_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_same_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    return sha256(as_json(value).encode()).hexdigest()[:16]
