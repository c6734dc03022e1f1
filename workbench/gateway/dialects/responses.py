"""Responses: the OpenAI Responses API.

A request carries its whole history, or names the response before it; then what that followed on is put in its place,
and it can only continue the call that gave that response. Items that stand for things outside of it (stored items,
hosted tools) are refused: the ledger could not tell what the model read. A turn that is reasoning alone, or nothing at
all (both cut before their answer: an engine drops a required tool call that it cannot read), has no item by which a
fingerprint knows the model, so it gets an empty assistant item: otherwise its continuation would pass for a root. An
empty turn is stored with that item, so the engine renders the turn where the parent's tokens end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.gateway.dialects.base import Dialect, given
from workbench.gateway.dialects.unread import check_responses
from workbench.gateway.refusals import Refused
from workbench.gateway.sse import Frame, encode
from workbench.wire.fingerprints import is_model_authored, request_envelope

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
TOOL_TYPES = ("function", "namespace")
_FINAL = ("response.completed", "response.incomplete")
_FAILED = ("error", "response.failed", "response.cancelled")
_EMPTY_TURN = {"role": "assistant", "content": ""}


class ResponsesDialect(Dialect):
    """OpenAI responses."""

    name = "responses"
    path = "/v1/responses"
    max_tokens_field = "max_output_tokens"

    def check(self, body: Mapping[str, Any]) -> None:
        check_responses(body.get("input"))

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        for tool in _objects(body.get("tools"), "tools"):
            if tool.get("type") not in TOOL_TYPES:
                raise Refused(
                    400,
                    f"A tool of type {tool.get('type')!r} cannot be captured; expected {' or '.join(TOOL_TYPES)}.",
                    "not_capturable",
                    "tools",
                )
        items = _input_items(body.get("input"))
        envelope = request_envelope(body.get("instructions"), body.get("tools"))
        return items if envelope is None else [dict(envelope), *items]

    def named_response(self, body: Mapping[str, Any]) -> str | None:
        named = body.get("previous_response_id")
        if named is not None and not (isinstance(named, str) and named):
            raise Refused(400, "`previous_response_id` must be a response's id.", param="previous_response_id")
        return named

    def stored_input(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        return None if body.get("store") is False else _as_items(body.get("input"))

    def with_history(self, body: Mapping[str, Any], history: list[Any] | None) -> dict[str, Any]:
        if history is None:
            raise Refused(
                400,
                f"Response {body['previous_response_id']!r} is not stored in this rollout. Next: send the whole "
                "history in `input`.",
                "previous_response_not_found",
                "previous_response_id",
            )
        whole = {**body, "input": [*history, *_as_items(body.get("input"))]}
        del whole["previous_response_id"]
        return whole

    def prompt_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        options = given(body, ("chat_template_kwargs", "mm_processor_kwargs", "structured_outputs"))
        reasoning, text = body.get("reasoning"), body.get("text")
        if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
            options["reasoning_effort"] = reasoning["effort"]
        answer_format = text.get("format") if isinstance(text, dict) else None
        if answer_format not in (None, {"type": "text"}):
            options["response_format"] = answer_format
        return options

    def adapt(self, body: dict[str, Any]) -> list[str]:
        # The worker keeps nothing; not counted, for it is the API's default and no wish of the agent.
        body["store"] = False
        return []

    def stored_output(self, served: Mapping[str, Any]) -> list[Any]:
        return list(served.get("output") or [_EMPTY_TURN])

    def response_items(self, served: Mapping[str, Any]) -> list[dict[str, Any]]:
        output = served.get("output")
        if not isinstance(output, list):
            return []
        return _with_answers([item for item in output if isinstance(item, dict)]) or [dict(_EMPTY_TURN)]

    def is_final(self, frame: Frame) -> bool:
        return _event(frame).get("type") in _FINAL

    def is_error(self, frame: Frame) -> bool:
        event = _event(frame)
        return event.get("type") in _FAILED or "error" in event

    def assembler(self) -> ResponsesAssembler:
        return ResponsesAssembler()

    def refusal(self, refused: Refused) -> dict[str, Any]:
        return refused.openai_error()

    def error_frame(self, refused: Refused) -> bytes:
        # Both forms in one: the event of this API, and the `error` that makes a client raise.
        error = self.refusal(refused)["error"]
        event = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
        return encode(event | {"error": error}, "error")


class ResponsesAssembler:
    """Events of one response → the response: the last event holds the whole of it."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[int, Any] = {}

    def feed(self, frame: Frame) -> None:
        event = _event(frame)
        if isinstance(event.get("response"), dict):
            self._response = event["response"]
        if event.get("type") == "response.output_item.done":
            self._items[event.get("output_index", len(self._items))] = event.get("item")

    def served(self) -> dict[str, Any]:
        output = self._response.get("output") or [item for _, item in sorted(self._items.items())]
        return {**self._response, "output": output}


def _as_items(given_input: Any) -> list[dict[str, Any]]:
    if isinstance(given_input, str) and given_input:
        return [{"role": "user", "content": given_input}]
    if not given_input or not isinstance(given_input, list):
        raise Refused(400, "`input` must be text or a list of at least one item.", param="input")
    return _objects(given_input, "input")


def _input_items(given_input: Any) -> list[dict[str, Any]]:
    items = _as_items(given_input)
    for position, item in enumerate(items):
        if item.get("type", "message") not in ITEM_TYPES:
            raise Refused(
                400,
                f"Input item {position} is of type {item['type']!r}, which cannot be captured; expected one of "
                f"{', '.join(ITEM_TYPES)}.",
                "not_capturable",
                "input",
            )
    last = items[-1]
    if last.get("type", "message") in ("message", "reasoning") and last.get("status") in ("in_progress", "incomplete"):
        raise Refused(
            400,
            f"The last input item is {last['status']}, so the model would continue a turn that the agent wrote.",
            "not_capturable",
            "input",
        )
    return _with_answers(items)


def _with_answers(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, with an empty answer after each turn that is reasoning alone."""
    whole: list[dict[str, Any]] = []
    lonely = answered = False
    for item in items:
        if item.get("type") == "reasoning":
            lonely = not answered
        else:
            answered = is_model_authored(item)
            if lonely and not answered:
                whole.append(dict(_EMPTY_TURN))
            lonely = False
        whole.append(item)
    return [*whole, dict(_EMPTY_TURN)] if lonely else whole


def _objects(values: Any, name: str) -> list[dict[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Refused(400, f"`{name}` must be a list of objects.", param=name)
    return values


def _event(frame: Frame) -> dict[str, Any]:
    return frame.event if isinstance(frame.event, dict) else {}
