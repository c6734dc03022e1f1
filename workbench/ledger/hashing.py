"""Hashing: the two hashes of a rollout's requests, each continued from the requests before it.

    hasher.hashes(items) ─▶ RequestHashes: assistant(more), conversation(length)
Every request holds the whole history, so hashing each anew costs the square of a rollout's length. Both hashes run over
the items in order: where a request begins, to the byte of its JSON, with one that was hashed before, they go on from
there. Items are plain values, as JSON has them. Invariant: the hashes are those of `assistant_fingerprint` and
`conversation_digest`, which also stand in for requests that JSON or the contract cannot hold, with their errors.
Not here: what the hashes mean (`wire.fingerprints`), who asks for them (`resolve`, `rows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from workbench.errors import FingerprintError
from workbench.wire import assistant_fingerprint, conversation_digest
from workbench.wire.fingerprints import ConversationHasher

Items = Sequence[Mapping[str, Any]]

KEPT = 8
"""Requests of a rollout to continue from: the last one and, where an agent branches, some before it."""

# What is no plain JSON value is refused rather than spelled as one.
_STRICT = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


class RequestHashes:
    """The hashes of one request. `states` holds the hasher after so many of its items, where it is known."""

    def __init__(self, items: Items, states: dict[int, ConversationHasher]) -> None:
        self._items = items
        self._states = states

    def assistant(self, more: Items = ()) -> str:
        """`assistant_fingerprint` of the request's items and `more`. Raises FingerprintError as it does."""
        whole = self._states.get(len(self._items))
        if whole is None:
            return assistant_fingerprint([*self._items, *more])
        if more:
            whole = whole.copy()
            for item in more:
                whole.add(item)
        return whole.assistant

    def conversation(self, length: int) -> str:
        """`conversation_digest` of the first `length` items. Raises FingerprintError as it does."""
        known = self._states.get(length)
        return conversation_digest(self._items[:length]) if known is None else known.conversation


@dataclass
class _Checkpoint:
    """A request that was hashed: its items, their JSON (bytes and SHA-256 without the closing bracket), the state."""

    items: int
    json_len: int
    json_digest: bytes
    state: ConversationHasher


class RequestHasher:
    """Hashes the requests of one rollout. Not thread-safe: one thread at a time."""

    def __init__(self) -> None:
        self._kept: deque[_Checkpoint] = deque(maxlen=KEPT)

    def hashes(self, items: Items) -> RequestHashes:
        """The hashes of one request's items; never raises, the hashes do when they are asked for."""
        try:
            text = memoryview(orjson.dumps(items, option=_STRICT))[:-1]
            states, json_digest = self._known(text)
            reached = max(states)
            if reached < len(items):
                state = states[reached].copy()
                for place, item in enumerate(items[reached:], start=reached + 1):
                    state.add(item)
                    states[place] = state.copy()
                self._kept.append(_Checkpoint(len(items), len(text), json_digest, states[len(items)]))
        except (TypeError, FingerprintError):  # orjson's own error is a TypeError
            return RequestHashes(items, {})
        return RequestHashes(items, states)

    def _known(self, text: memoryview) -> tuple[dict[int, ConversationHasher], bytes]:
        """The states of every kept request that this one begins with, and the SHA-256 of its JSON."""
        states = {0: ConversationHasher()}
        running, read = sha256(), 0
        for kept in sorted(self._kept, key=lambda kept: kept.json_len):
            if kept.json_len > len(text):
                continue
            running.update(text[read : kept.json_len])
            read = kept.json_len
            if running.digest() == kept.json_digest:
                states[kept.items] = kept.state
        running.update(text[read:])
        return states, running.digest()
