"""Refusals: what the gateway answers instead of a completion; each API's clients read it in a form of their own.

Every refusal names what was expected and what came, and has a `code` that programs can tell apart.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from workbench.errors import LedgerCorrupt, LedgerError, RolloutFrozen, WireError

log = logging.getLogger(__name__)

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

# How vLLM puts "the prompt does not fit", in whole: its error is a plain bad request, as that for a request that cannot
# be read is, whose words quote what an agent wrote. A `max_tokens` beyond the window is the agent's mistake, too.
_WINDOW_IS_FULL = re.compile(
    r"This model's maximum context length is \d+ tokens\. However, your prompt contains "
    r"|Input length \(\d+\) exceeds model's maximum context length \(\d+\)"
    r"|The (?:decoder|encoder) prompt \(length \d+\) .{0,80}longer than the maximum model length of \d+"
    r"|The engine prompt length \d+ exceeds the max_model_len \d+"
    # Of a prompt that leaves no room at all; a request that asks for none itself is refused before (pins).
    r"|max_tokens must be at least 1, got 0\b"
)
_NEXT_OF_A_FULL_WINDOW = (
    "Next: end the conversation here and keep what it has (a rollout trains on it), or begin another one that is "
    "shorter; the window is as long as the recipe's model.max_model_len says."
)


@dataclass
class Refused(Exception):
    """The request is answered with `status` and this message; nothing is (or was) generated for it."""

    status: int
    message: str
    code: str = "invalid_request"
    param: str | None = None

    def __str__(self) -> str:
        return self.message

    def openai_error(self) -> dict[str, Any]:
        """The form of the OpenAI APIs, which the gateway's own routes use too."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, error: dict[str, Any] | None = None) -> Response:
        """As an HTTP answer; `error` is its form in another API."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        body = orjson.dumps(self.openai_error() if error is None else error)
        return Response(body, self.status, headers, media_type="application/json")


def refusal_of(error: Exception) -> Refused:
    """What a client is told of an error. A fault of our own is logged with its traceback and told without one."""
    match error:
        case Refused():
            return error
        case RolloutFrozen():
            return Refused(409, str(error), "rollout_frozen")
        case WireError():
            return Refused(400, str(error))
        case RecursionError() | orjson.JSONEncodeError():
            # Anything that JSON can say was read from a request; written again can only be what is not too deep.
            return Refused(400, "The request body is nested too deeply.", "nested_too_deeply")
        case aiohttp.ClientError():  # before OSError, which some of them are as well
            return Refused(502, f"The policy worker did not answer ({type(error).__name__}).", "worker_unreachable")
        case LedgerCorrupt():
            return Refused(500, str(error), "ledger_corrupt")
        case LedgerError() | OSError():
            return Refused(500, f"The ledger could not be read or written: {error}", "ledger_error")
        case ClientDisconnect():
            return Refused(499, "The client left before its request was complete.", "client_left")
        case HTTPException():
            return Refused(error.status_code, f"{error.detail}.", f"http_{error.status_code}")
        case _:
            log.error("the gateway failed in a request", exc_info=error)
            return Refused(500, f"The gateway failed ({type(error).__name__}).", "gateway_fault")


def stopping() -> Refused:
    """What every request is told from the moment on that its gateway ends."""
    return Refused(503, "The gateway is stopping.", "gateway_stopping")


def from_worker(status: int, body: bytes) -> Refused:
    """What the agent is told when the worker refused: its own words, with a code and a next step where the window
    is full."""
    try:
        answer = orjson.loads(body)
        error = answer.get("error", answer)
        message = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (orjson.JSONDecodeError, AttributeError):
        message = body[:300].decode("utf-8", "replace")
    if 400 <= status < 500 and _WINDOW_IS_FULL.match(message):
        return Refused(400, f"{message} {_NEXT_OF_A_FULL_WINDOW}", CONTEXT_LENGTH_EXCEEDED, "messages")
    if status in (401, 403):
        # Between gateway and worker; the agent can do nothing about it and must not learn of the token.
        return Refused(502, "The policy worker refused its gateway.", "worker_refused_gateway")
    return Refused(status, message or f"The policy worker answered {status}.", "worker_error")
