"""Scripted app: the chat-completions dialect in front of the scripted engine, streaming and not.

Same routes and shapes as vLLM's serving app for what a campaign uses: `POST /v1/chat/completions`, `GET /v1/models`,
`GET /health`; `begin` starts a generation for other dialects too. Text in the form
`<tool_call>{"name": …, "arguments": {…}}</tool_call>` becomes a tool call when the request has tools. Token ids and
log-probs never appear in a response. Not here: the other dialects (scripted_dialects).
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from workbench.errors import CallRefused
from workbench.serving.door import ROLLOUT_HEADER
from workbench.serving.scripted import ChatParams, Script, ScriptedParams

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ScriptedApp:
    """Holds what the routes need. `engine` is the scripted engine, wrapped or not."""

    def __init__(self, engine: Any, script: Script, served_model_name: str, max_model_len: int) -> None:
        self._engine = engine
        self._script = script
        self.model = served_model_name
        self._max_model_len = max_model_len
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _models(self, _: Request) -> Response:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "workbench"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self._max_model_len}]})

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        begun = await self.begin(request, body)
        if isinstance(begun, Response):
            return begun
        outputs, prompt_tokens = begun
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            frames = self._frames(outputs, head, prompt_tokens, bool(body.get("tools")), usage)
            return StreamingResponse(frames, media_type="text/event-stream")
        whole = asyncio.create_task(self._whole(outputs, head, prompt_tokens, bool(body.get("tools"))))
        left = asyncio.create_task(_disconnected(request))
        await asyncio.wait([whole, left], return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if whole.done():
            return whole.result()
        whole.cancel()
        return Response(status_code=499)

    async def begin(self, request: Request, body: dict[str, Any]) -> tuple[Any, int] | Response:
        """Start the generation that a chat body asks for: its outputs and the prompt's length, or a refusal."""
        if body.get("model") not in (None, self.model):
            return _refuse(404, f"The model {body['model']!r} does not exist; this worker serves {self.model!r}.")
        messages = body["messages"]
        params = ChatParams({"tools": body.get("tools"), **(body.get("chat_template_kwargs") or {})})
        prompt_ids = await self._engine.renderer.prompt_ids(messages, params)
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            return _refuse(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt contains "
                f"{len(prompt_ids)} input tokens.",
            )
        line = self._script.reply(request.headers.get(ROLLOUT_HEADER, ""), messages)
        sampling = self._sampling(body, line, room)
        try:
            outputs = self._engine.generate({"prompt_token_ids": prompt_ids}, sampling, f"chatcmpl-{uuid.uuid4().hex}")
        except CallRefused as error:
            return _refuse(400, str(error))
        return outputs, len(prompt_ids)

    def _sampling(self, body: dict[str, Any], line: Any, room: int) -> ScriptedParams:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        stop = body.get("stop") or ()
        settings = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return ScriptedParams(line=line, max_tokens=min(asked, room), stop=stops, **settings)

    async def _whole(self, outputs: Any, head: dict[str, Any], prompt_tokens: int, tools: bool) -> Response:
        text, count, finish, stop = "", 0, None, None
        try:
            async for output in outputs:
                for part in output.outputs:
                    text += part.text
                    count += len(part.token_ids or ())
                    finish, stop = part.finish_reason or finish, part.stop_reason
        except RuntimeError as error:
            return _refuse(500, str(error))
        message, called = message_of(text, tools)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if called else finish,
            "stop_reason": stop,
        }
        usage = _usage(prompt_tokens, count)
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _frames(
        self, outputs: Any, head: dict[str, Any], prompt_tokens: int, tools: bool, usage: bool
    ) -> AsyncIterator[bytes]:
        head = head | {"object": "chat.completion.chunk"}
        yield _frame(head, {"role": "assistant", "content": ""})
        text, count = "", 0
        try:
            async for output in outputs:
                part = output.outputs[0]
                text += part.text
                count += len(part.token_ids or ())
                if part.finish_reason is None:
                    # With tools the text may turn out to be a call, so it is kept until the end.
                    if part.text and not tools:
                        yield _frame(head, {"content": part.text})
                    continue
                message, called = message_of(text, tools)
                calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls") or ())]
                delta: dict[str, Any] = {"tool_calls": calls} if calls else {"content": text if tools else part.text}
                if calls and message["content"]:
                    delta["content"] = message["content"]
                yield _frame(head, delta, "tool_calls" if called else part.finish_reason, part.stop_reason)
        except RuntimeError as error:
            yield b"data: " + orjson.dumps({"error": {"message": str(error), "type": "InternalServerError"}}) + b"\n\n"
        if usage:
            yield b"data: " + orjson.dumps(head | {"choices": [], "usage": _usage(prompt_tokens, count)}) + b"\n\n"
        yield b"data: [DONE]\n\n"


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def message_of(text: str, tools: bool) -> tuple[dict[str, Any], bool]:
    found = [orjson.loads(match) for match in _TOOL_CALL.findall(text)] if tools else []
    if not found:
        return {"role": "assistant", "content": text}, False
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call["name"], "arguments": orjson.dumps(call.get("arguments", {})).decode()},
        }
        for call in found
    ]
    content = text[: text.index("<tool_call>")].strip() or None
    return {"role": "assistant", "content": content, "tool_calls": calls}, True


def _frame(
    head: dict[str, Any], delta: dict[str, Any], finish: str | None = None, stop: int | str | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = stop
    return b"data: " + orjson.dumps(head | {"choices": [choice]}) + b"\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _refuse(status: int, message: str) -> Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    error = {"message": message, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
