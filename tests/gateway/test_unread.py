"""What a request says where no engine reads it is refused with its place; what an API allows passes."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Stack
from workbench.gateway.dialects import DIALECTS
from workbench.gateway.refusals import Refused

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = {"type": "text", "text": "hi"}
OUT = {"type": "output_text", "text": "hi", "annotations": []}


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **fields}]}


def body_of(path: str, item: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 9, "input" if path == RESPONSES else "messages": [USER, item], **fields}


UNREAD = [
    (CHAT, {"role": "user", "text": "hi"}, "Message 1 (user) has no text or list as its `content`", "role, text"),
    (CHAT, {"role": "user"}, "Message 1 (user) has no text", "the keys role"),
    (CHAT, {"role": "user", "content": None}, "Message 1 (user) has no text", "an empty text where it says nothing"),
    (CHAT, {"role": "system", "contents": "hi"}, "Message 1 (system) has no text", "contents"),
    (CHAT, {"role": "user", "content": TEXT}, "Message 1 (user) has no text or list", "dict there"),
    (CHAT, {"role": "User", "content": "hi"}, "Message 1 has the role 'User'; expected one of system,", "use user"),
    (CHAT, {"role": "human", "content": "hi"}, "Message 1 has the role 'human'", "use one of these"),
    (CHAT, {"content": "hi"}, "Message 1 has the role None", "expected one of"),
    (CHAT, {"role": "tool", "content": "21"}, "Message 1 (tool) has no `tool_call_id`", "the keys role, content"),
    (CHAT, {"role": "tool", "tool_call_id": "t1", "output": "21"}, "Message 1 (tool) has no text", "output"),
    (CHAT, {"role": "assistant", "text": "hi"}, "Message 1 (assistant) has no text", "role, text"),
    (CHAT, {"role": "assistant", "Content": "hi", "tool_calls": []}, "Message 1 (assistant) has no text", "Content"),
    (CHAT, {"role": "user", "content": [TEXT, {"type": "text", "content": "hi"}]}, "Part 1 of message 1", "`text`"),
    (RESPONSES, {"role": "user", "text": "hi"}, "Input item 1 (user) has no text", "role, text"),
    (RESPONSES, {"role": "User", "content": "hi"}, "Input item 1 has the role 'User'", "use user"),
    (RESPONSES, {"type": "function_call_output", "call_id": "t1", "content": "21"}, "Input item 1 (function", "output"),
    (RESPONSES, {"type": "function_call_output", "output": "21"}, "Input item 1 (function_call_output)", "`call_id`"),
    (RESPONSES, {"type": "function_call", "call_id": "t1", "name": "f"}, "Input item 1 (function_call)", "`arguments`"),
    (
        RESPONSES,
        {"role": "user", "content": [{"type": "input_text", "content": "hi"}]},
        "Part 0 of input item 1",
        "`te",
    ),
    (RESPONSES, {"role": "assistant", "content": [OUT, OUT]}, "Input item 1 (assistant) has 2 content parts", "join"),
    (RESPONSES, {"type": "reasoning", "id": "r", "summary": [], "text": "hm"}, "Input item 1 (reasoning)", "text"),
    (MESSAGES, {"role": "user", "text": "hi"}, "Message 1 (user) has no text", "role, text"),
    (MESSAGES, {"role": "tool", "content": "hi"}, "Message 1 has the role 'tool'", "user, assistant"),
    (
        MESSAGES,
        {"role": "user", "content": [{"type": "text", "content": "hi"}]},
        "Part 0 of message 1 (text)",
        "`text`",
    ),
    (MESSAGES, result(text="21"), "Part 0 of message 1 (tool_result) has no text or list as its `content`", "text"),
    (MESSAGES, result(tool_use_id=None, content="21"), "Part 0 of message 1 (tool_result)", "no `tool_use_id`"),
    (MESSAGES, result(content=[{"type": "text", "content": "21"}]), "Part 0 of the tool result in part 0", "`text`"),
    (MESSAGES, result(content=[{"type": "document"}]), "Part 0 of the tool result in part 0", "the engine leaves out"),
    (MESSAGES, {"role": "user", "content": [{"type": "image", "url": "u"}]}, "Part 0 of message 1 (image)", "`source`"),
    (
        MESSAGES,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "arguments": {}}]},
        "Part 0 of message 1 (tool_use) has no `input`",
        "arguments",
    ),
]

READ = [
    (CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    (CHAT, {"role": "assistant", "tool_calls": [CALL]}),
    (CHAT, {"role": "assistant", "content": ""}),
    (CHAT, {"role": "assistant", "content": None, "id": "m1", "parsed": None, "provider_specific_fields": {"a": 1}}),
    (CHAT, {"role": "assistant"}),
    (CHAT, {"role": "assistant", "content": None, "refusal": "no"}),
    (CHAT, {"role": "assistant", "content": None, "reasoning": "hm"}),
    (CHAT, {"role": "assistant", "reasoning_content": "hm", "text": ""}),
    (CHAT, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}),
    (CHAT, {"role": "function", "name": "f", "content": None}),
    (CHAT, {"role": "developer", "content": "be brief"}),
    (CHAT, {"role": "tool", "tool_call_id": "t1", "content": ""}),
    (CHAT, {"role": "tool", "tool_call_id": "t1", "content": [TEXT]}),
    (CHAT, {"role": "user", "content": [TEXT, "and", {"type": "text", "text": ""}], "name": "Ann", "text": "hi"}),
    (CHAT, {"role": "user", "content": []}),
    (CHAT, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
    (RESPONSES, {"role": "developer", "content": "be brief"}),
    (RESPONSES, {"role": "assistant", "content": ""}),
    (RESPONSES, {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [OUT]}),
    (RESPONSES, {"type": "function_call", "call_id": "t1", "name": "f", "arguments": ""}),
    (RESPONSES, {"type": "function_call_output", "call_id": "t1", "output": ""}),
    (RESPONSES, {"type": "reasoning", "id": "r", "summary": []}),
    (MESSAGES, result()),
    (MESSAGES, result(content=[TEXT, {"type": "image", "source": {"type": "url", "url": "u"}}], is_error=True)),
    (MESSAGES, {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}),
    (MESSAGES, {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}),
    (MESSAGES, {"role": "assistant", "content": []}),
    (MESSAGES, {"role": "system", "content": "be brief"}),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "item", "said", "came"), UNREAD)
async def test_what_no_engine_reads_is_refused_with_its_place_and_the_next_step(
    stack: Stack, path: str, item: Any, said: str, came: str
) -> None:
    answer = await stack.http.post(f"{stack.url}/ng-rollout/unread.1{path}", json=body_of(path, item))
    error = answer.json()["error"]
    param = "input" if path == RESPONSES else "messages"
    assert (answer.status_code, error["code"], error["param"]) == (400, "content_not_read", param)
    assert error["message"].startswith(said) and came in error["message"] and " Next: " in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not stack.gateway.custodian.store.manifest("unread.1").records


@pytest.mark.asyncio(loop_scope="module")
async def test_a_system_prompt_that_no_engine_reads_is_refused(stack: Stack) -> None:
    body = body_of(MESSAGES, USER, system=[{"type": "text", "content": "be brief"}])
    answer = await stack.http.post(f"{stack.url}/ng-rollout/unread.2{MESSAGES}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "system")


@pytest.mark.parametrize(("path", "item"), READ)
def test_what_an_api_allows_passes(path: str, item: Any) -> None:
    DIALECTS[path].check(body_of(path, item))


def test_a_named_place_is_that_of_the_request_as_the_agent_sent_it() -> None:
    body = {"input": [{"role": "user", "text": "hi"}], "previous_response_id": "resp_1"}
    with pytest.raises(Refused, match="Input item 0"):
        DIALECTS[RESPONSES].check(body)


def test_a_request_full_of_keys_is_not_quoted_in_whole() -> None:
    with pytest.raises(Refused) as refused:
        DIALECTS[CHAT].check({"messages": [{"role": "user", **{"k" * 99 + str(n): "v" for n in range(99)}}]})
    assert "and 92 more" in refused.value.message and len(refused.value.message) < 500
