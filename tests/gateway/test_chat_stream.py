"""A streamed chat completion, cut anywhere on its way, is the same object and the same bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from workbench.gateway.dialects import ChatDialect
from workbench.gateway.sse import Frame, frames


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    body = {"id": "chatcmpl-7", "model": "policy", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + orjson.dumps(body) + b"\n\n"


STREAM = b"".join(
    [
        chunk({"role": "assistant", "content": ""}),
        b": keep-alive\n\n",
        chunk({"reasoning": "hm"}),
        chunk({"content": "né 🤖"}),
        chunk({"tool_calls": [{"index": 0, "id": "t1", "function": {"name": "search", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "t2", "function": {"name": "open", "arguments": "{}"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        chunk({"content": "!"}, "tool_calls"),
        b'data: {"id": "chatcmpl-7", "choices": [], "usage": {"completion_tokens": 9}}\n\n',
        b"data: [DONE]\n\n",
    ]
)


async def cut(stream: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


async def collect(stream: bytes, size: int) -> list[Frame]:
    return [frame async for frame in frames(cut(stream, size))]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_frames_keep_every_byte_and_say_the_same(size: int, newline: bytes) -> None:
    stream = STREAM.replace(b"\n", newline)
    came = await collect(stream, size)
    assert b"".join(frame.raw for frame in came) == stream
    dialect, assembler = ChatDialect(), ChatDialect().assembler()
    for frame in came:
        assembler.feed(frame)
    served = assembler.served()
    assert served["id"] == "chatcmpl-7"
    assert served["usage"] == {"completion_tokens": 9}
    assert served["choices"][0]["finish_reason"] == "tool_calls"
    assert dialect.response_items(served) == [
        {
            "role": "assistant",
            "content": "né 🤖!",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "search", "arguments": '{"a":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "open", "arguments": "{}"}},
            ],
        }
    ]
    final = [position for position, frame in enumerate(came) if dialect.is_final(frame)]
    assert final == [8, 10]


async def test_a_frame_that_was_cut_off_is_no_frame() -> None:
    assert len(await collect(STREAM[:-1], 64)) == 10


@pytest.mark.parametrize("raw", [b"data: nonsense\n\n", b"data: 3\n\n", b"event: x\n\n", b'data: {"choices": 3}\n\n'])
async def test_odd_frames_pass_and_say_nothing(raw: bytes) -> None:
    (frame,) = await collect(raw, 64)
    dialect = ChatDialect()
    assembler = dialect.assembler()
    assembler.feed(frame)
    assert not dialect.is_final(frame)
    assert assembler.served()["choices"][0]["message"] == {"role": "assistant", "content": None}
