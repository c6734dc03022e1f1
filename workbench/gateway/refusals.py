"""Refusals: what the gateway answers instead of a completion, in the form that OpenAI clients read.

Every refusal names what was expected and what came, and has a `code` that programs can tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from starlette.responses import Response

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

# How serving apps put "the prompt does not fit"; their error type is a plain bad request.
_CONTEXT_SIGNS = ("context length", "context window", "max_model_len", "maximum model length", "maximum input length")


@dataclass
class Refused(Exception):
    """The request is answered with `status` and this message; nothing is (or was) generated for it."""

    status: int
    message: str
    code: str = "invalid_request"
    param: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        return Response(self.body(), self.status, headers, media_type="application/json")


def from_worker(status: int, body: bytes) -> Refused:
    """What the agent is told when the worker refused: its own words, with a code where the window is full."""
    try:
        answer = orjson.loads(body)
        error = answer.get("error", answer)
        message = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (orjson.JSONDecodeError, AttributeError):
        message = body[:300].decode("utf-8", "replace")
    if 400 <= status < 500 and any(sign in message.lower() for sign in _CONTEXT_SIGNS):
        return Refused(400, message, CONTEXT_LENGTH_EXCEEDED, "messages")
    if status in (401, 403):
        # Between gateway and worker; the agent can do nothing about it and must not learn of the token.
        return Refused(502, "The policy worker refused its gateway.", "worker_refused_gateway")
    return Refused(status, message or f"The policy worker answered {status}.", "worker_error")
