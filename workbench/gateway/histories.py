"""Histories: what a response followed on, for requests that name it instead of sending it (`previous_response_id`).

One line a stored response in `<rollout>.responses.jsonl` beside the ledger, shared by all gateway processes: the items
that it added to those of the response before it, which is the one that it named, or the one that it continues where
its history begins with that one's, as the ledger compares histories. So a conversation of n turns is n lines of what
was new in each, however it was sent. Not custody: losing a line makes a response unknown, and a request that names it
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import FingerprintError
from workbench.ledger.journal import append_beside
from workbench.wire import check_rollout_id, conversation_digest


class Histories:
    """The stored responses of every rollout, in `directory`."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def keep(
        self,
        rollout_id: str,
        response_id: str,
        after: str | None,
        items: Sequence[Any],
        *,
        continues: str | None = None,
    ) -> None:
        """Store a response: the items that its request had after those of `after`, and its own.

        `continues`: a response whose conversation the items may begin with, where its request named none.
        """
        if after is None and continues is not None:
            before = self.items(rollout_id, continues)
            if before and _same(items[: len(before)], before):
                after, items = continues, items[len(before) :]
        line = orjson.dumps({"id": response_id, "after": after, "items": list(items)})
        append_beside(self._path(rollout_id), line)

    def items(self, rollout_id: str, response_id: str) -> list[Any] | None:
        """The whole conversation up to and with a response; None where it is not known in this rollout."""
        try:
            lines = self._path(rollout_id).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        stored: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                entry = orjson.loads(line)
                stored[entry["id"]] = entry
            except (orjson.JSONDecodeError, KeyError, TypeError):
                continue
        parts: list[list[Any]] = []
        wanted: str | None = response_id
        while wanted is not None:
            entry = stored.pop(wanted, None)
            if entry is None:
                return None
            parts.append(entry["items"])
            wanted = entry["after"]
        return [item for part in reversed(parts) for item in part]

    def forget(self, rollout_id: str) -> None:
        """Keep a closed rollout's conversations no longer: nothing continues them."""
        self._path(rollout_id).unlink(missing_ok=True)

    def _path(self, rollout_id: str) -> Path:
        return self._directory / f"{check_rollout_id(rollout_id)}.responses.jsonl"


def _same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    try:
        return conversation_digest(items) == conversation_digest(others)
    except FingerprintError:
        return False
