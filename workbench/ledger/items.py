"""Items: digests of a call's conversation, item by item, so that a departure from it can be placed.

The ledger keeps one digest for a whole context, which says *that* a history changed. This sidecar keeps a digest per
item, with finer ones of text and tool calls, which say *where* and *how*; it holds no text and no tokens. A child's
line carries only what it adds to its parent's, so a rollout of n turns costs n lines of constant size, not n² items.
Losing a line costs a diagnosis, never custody: lines are not fsynced, and broken ones are skipped.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from workbench.errors import FingerprintError
from workbench.wire import conversation_digest

_THINKING = re.compile(r"<think>.*?</think>|^.*?</think>", re.DOTALL)


class ToolDigest(NamedTuple):
    """One tool call: its name, its arguments exactly, its arguments up to spelling, its id (digests but the name)."""

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
        text = _visible_text(fields.get("content"))
        return cls(
            role=str(fields.get("role") or fields.get("type") or ""),
            digest=digest[:16],
            text=_short(text),
            bare=_short(_THINKING.sub("", text).strip()),
            tools=tuple(_tool_digests(fields)),
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


def write_items(path: Path, call: CallItems) -> None:
    """Append one line in one write, under the lock."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, orjson.dumps(asdict(call), default=list) + b"\n")
    finally:
        os.close(fd)


def read_items(path: Path) -> list[CallItems]:
    """Every readable line, in order; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    calls = []
    for line in lines:
        try:
            fields = orjson.loads(line)
            items = tuple(
                ItemDigest(role, digest, text, bare, tuple(ToolDigest(*tool) for tool in tools))
                for role, digest, text, bare, tools in fields.pop("items")
            )
            calls.append(CallItems(items=items, **fields))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
    return calls


def histories(calls: Sequence[CallItems]) -> dict[str, list[ItemDigest]]:
    """Call id → its whole request and response. A parent stands before its children, as it was served before them."""
    whole: dict[str, list[ItemDigest]] = {}
    for call in calls:
        before = whole.get(call.parent, [])[: call.skip] if call.parent else []
        whole[call.model_call_id] = [*before, *call.items]
    return whole


def _visible_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | Mapping))
    return "".join(part for part in parts if isinstance(part, str))


def _tool_digests(item: Mapping[str, Any]) -> list[ToolDigest]:
    calls: list[tuple[Any, Any, Any]] = []
    if item.get("type") == "function_call":
        calls.append((item.get("name"), item.get("arguments"), item.get("call_id") or item.get("id")))
    for call in item.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            calls.append((function.get("name"), function.get("arguments"), call.get("id")))
    content = item.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, Mapping) and block.get("type") == "tool_use":
            calls.append((block.get("name"), block.get("input"), block.get("id")))
    return [
        ToolDigest(str(name), _short(arguments), _short(_lenient(arguments)), _short(call_id))
        for name, arguments, call_id in calls
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
    if isinstance(arguments, Mapping):
        return {key: _same_numbers(value) for key, value in arguments.items()}
    return _same_numbers(arguments)


def _same_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _same_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_same_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    return sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]
