"""Inputs: made-up rollouts, the same for both sides. Imports neither implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 150_000
ROLLOUT = "bench.0.0.0"


@dataclass
class Turn:
    """What the engine ran and sampled in one call of a chain."""

    call_id: str
    parent: str | None
    prefix: np.ndarray  # uint64[prev_len]
    prompt: np.ndarray  # uint64[prev_len + carry]
    sampled: np.ndarray  # uint64[G]
    logprobs: np.ndarray  # float32[G], nats


def turns(calls: int, tokens: int, seed: int = 0) -> list[Turn]:
    """One chain of `calls` calls; each adds `tokens` tokens, half of them carried and half sampled."""
    rng = np.random.default_rng(seed)
    made: list[Turn] = []
    before_T = np.empty(0, dtype=np.uint64)
    for number in range(calls):
        carry_T = rng.integers(2, VOCABULARY, tokens - tokens // 2).astype(np.uint64)
        sampled_G = rng.integers(2, VOCABULARY, tokens // 2).astype(np.uint64)
        prompt_T = np.concatenate((before_T, carry_T))
        logprobs_G = -rng.random(sampled_G.size).astype(np.float32)
        parent = f"c{number - 1}" if number else None
        made.append(Turn(f"c{number}", parent, before_T, prompt_T, sampled_G, logprobs_G))
        before_T = np.concatenate((prompt_T, sampled_G))
    return made


def admission(turn: Turn, parent_chain_hash: str | None, number: int, rollout_id: str = ROLLOUT) -> dict[str, Any]:
    """The admission of a turn as both implementations read it."""
    return {
        "rollout_id": rollout_id,
        "model_call_id": turn.call_id,
        "parent_call_id": turn.parent,
        "prev_len": int(turn.prefix.size),
        "mode": "token_in" if turn.parent else "text",
        "staging_chain": [f"{rollout_id}/c{earlier}" for earlier in range(number)],
        "parent_chain_hash": parent_chain_hash,
    }


def receipt(records: list[dict[str, Any]], rollout_id: str = ROLLOUT) -> dict[str, Any]:
    """The receipt of a chain, its last call the terminal one; `records` are its manifest rows."""
    return {
        "rollout_id": rollout_id,
        "terminal_model_call_id": records[-1]["model_call_id"],
        "manifest": records,
        "terminal_selection": "declared",
        "reward": 1.0,
    }


def conversation(calls: int, words: int = 40) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Requests and responses of a tool-using agent's rollout, as conversation items: call k sends 2 k + 1 items."""
    sentence = " ".join(f"word{number}" for number in range(words))
    items: list[dict[str, Any]] = [{"role": "user", "content": f"The task. {sentence}"}]
    requests, responses = [], []
    for number in range(calls):
        requests.append(list(items))
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "look", "arguments": f'{{"at": {number}, "why": "{sentence[:60]}"}}'},
        }
        responses.append([{"role": "assistant", "content": f"Turn {number}. {sentence}", "tool_calls": [call]}])
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"Result {number}. {sentence}"}
        items = [*items, *responses[-1], result]
    return requests, responses


def custody_record(number: int) -> dict[str, Any]:
    """A manifest row of call `number` of a conversation, for ledgers: its hashes are made up."""
    hexes = {name: f"{number:032x}{place:032x}" for place, name in enumerate(_HASHES)}
    return {
        "model_call_id": f"c{number:06d}",
        "parent_call_id": f"c{number - 1:06d}" if number else None,
        "prev_len": 1_000 * number,
        "delta_len": 1_000,
        "cum_len": 1_000 * (number + 1),
        "weight_version": 1,
        "staging_key": f"{ROLLOUT}/c{number:06d}",
        "mode": "token_in" if number else "text",
        "response_id": f"chatcmpl-{number}",
        "admitted_at": 1_700_000_000.0 + number,
        "fingerprint_version": 2,
        **hexes,
    }


_HASHES = ("digest", "extras_digest", "chain_hash", "cumulative_hash", "output_fingerprint",
           "continuation_fingerprint")  # fmt: skip
