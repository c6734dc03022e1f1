"""Fingerprints: three dialects that say the same hash the same, and every change is seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import FingerprintError
from workbench.wire import assistant_fingerprint, conversation_digest
from workbench.wire.fingerprints import REQUEST_ENVELOPE_ROLE, canonical_arguments, request_envelope

CHAT = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "content": "let me see",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "3"},
]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "add"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "let me see"},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 2}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]},
]
RESPONSES = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
    {"type": "function_call", "call_id": "t1", "name": "add", "arguments": '{"a":1,"b":2}'},
    {"type": "function_call_output", "call_id": "t1", "output": "3"},
]


def test_the_dialects_share_one_assistant_fingerprint() -> None:
    assert assistant_fingerprint(CHAT) == assistant_fingerprint(MESSAGES) == assistant_fingerprint(RESPONSES) != ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((1, "content"), "let me sea"),
        ((1, "tool_calls", 0, "id"), "t2"),
        ((1, "tool_calls", 0, "function", "name"), "sub"),
        ((1, "tool_calls", 0, "function", "arguments"), '{"b": 3, "a": 1}'),
    ],
)
def test_what_the_model_said_changes_both_hashes(path: tuple[Any, ...], value: str) -> None:
    changed = with_change(CHAT, path, value)
    assert assistant_fingerprint(changed) != assistant_fingerprint(CHAT)
    assert conversation_digest(changed) != conversation_digest(CHAT)


@pytest.mark.parametrize(
    ("path", "value"),
    [((0, "content"), "sub"), ((0, "role"), "system"), ((2, "content"), "4"), ((2, "tool_call_id"), "t2")],
)
def test_what_others_said_changes_the_conversation_digest_only(path: tuple[Any, ...], value: str) -> None:
    changed = with_change(CHAT, path, value)
    assert assistant_fingerprint(changed) == assistant_fingerprint(CHAT)
    assert conversation_digest(changed) != conversation_digest(CHAT)


def with_change(items: list[Any], path: tuple[Any, ...], value: Any) -> list[Any]:
    if not path:
        return value
    copied = list(items) if isinstance(items, list) else dict(items)
    copied[path[0]] = with_change(copied[path[0]], path[1:], value)
    return copied


def test_reasoning_counts_in_the_conversation_only() -> None:
    reasoning = [CHAT[0], {"type": "reasoning", "summary": []}, *CHAT[1:]]
    assert assistant_fingerprint(reasoning) == assistant_fingerprint(CHAT)
    assert conversation_digest(reasoning) != conversation_digest(CHAT)


def test_an_authored_item_without_parts_is_still_authored() -> None:
    assert assistant_fingerprint([{"role": "assistant", "content": None}]) != ""
    assert assistant_fingerprint([{"role": "user", "content": "x"}]) == assistant_fingerprint([]) == ""
    assert assistant_fingerprint(None) == ""


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_text_never_moves_between_items_unseen(one: list[str], other: list[str]) -> None:
    def items(texts: list[str]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text} for text in texts]

    assert (conversation_digest(items(one)) == conversation_digest(items(other))) == (one == other)


@pytest.mark.parametrize(
    "item",
    [
        "text",
        None,
        ["x"],
        {"role": "assistant", "content": 3},
        {"role": "assistant", "content": {"text": "x"}},
        {"role": "assistant", "content": [3]},
        {"role": "assistant", "content": [{"no": "type"}]},
        {"role": "assistant", "content": [{"type": "image", "data": 2**70}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [3]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "content": "\ud800"},
        {"role": "assistant", "tool_calls": [{"id": "t", "function": {"name": "n", "arguments": {"a": b"x"}}}]},
    ],
)
def test_items_that_have_no_fingerprint_are_refused(item: Any) -> None:
    with pytest.raises(FingerprintError):
        assistant_fingerprint([item])
    with pytest.raises(FingerprintError):
        conversation_digest([item])


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (None, ""),
        ("", ""),
        ("  plain text ", "plain text"),
        ('{"b": 1, "a": "é"}', '{"a":"é","b":1}'),
        ({"b": 1, "a": [1, None]}, '{"a":[1,null],"b":1}'),
        ("3", "3"),
        ("{broken", "{broken"),
        ([], "[]"),
    ],
)
def test_arguments_are_compared_in_one_form(value: Any, canonical: str) -> None:
    assert canonical_arguments(value) == canonical


def test_the_request_envelope_makes_tools_part_of_the_conversation() -> None:
    assert request_envelope(None, None) is None
    assert request_envelope("", []) is None
    one = request_envelope("be brief", [{"type": "function", "name": "calc"}])
    assert one == {
        "role": REQUEST_ENVELOPE_ROLE,
        "content": '{"instructions": "be brief", "tools": [{"name": "calc", "type": "function"}]}',
    }
    other = request_envelope("be brief", [{"type": "function", "name": "other"}])
    assert conversation_digest([one]) != conversation_digest([other])
    assert assistant_fingerprint([one]) == ""
