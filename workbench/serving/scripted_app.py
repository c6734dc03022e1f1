"""Scripted app: the chat-completions dialect in front of the scripted engine, streaming and not.

Same routes and shapes as vLLM's serving app for what a campaign uses: `POST /v1/chat/completions`, `GET /v1/models`,
`GET /health`; `begin` starts a generation for other dialects too. Text in the form
`<tool_call>{"name": …, "arguments": {…}}</tool_call>` becomes a tool call when the request has tools. Token ids and
log-probs appear in a response only where the request asks for them, as vLLM's do.
Not here: the other dialects (scripted_dialects).
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from workbench.errors import CallRefused, SetupError
from workbench.serving.scripted import ChatParams, Script, ScriptedParams
from workbench.wire.headers import ROLLOUT_HEADER

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
        begun = await self.begin(request, body, dict)
        if isinstance(begun, Response):
            return begun
        outputs, prompt_tokens = begun
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            frames = self._frames(outputs, head, prompt_tokens, body, usage)
            return StreamingResponse(frames, media_type="text/event-stream")
        whole = asyncio.create_task(self._whole(outputs, head, prompt_tokens, body))
        left = asyncio.create_task(_disconnected(request))
        await asyncio.wait([whole, left], return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if whole.done():
            return whole.result()
        whole.cancel()
        return Response(status_code=499)

    async def begin(
        self, request: Request, asked: dict[str, Any], as_chat: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> tuple[Any, int] | Response:
        """Start the generation that a request asks for: its outputs and the prompt's length, or a refusal.

        `as_chat` gives the chat body that says the same. A request that it, or the template, cannot make sense of is
        refused, as a serving app does that validates.
        """
        try:
            return await self._begin(request, as_chat(asked))
        except SetupError as error:  # the script's fault, and not the request's
            return _refuse(500, str(error))
        except (LookupError, TypeError, ValueError, AttributeError, TemplateError) as error:
            return _refuse(400, f"The request cannot be read: {type(error).__name__}: {error}")

    async def _begin(self, request: Request, body: dict[str, Any]) -> tuple[Any, int] | Response:
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

    async def _whole(self, outputs: Any, head: dict[str, Any], prompt_tokens: int, body: dict[str, Any]) -> Response:
        text, count, finish, stop = "", 0, None, None
        echo = _Echo(body)
        try:
            async for output in outputs:
                echo.take(output)
                for part in output.outputs:
                    text += part.text
                    count += len(part.token_ids or ())
                    finish, stop = part.finish_reason or finish, part.stop_reason
        except RuntimeError as error:
            return _refuse(500, str(error))
        message, called = message_of(text, bool(body.get("tools")))
        choice = {
            "index": 0,
            "message": message,
            **echo.choice(),
            "finish_reason": "tool_calls" if called else finish,
            "stop_reason": stop,
        }
        usage = _usage(prompt_tokens, count)
        return JSONResponse(head | echo.head() | {"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _frames(
        self, outputs: Any, head: dict[str, Any], prompt_tokens: int, body: dict[str, Any], usage: bool
    ) -> AsyncIterator[bytes]:
        head, tools = head | {"object": "chat.completion.chunk"}, bool(body.get("tools"))
        echo = _Echo(body)
        opened = False
        text, count = "", 0
        try:
            async for output in outputs:
                echo.take(output)
                if not opened:
                    opened = True
                    yield _frame(head | echo.head(), {"role": "assistant", "content": ""}, {})
                part = output.outputs[0]
                text += part.text
                count += len(part.token_ids or ())
                if part.finish_reason is None:
                    # With tools the text may turn out to be a call, so it is kept until the end.
                    if (part.text and not tools) or echo.asked:
                        yield _frame(head, {"content": "" if tools else part.text}, echo.choice())
                    continue
                message, called = message_of(text, tools)
                calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls") or ())]
                delta: dict[str, Any] = {"tool_calls": calls} if calls else {"content": text if tools else part.text}
                if calls and message["content"]:
                    delta["content"] = message["content"]
                yield _frame(
                    head, delta, echo.choice(), "tool_calls" if called else part.finish_reason, part.stop_reason
                )
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
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return


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


class _Echo:
    """Ids and log-probs of a response, where the request asks for them; `choice` gives what is new since the last."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._ids = bool(body.get("return_token_ids"))
        self._logprobs = bool(body.get("logprobs"))
        self._prompt: list[int] | None = None
        self._new_ids: list[int] = []
        self._new_steps: list[dict[int, Any]] = []

    @property
    def asked(self) -> bool:
        return self._ids or self._logprobs

    def take(self, output: Any) -> None:
        self._prompt = output.prompt_token_ids
        for part in output.outputs:
            self._new_ids += part.token_ids or ()
            self._new_steps += part.logprobs or ()

    def head(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self._ids else {}

    def choice(self) -> dict[str, Any]:
        ids, self._new_ids = self._new_ids, []
        steps, self._new_steps = self._new_steps, []
        content = [
            {"token": f"token_id:{token}", "logprob": step.logprob, "bytes": None, "top_logprobs": []}
            for choices in steps
            for token, step in choices.items()
        ]
        logprobs = {"content": content} if self._logprobs else None
        return {"logprobs": logprobs} | ({"token_ids": ids} if self._ids else {})


def _frame(
    head: dict[str, Any],
    delta: dict[str, Any],
    echoed: dict[str, Any],
    finish: str | None = None,
    stop: int | str | None = None,
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, **echoed, "finish_reason": finish}
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
