"""Base: what the gateway asks of an API dialect.

A dialect refuses what its engine would not read, turns a request into conversation items, says which fields of it may
not pass as they are, recognises the frame that must wait for custody, puts a streamed response together again, names
the items and the id of what was served, and words a refusal as its clients read it. Everything else in the gateway is
the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from workbench.gateway.refusals import Refused
from workbench.gateway.sse import Frame


class Assembler(Protocol):
    """Puts one streamed response together."""

    def feed(self, frame: Frame) -> None: ...

    def served(self) -> dict[str, Any]:
        """The object that the same response would have been without streaming."""


class Dialect(Protocol):
    """What every dialect says; the four about named responses have an answer for the dialects without them."""

    name: str
    path: str
    """Of the worker's route."""
    max_tokens_field: str

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `Refused` where the request says something that the engine would leave out without a word."""

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The conversation in a request, its envelope first. Raises `Refused` for a request without one."""

    def named_response(self, body: Mapping[str, Any]) -> str | None:
        """The response that a request names instead of sending what led to it; None where it sends its history."""
        return None

    def stored_input(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The request's own items, where a later request may name its response; else None."""
        return None

    def stored_output(self, served: Mapping[str, Any]) -> list[Any]:
        """The items that stand for the response where a later request names it, as the worker is to read them."""
        return []

    def with_history(self, body: Mapping[str, Any], history: list[Any] | None) -> dict[str, Any]:
        """The body with the named response's conversation in it. Raises `Refused` where that is unknown (None)."""
        return dict(body)

    def prompt_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What reaches the prompt beside the items, so that a history under other options is another history."""

    def adapt(self, body: dict[str, Any]) -> list[str]:
        """Change, in the body to forward, what this dialect alone has to change; the names of what was overridden.

        Nested values still belong to the agent's body, so they are replaced and not written into.
        """

    def response_items(self, served: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The items that the response adds to the conversation, spelled as a client sends them back."""

    def is_final(self, frame: Frame) -> bool:
        """True for the first frame that tells the client its response is complete."""

    def is_error(self, frame: Frame) -> bool:
        """True for a frame that says the response failed."""

    def assembler(self) -> Assembler: ...

    def refusal(self, refused: Refused) -> dict[str, Any]:
        """The error object that this API's clients read."""

    def error_frame(self, refused: Refused) -> bytes:
        """The same as the last frame of a stream that has begun."""


def given(body: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those fields of a body that say something."""
    return {name: body[name] for name in names if body.get(name) not in (None, {}, [])}
