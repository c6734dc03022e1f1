"""Echoed calls: what a response brought along, and which of them stand in a final history.

An agent keeps the answers in its history, so the ids that came with an answer are those of the assistant turn that
says the same. A retried or side answer is in no later history and drops out; an answer that the agent rewrote is
found no more, and its turn is then part of the next prompt. Not here: rows (rows), asking for ids (client).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson


@dataclass(frozen=True, eq=False)
class EchoedCall:
    """One answered request. prompt_ids uint64[P], sampled_ids uint64[S], logprobs float32[S] (nats).

    `call_id` is the response's id, `messages` the request's history, `answer` the assistant turn as it was served.
    """

    call_id: str
    messages: Sequence[dict[str, Any]]
    answer: dict[str, Any]
    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str | None
    weight_version: int

    @property
    def ran(self) -> np.ndarray:
        """Prompt and sampled ids, uint64[P + S]: what the engine ran."""
        return np.concatenate([self.prompt_ids, self.sampled_ids])


def chain_of(calls: Sequence[EchoedCall], terminal_id: str) -> list[EchoedCall]:
    """The calls whose answers stand in the terminal call's history, in its order, and the terminal call last.

    Of several equal answers the latest that came before its turn is taken, each at most once. Empty when no call has
    the terminal's id.
    """
    places = {call.call_id: place for place, call in enumerate(calls)}
    if terminal_id not in places:
        return []
    terminal = calls[places[terminal_id]]
    chain, below = [terminal], places[terminal_id]
    for message in reversed(terminal.messages):
        if message.get("role") != "assistant":
            continue
        said = _said(message)
        found = next((place for place in range(below - 1, -1, -1) if _said(calls[place].answer) == said), None)
        if found is not None:
            chain.append(calls[found])
            below = found
    return chain[::-1]


def _said(turn: dict[str, Any]) -> bytes:
    called = [
        (call.get("function", {}).get("name"), call.get("function", {}).get("arguments"))
        for call in turn.get("tool_calls") or ()
    ]
    return orjson.dumps([turn.get("content") or "", called])
