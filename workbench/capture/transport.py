"""Transport: how an admission reaches the engine and how the coordinates get back, over the worker's own HTTP port.

    gateway ── POST …, x-workbench-rollout, x-workbench-admission ──▶ CaptureGate ──▶ the serving app ──▶ engine wrapper
    gateway ◀── x-workbench-captured: {"coords": …, "failure": …, "staged_s": …} ──┴── on an answer that is sent whole
    gateway ── GET /workbench/capture/<call id> ──▶ CallBoard ──▶ the same: for a stream, and after a crash

The gate is ASGI middleware behind the worker's door: it refuses what capture cannot record exactly, and puts a
`TaggedCall` into a context variable that the renderer hook and the engine wrapper read. A request without the rollout
header is untagged: it passes and nothing is recorded. Token ids never travel here, in either direction.
Not here: what a staged call is (core), where its prompt comes from (splice), how ids are collected (engine).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from workbench.errors import CallRefused, WireError
from workbench.serving.door import App, Receive, Scope, Send, header_map, is_tagged, refuse, send_json
from workbench.serving.sampling import said_in
from workbench.wire import CaptureAdmission, Cause, CommitCoords
from workbench.wire.headers import ADMISSION_HEADER, CAPTURED_HEADER, ROLLOUT_HEADER


def decode_admission(header: str) -> CaptureAdmission:
    """Read the admission header. Raises `WireError` when it is not the header form of a valid admission."""
    try:
        return CaptureAdmission.from_header(header)
    except (WireError, ValidationError) as error:
        raise WireError(f"Header {ADMISSION_HEADER} is not an encoded admission: {error}") from error


@dataclass(eq=False)
class TaggedCall:
    """One admitted request on its way through the worker. Written by the renderer hook and the engine wrapper."""

    admission: CaptureAdmission
    said: bytes = b""
    """What stands for the conversation of its request (`serving.sampling.said_in`)."""
    prefix_token_ids: np.ndarray | None = None
    """The parent's cumulative ids, uint32[prev_len]; None for a root, or while they could not be had."""
    failure: tuple[Cause, str] | None = None
    """Why this call cannot be captured although the agent is served; None while it still can."""
    taken: bool = False
    """Whether the engine wrapper has accepted a generation under this admission; one admission is one generation."""
    recorded: bool = False
    """Whether a recording of that generation was begun; it then settles or closes the call itself."""
    abandoned: bool = False
    """Whether the reader of the outputs is gone."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


LONGEST_HEADER = 8_192
"""Bytes. Coordinates have about 800; what is longer is asked for."""

current_call: ContextVar[TaggedCall | None] = ContextVar("workbench_tagged_call", default=None)


class CallBoard:
    """Calls in flight and the coordinates of recent ones, by model call id. Bounded: the oldest answers go first."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._live: dict[str, TaggedCall] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @property
    def live_calls(self) -> int:
        return len(self._live)

    def open(self, admission: CaptureAdmission, said: bytes = b"") -> TaggedCall:
        """Register an admitted request; `said` as in `TaggedCall`. Raises `CallRefused` for an id that came before."""
        call_id = admission.model_call_id
        if call_id in self._live or call_id in self._answers:
            raise CallRefused(
                f"Call {admission.rollout_id}/{call_id} was admitted before; expected a new call id for every request."
            )
        call = self._live[call_id] = TaggedCall(admission, said)
        return call

    def settle(self, call: TaggedCall, coords: CommitCoords, failure: tuple[Cause, str] | None, **facts: Any) -> None:
        """Publish how the capture ended; whoever waits in `answer` goes on.

        `facts` are token-free: `staged_s`, seconds that staging took, `sampled_tokens`, `finish_reason`.
        """
        call_id = call.admission.model_call_id
        cause = None if failure is None else {"cause": str(failure[0]), "detail": failure[1]}
        self._answers[call_id] = {"coords": coords.model_dump(mode="json"), "failure": cause, **facts}
        while len(self._answers) > self._capacity:
            self._answers.popitem(last=False)
        self.close(call)

    def close(self, call: TaggedCall) -> None:
        """Forget a call in flight: it was settled, or it never reached the engine and so has no coordinates."""
        self._live.pop(call.admission.model_call_id, None)
        call.settled.set()

    def facts(self, call_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Sampled tokens and finish reason of those of the calls that were captured and are still remembered."""
        names = ("sampled_tokens", "finish_reason")
        answers = ((call_id, self._answers.get(call_id, {})) for call_id in call_ids)
        return {i: {name: answer[name] for name in names} for i, answer in answers if "sampled_tokens" in answer}

    def known(self, call_id: str) -> dict[str, Any] | None:
        """The coordinates message of a call that was settled and is still remembered."""
        return self._answers.get(call_id)

    async def answer(self, call_id: str, timeout_s: float) -> dict[str, Any] | None:
        """The coordinates message of a call, waiting up to `timeout_s` while it runs; None when there is none."""
        live = self._live.get(call_id)
        if live is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await live.settled.wait()
            except TimeoutError:
                return None
        return self.known(call_id)


class CaptureGate:
    """ASGI middleware in front of the worker's serving app. See the module's head for what it does."""

    def __init__(self, app: App, board: CallBoard, *, answer_timeout_s: float = 15.0) -> None:
        self._app = app
        self._board = board
        self._answer_timeout_s = answer_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if path.startswith("/workbench/capture/"):
            await self._coordinates(path.rsplit("/", 1)[1], send)
        elif is_tagged(scope):
            await self._tagged(header_map(scope), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _coordinates(self, call_id: str, send: Send) -> None:
        answer = await self._board.answer(call_id, self._answer_timeout_s)
        if answer is None:
            await refuse(send, 404, f"This worker has no coordinates for call {call_id}.")
        else:
            await send_json(send, 200, answer)

    async def _tagged(self, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call, body = await self._admit(headers, receive)
        except (CallRefused, WireError) as error:
            await refuse(send, 400, str(error))
            return
        context = current_call.set(call)
        try:
            await self._app(scope, _replay(body, receive), self._telling(call.admission.model_call_id, send))
        finally:
            current_call.reset(context)
            if not call.recorded:
                self._board.close(call)

    def _telling(self, call_id: str, send: Send) -> Send:
        """`send`, which tells the gateway in the same breath how the capture ended: that saves it an exchange."""

        async def telling(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and (answer := self._board.known(call_id)) is not None:
                # The detail of a failure is free text; a header is ASCII on one line, and not without end.
                told = json.dumps(answer, separators=(",", ":")).encode("ascii")
                if len(told) <= LONGEST_HEADER:
                    message["headers"] = [*message.get("headers", ()), (CAPTURED_HEADER.encode(), told)]
            await send(message)

        return telling

    async def _admit(self, headers: dict[bytes, bytes], receive: Receive) -> tuple[TaggedCall, bytes]:
        encoded = headers.get(ADMISSION_HEADER.encode())
        rollout_id = headers.get(ROLLOUT_HEADER.encode(), b"").decode("latin-1")
        if encoded is None:
            raise CallRefused(f"A request of rollout {rollout_id!r} came without the header {ADMISSION_HEADER}.")
        admission = decode_admission(encoded.decode("latin-1"))
        if admission.rollout_id != rollout_id:
            raise CallRefused(
                f"Header {ROLLOUT_HEADER} says {rollout_id!r}, the admission says {admission.rollout_id!r}."
            )
        body = await _read_body(receive)
        return self._board.open(admission, said_in(read_capturable(body))), body


def read_capturable(body: bytes) -> dict[str, Any]:
    """The request in `body`. Raises `CallRefused` where its generation cannot be recorded exactly, naming the field.

    Also refused are fields that would put token ids or log-probs into the HTTP response.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CallRefused(f"A tagged request needs a JSON body: {error}") from error
    if not isinstance(request, dict):
        raise CallRefused("A tagged request needs a JSON object as its body.")
    for name in ("n", "best_of"):
        if (request.get(name) or 1) != 1:
            raise CallRefused(f"{name}={request[name]!r} cannot be captured; expected one completion a call.")
    for name in _REFUSED_WHEN_TRUE:
        if request.get(name):
            raise CallRefused(f"{name!r} cannot be used on a captured call; leave it out.")
    if request.get("add_generation_prompt") is False:
        raise CallRefused("add_generation_prompt=false cannot be used on a captured call; leave it out.")
    if request.get("prompt_logprobs") is not None:
        raise CallRefused("'prompt_logprobs' cannot be used on a captured call; leave it out.")
    include = request.get("include")
    if isinstance(include, list) and any("logprobs" in str(item) for item in include):
        raise CallRefused("'include' asks for log-probs, which a captured call does not send; leave it out.")
    return request


_REFUSED_WHEN_TRUE = (
    "use_beam_search",
    "echo",
    "continue_final_message",
    "background",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "kv_transfer_params",
)


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallRefused("The client left before its request body was complete.")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the app the body once, then the connection's own messages, so that it still sees a disconnect."""
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
