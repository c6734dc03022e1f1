"""Tellers: one conversation in the items of each API, built by hand, for tests that care about what a history says."""

from __future__ import annotations

from typing import Any

import orjson

from workbench.gateway.dialects import DIALECTS

Items = list[dict[str, Any]]
BY_NAME = {dialect.name: dialect for dialect in DIALECTS.values()}


class Teller:
    """Says things as the API `name` writes them; every saying is a list of items, to be joined to a history."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dialect = BY_NAME[name]

    def user(self, text: str) -> Items:
        if self.name == "responses":
            return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        return [{"role": "user", "content": text}]

    def model(self, text: str | None, calls: list[tuple[str, str]] = [], thinking: str | None = None) -> Items:  # noqa: B006
        """One turn of the model: its thinking, its text, its tool calls `(id, arguments)`."""
        if self.name == "chat":
            said = (f"<think>{thinking}</think>" if thinking else "") + (text or "")
            turn: dict[str, Any] = {"role": "assistant", "content": said or None}
            if calls:
                turn["tool_calls"] = [
                    {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}
                    for call_id, arguments in calls
                ]
            return [turn]
        if self.name == "responses":
            items: Items = []
            if thinking:
                items.append({"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": thinking}]})
            if text:
                part = {"type": "output_text", "text": text, "annotations": []}
                items.append({"type": "message", "role": "assistant", "status": "completed", "content": [part]})
            return items + [
                {"type": "function_call", "call_id": call_id, "name": "search", "arguments": arguments}
                for call_id, arguments in calls
            ]
        blocks: Items = [{"type": "thinking", "thinking": thinking, "signature": "s"}] if thinking else []
        blocks += [{"type": "text", "text": text}] if text else []
        blocks += [
            {"type": "tool_use", "id": call_id, "name": "search", "input": _json(arguments)}
            for call_id, arguments in calls
        ]
        return [{"role": "assistant", "content": blocks}]

    def results(self, results: list[tuple[str, str]]) -> Items:
        if self.name == "chat":
            return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]
        if self.name == "responses":
            return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in results]
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in results]
        return [{"role": "user", "content": blocks}]

    def body(self, items: Items, tools: list[str] = ["search"]) -> dict[str, Any]:  # noqa: B006
        """The request with this history and these tools."""
        if self.name == "chat":
            return {
                "model": "policy",
                "messages": items,
                "tools": [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools],
            }
        if self.name == "responses":
            listed = [{"type": "function", "name": name, "parameters": {}} for name in tools]
            return {"model": "policy", "input": items, "tools": listed, "store": False}
        listed = [{"name": name, "input_schema": {}} for name in tools]
        return {"model": "policy", "messages": items, "tools": listed, "max_tokens": 64}

    def request_items(self, items: Items, tools: list[str] = ["search"]) -> Items:  # noqa: B006
        return self.dialect.request_items(self.body(items, tools))

    def request_items_of(self, content: bytes) -> Items:
        """The conversation in a request's bytes."""
        return self.dialect.request_items(orjson.loads(content))

    def served(self, answer: Items) -> dict[str, Any]:
        """The object that serves these items."""
        if self.name == "chat":
            return {"id": "a", "choices": [{"message": answer[0], "finish_reason": "stop"}]}
        if self.name == "responses":
            return {"id": "a", "output": answer}
        return {"id": "a", "role": "assistant", "content": answer[0]["content"]}


def _json(arguments: str) -> Any:
    return orjson.loads(arguments or "{}")
