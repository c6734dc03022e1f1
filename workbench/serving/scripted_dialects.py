"""Scripted dialects: `POST /v1/responses` and `POST /v1/messages` in front of the scripted engine.

    request ─▶ the chat request that says the same ─▶ ScriptedApp.begin ─▶ outputs ─▶ items or blocks
Same shapes as vLLM's serving app for what clients need: text, tool calls, streaming, a cut answer. Requests are taken
as the gateway lets them through. Not here: reasoning, images, stored responses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from workbench.serving.scripted_app import SAMPLING_FIELDS, ScriptedApp, message_of

Body = dict[str, Any]


class ScriptedDialects:
    """The two routes over one chat server."""

    def __init__(self, chat: ScriptedApp) -> None:
        self._chat = chat

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
        ]

    async def _responses(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        begun = await self._chat.begin(request, body, chat_of_responses)
        if isinstance(begun, Response):
            return begun
        answer = _Responses(self._chat.model, *begun, tools=bool(body.get("tools")))
        if body.get("stream"):
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        async for _ in answer.deltas():
            pass
        lost = body.get("tool_choice") == "required" and answer.finish == "length"
        # As vLLM does with a required call that was cut: its parser cannot read it, and nothing else is put out.
        return JSONResponse(answer.response([] if lost else answer.items()))

    async def _messages(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        begun = await self._chat.begin(request, body, chat_of_messages)
        if isinstance(begun, Response):
            refused = orjson.loads(bytes(begun.body))["error"]
            error = {"type": refused["type"], "message": refused["message"]}
            return JSONResponse({"type": "error", "error": error}, begun.status_code)
        answer = _Messages(self._chat.model, *begun, tools=bool(body.get("tools")))
        if body.get("stream"):
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        async for _ in answer.deltas():
            pass
        return JSONResponse(answer.message(answer.blocks()))


def chat_of_responses(body: Body) -> Body:
    """The chat request that a Responses request amounts to."""
    messages: list[Body] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = _call(item["call_id"], item["name"], item["arguments"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
    tools = [{"type": "function", "function": _without(tool, "type")} for tool in body.get("tools") or ()]
    return _chat_body(body, messages, tools, body.get("max_output_tokens"), body.get("stop"))


def chat_of_messages(body: Body) -> Body:
    """The chat request that a Messages request amounts to."""
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = _text(blocks)
        calls = [
            _call(b["id"], b["name"], orjson.dumps(b["input"]).decode()) for b in blocks if b["type"] == "tool_use"
        ]
        for block in blocks:
            if block["type"] == "tool_result":
                result = _text(block.get("content") or "")
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        if said or message["role"] == "assistant":
            messages.append({"role": message["role"], "content": said} | ({"tool_calls": calls} if calls else {}))
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in body.get("tools") or ()
    ]
    return _chat_body(body, messages, tools, body["max_tokens"], body.get("stop_sequences"))


class _Answer:
    """What both dialects do with outputs: gather the text, and how it ended."""

    def __init__(self, model: str, outputs: Any, prompt_tokens: int, *, tools: bool) -> None:
        self.model = model
        self.tools = tools
        self.text, self.finish, self.stop = "", "stop", None
        self.usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        self._outputs = outputs

    async def deltas(self) -> AsyncIterator[str]:
        """The text as it comes; with tools nothing, for it may turn out to be a call."""
        async for output in self._outputs:
            (part,) = output.outputs
            self.text += part.text
            self.usage["output_tokens"] += len(part.token_ids or ())
            if part.finish_reason is not None:
                self.finish, self.stop = part.finish_reason, part.stop_reason
            if part.text and not self.tools:
                yield part.text

    def said(self) -> tuple[str, list[Body]]:
        """Text and tool calls of the whole answer."""
        message, _ = message_of(self.text, self.tools)
        return message["content"] or "", message.get("tool_calls") or []


class _Responses(_Answer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._id, self._message_id, self._created = _id("resp"), _id("msg"), time.time()
        self._number = 0

    def items(self) -> list[Body]:
        text, calls = self.said()
        items: list[Body] = []
        if text:
            part: Body = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
            items.append(
                {
                    "id": self._message_id,
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        for call in calls:
            head = {"id": _id("fc"), "type": "function_call", "status": "completed", "call_id": call["id"]}
            items.append(head | call["function"])
        return items

    def response(self, items: list[Body] | None) -> Body:
        """The response object; None while it is being made."""
        cut = self.finish == "length"
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self.model,
            "status": "in_progress" if items is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if items is not None and cut else None,
            "error": None,
            "output": items or [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if items is None else self.usage | details | {"total_tokens": sum(self.usage.values())},
        }

    async def events(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self.response(None))
        yield self._event("response.in_progress", response=self.response(None))
        opened = False
        async for delta in self.deltas():
            if not opened:
                for event in self._open():
                    yield event
                opened = True
            yield self._event("response.output_text.delta", **self._at(), delta=delta, logprobs=[])
        items = self.items()
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                yield self._event("response.output_item.added", output_index=index, item=item | {"arguments": ""})
                at = {"output_index": index, "item_id": item["id"]}
                yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **at, **done)
            else:
                for event in () if opened else self._open():
                    yield event
                text = item["content"][0]["text"]
                if not opened:
                    yield self._event("response.output_text.delta", **self._at(), delta=text, logprobs=[])
                yield self._event("response.output_text.done", **self._at(), text=text, logprobs=[])
                yield self._event("response.content_part.done", **self._at(), part=item["content"][0])
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event("response.completed", response=self.response(items))

    def _open(self) -> list[bytes]:
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._at(), part=part),
        ]

    def _at(self) -> Body:
        return {"output_index": 0, "content_index": 0, "item_id": self._message_id}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _frame({"type": kind, "sequence_number": self._number - 1} | fields)


class _Messages(_Answer):
    def blocks(self) -> list[Body]:
        text, calls = self.said()
        used = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": orjson.loads(call["function"]["arguments"]),
            }
            for call in calls
        ]
        return [{"type": "text", "text": text}, *used] if text or not used else used

    def message(self, blocks: list[Body] | None) -> Body:
        """The message object; None while it is being made."""
        whole = {"id": _id("chatcmpl"), "type": "message", "role": "assistant", "model": self.model}
        reason = None if blocks is None else self._stop_reason(blocks)
        return whole | {"content": blocks or [], "stop_reason": reason, "stop_sequence": None, "usage": self.usage}

    def _stop_reason(self, blocks: list[Body]) -> str:
        if self.finish == "length":
            return "max_tokens"
        if blocks[-1]["type"] == "tool_use":
            return "tool_use"
        return "stop_sequence" if isinstance(self.stop, str) else "end_turn"

    async def events(self) -> AsyncIterator[bytes]:
        yield _frame({"type": "message_start", "message": self.message(None)})
        index, opened = 0, False
        async for delta in self.deltas():
            if not opened:
                yield self._start(0, {"type": "text", "text": ""})
                opened = True
            yield self._delta(0, {"type": "text_delta", "text": delta})
        blocks = self.blocks() if self.text else []
        for index, block in enumerate(blocks):
            if block["type"] == "tool_use":
                yield self._start(index, block | {"input": {}})
                spelled = orjson.dumps(block["input"]).decode()
                for part in (spelled[:5], spelled[5:]):
                    yield self._delta(index, {"type": "input_json_delta", "partial_json": part})
            elif not opened:
                yield self._start(index, {"type": "text", "text": ""})
                yield self._delta(index, {"type": "text_delta", "text": block["text"]})
            yield _frame({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": self._stop_reason(blocks or [{"type": "text"}]), "stop_sequence": None}
        yield _frame({"type": "message_delta", "delta": ended, "usage": self.usage})
        yield _frame({"type": "message_stop"})

    def _start(self, index: int, block: Body) -> bytes:
        return _frame({"type": "content_block_start", "index": index, "content_block": block})

    def _delta(self, index: int, delta: Body) -> bytes:
        return _frame({"type": "content_block_delta", "index": index, "delta": delta})


def _chat_body(body: Body, messages: list[Body], tools: list[Body], most: int | None, stop: Any) -> Body:
    sampling = {name: body[name] for name in SAMPLING_FIELDS if name in body}
    limits = {"max_tokens": most, "stop": stop}
    return {"model": body.get("model"), "messages": messages, "tools": tools or None} | sampling | limits


def _call(call_id: str, name: str, arguments: str) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _without(value: Body, name: str) -> Body:
    return {key: inner for key, inner in value.items() if key != name}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _frame(event: Body) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n"
