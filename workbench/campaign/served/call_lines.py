"""Call lines: one line a call, as soon as its row is in the custody ledger.

In: a ledger directory that gateways write, and a function that knows of a call how many of its tokens were sampled and
how it ended (the ledger holds neither). Out: lines of text, each call once, in the order of its rollout's ledger.
Invariant: only reads, and reads the ledger itself: a line is shown for what is in custody, or for why it is not.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import RunStoreError
from workbench.runs.custody import SUFFIX, ledger_rows

POLL_S = 0.1

Facts = dict[str, dict[str, Any]]
"""Call id → {"sampled_tokens", "finish_reason"} of captured calls."""


class CallLines:
    """Follows the ledger in `directory`; `show` gets each line, `facts_of` answers for the calls of one look."""

    def __init__(
        self, directory: Path, facts_of: Callable[[Sequence[str]], Awaitable[Facts]], show: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._facts_of = facts_of
        self._show = show
        self._sizes: dict[str, int] = {}
        self._shown: defaultdict[str, int] = defaultdict(int)
        self._unreadable: set[str] = set()
        self._waiting: list[dict[str, Any]] = []
        """Rows that were read and not shown yet: a look may be cancelled while it asks for their facts."""
        self.calls = self.captured = 0
        self.rollouts: set[str] = set()

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Show what was added since the last look."""
        self._waiting += await asyncio.to_thread(self._new_rows)
        captured = [row["model_call_id"] for row in self._waiting if row["disposition"] == "staged"]
        self._show_waiting(await self._facts_of(captured) if captured else {})

    def last_look(self) -> None:
        """The same when nobody is left to ask: what was not shown yet, without what the ledger does not hold."""
        self._waiting += self._new_rows()
        self._show_waiting({})

    def _show_waiting(self, facts: Facts) -> None:
        shown, self._waiting = self._waiting, []
        for row in shown:
            self.calls += 1
            self.captured += row["disposition"] != "failed"
            self.rollouts.add(row["rollout_id"])
            self._show(line_of(row, facts.get(row["model_call_id"], {})))

    def _new_rows(self) -> list[dict[str, Any]]:
        rows = []
        try:
            grown = [e for e in os.scandir(self._directory) if e.name.endswith(SUFFIX) and not e.name.startswith(".")]
        except FileNotFoundError:
            return []
        for entry in sorted(grown, key=lambda e: e.name):
            size = entry.stat().st_size
            if size == self._sizes.get(entry.name):
                continue
            self._sizes[entry.name] = size
            try:
                calls = ledger_rows(Path(entry.path))
            except RunStoreError as error:
                if entry.name not in self._unreadable:
                    self._unreadable.add(entry.name)
                    self._show(f"{entry.name.removesuffix(SUFFIX)}  its ledger cannot be read: {error}")
                continue
            rows += calls[self._shown[entry.name] :]
            self._shown[entry.name] = len(calls)
        return rows


def line_of(row: dict[str, Any], facts: dict[str, Any]) -> str:
    """Rollout, call, mode, parent or cause, tokens carry + sampled, finish reason."""
    head = f"{row['rollout_id']}  {row['model_call_id'][:12]}"
    if row["disposition"] == "failed":
        return "  ".join([head, f"NOT CAPTURED: {row['failure_reason']}", *_why(row)])
    parent = f"after {row['parent_call_id'][:12]}" if row["parent_call_id"] else "root"
    sampled = facts.get("sampled_tokens")
    tokens = f"{row['delta_len']} tokens" if sampled is None else f"{row['delta_len'] - sampled} + {sampled} tokens"
    return "  ".join([head, row["mode"], parent, tokens, *([facts["finish_reason"]] if sampled is not None else [])])


def _why(row: dict[str, Any]) -> list[str]:
    said = [str(row["detail"])] if row.get("detail") else []
    if row.get("near_call_id"):
        place = f", item {row['near_item']} (from 0)" if row.get("near_item") is not None else ""
        said.append(f"nearest call {row['near_call_id'][:12]}{place}")
    return said
