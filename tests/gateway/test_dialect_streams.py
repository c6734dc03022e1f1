"""Responses and messages as events: put together they are the served object; odd events say nothing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from workbench.gateway.dialects import DIALECTS, MessagesDialect, ResponsesDialect
from workbench.gateway.refusals import Refused
from workbench.gateway.sse import Frame, encode, parse
from workbench.wire import assistant_fingerprint, conversation_digest

RESPONSES, MESSAGES = ResponsesDialect(), MessagesDialect()
USER = {"role": "user", "content": "go"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}


def frames(*events: dict[str, Any]) -> list[Frame]:
    return [parse(encode(event, event["type"])) for event in events]


def tool_use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def test_messages_events_become_the_message() -> None:
    start = {"id": "m1", "type": "message", "role": "assistant", "content": [], "model": "policy", "usage": {"a": 1}}
    came = frames(
        {"type": "message_start", "message": start},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "h"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "né"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": tool_use("t2")},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ":1}"}},
        {"type": "content_block_stop", "index": 2},
        {"type": "content_block_start", "index": 3, "content_block": tool_use("t3")},
        {"type": "content_block_stop", "index": 3},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"b": 2}},
        {"type": "message_stop"},
    )
    assembler = MESSAGES.assembler()
    for frame in came:
        assembler.feed(frame)
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "né"},
        tool_use("t2", a=1),
        tool_use("t3"),
    ]
    assert assembler.served() == {**start, "content": content, "usage": {"a": 1, "b": 2}, "stop_reason": "tool_use"}
    assert MESSAGES.response_items(assembler.served()) == [{"role": "assistant", "content": content}]
    assert [frame.event["type"] for frame in came if MESSAGES.is_final(frame)] == ["message_delta", "message_stop"]
    assert MESSAGES.is_error(parse(MESSAGES.error_frame(Refused(502, "no"))))


def test_responses_events_become_the_response() -> None:
    whole = {"id": "r1", "object": "response", "status": "completed", "output": [ANSWER], "error": None}
    came = frames(
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_item.done", "output_index": 0, "item": ANSWER},
        {"type": "response.completed", "response": whole},
    )
    assembler = RESPONSES.assembler()
    for frame in came:
        assembler.feed(frame)
    assert assembler.served() == whole
    assert [RESPONSES.is_final(frame) for frame in came] == [False, False, True]
    assert not any(RESPONSES.is_error(frame) for frame in came)
    for event in ({"type": "response.failed", "response": {}}, {"type": "error", "message": "no"}):
        assert RESPONSES.is_error(*frames(event))
    assert RESPONSES.is_error(parse(RESPONSES.error_frame(Refused(502, "no"))))


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("raw", [b"data: nonsense\n\n", b"data: 3\n\n", b"event: x\n\n", b'data: {"type": 3}\n\n'])
def test_odd_frames_say_nothing(dialect: Any, raw: bytes) -> None:
    frame = parse(raw)
    assembler = dialect.assembler()
    assembler.feed(frame)
    assert not dialect.is_final(frame)
    assert not dialect.is_error(frame)
    assert orjson.dumps(assembler.served())


def test_a_turn_of_reasoning_alone_is_the_models_and_no_root() -> None:
    asked = RESPONSES.request_items({"input": [USER]})
    said = RESPONSES.response_items({"output": [THOUGHT]})
    again = RESPONSES.request_items({"input": [USER, THOUGHT, USER]})
    assert assistant_fingerprint(again) == assistant_fingerprint([*asked, *said]) != ""
    assert conversation_digest(again) == conversation_digest([*asked, *said, USER])
    assert RESPONSES.response_items({"output": [THOUGHT, ANSWER]}) == [THOUGHT, ANSWER]
    assert RESPONSES.request_items({"input": [ANSWER, THOUGHT, USER]}) == [ANSWER, THOUGHT, USER]


def test_marks_and_billing_headers_are_no_part_of_the_history() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    rules = {"type": "text", "text": "be terse"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: one"}
    block = {"type": "text", "text": "go"}
    image = {"type": "image", "source": {"type": "url", "url": "u"}}
    plain = {"system": [rules], "tools": [tool], "messages": [{"role": "user", "content": [image, block]}]}
    marked = {
        "system": [billing, rules | mark],
        "tools": [tool | mark],
        "messages": [{"role": "user", "content": [image | mark, block | mark]}],
    }
    assert MESSAGES.request_items(plain) == MESSAGES.request_items(marked)
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": mark}]}
    assert MESSAGES.request_items({"messages": [called]}) == [called], "what the model wrote stays"


def test_a_system_message_between_turns_is_an_instruction() -> None:
    between = {"role": "system", "content": "from now on, rhyme"}
    before = MESSAGES.request_items({"system": "be terse", "messages": [USER]})
    after = MESSAGES.request_items({"system": "be terse", "messages": [USER, between]})
    assert (len(before), len(after)) == (2, 2)
    assert before[0] != after[0]
