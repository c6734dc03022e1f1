"""Refusal lines: what the gateway refused, a line each, beside the lines of calls; and of each field that an agent
sets and the recipe replaces, the first time.

In: the file that its processes append to (`gateway.refused_log`). Out: rollout, status, reason, next step.
Invariant: only reads; every line of the file once, a field's too. Not here: what is refused and said of it (gateway).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from workbench.campaign.served.call_lines import POLL_S
from workbench.runs.refused import REFUSED_FILE

_ADDRESS = "the base URL is …/ng-rollout/<rollout>/v1, for Anthropic's client without /v1"
_NEXT = {
    "rollout_frozen": "a new <rollout> name for the next conversation",
    "unknown_route": _ADDRESS,
    "http_404": _ADDRESS,
    "http_405": _ADDRESS,
    "unauthorized": "nothing, if this was an agent: it needs no route below /training-token-capture",
    "body_too_large": "shorter requests, or a larger gateway.max_body_bytes",
    "body_timeout": "a longer gateway.client_timeout_s",
    "worker_unreachable": "see whether the engine still runs",
    "worker_timeout": "a longer gateway.request_timeout_s",
}


class RefusalLines:
    """Follows the file of refusals in `run_dir`; `show` gets each line."""

    def __init__(self, run_dir: Path, show: Callable[[str], None]) -> None:
        self._path = run_dir / REFUSED_FILE
        self._show = show
        self._read = 0
        self._fields: set[str] = set()

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Show what was added since the last look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                came = file.read()
        except FileNotFoundError:
            return
        whole, _, _ = came.rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            told = orjson.loads(line)
            if (field := told.get("field")) is not None:
                if field in self._fields:
                    continue  # of another process of the same gateway
                self._fields.add(field)
            self._show(line_of(told))


def line_of(refused: dict[str, Any]) -> str:
    """One refusal in one line."""
    if "more_within_s" in refused:
        return f"REFUSED more; of the next {refused['more_within_s']:g} s they are counted and told later"
    if "full_at_bytes" in refused:
        full = f"the file of refusals is full ({refused['full_at_bytes']:,} bytes)"
        return f"REFUSED more is only counted from now on, in /metrics: {full}"
    if "field" in refused:
        how = "left out" if refused["used"] is None else f"replaced by the recipe's {refused['used']}"
        counted = "from now on that is only counted, in /metrics"
        return f"{refused['rollout_id']}  {refused['field']} {refused['came']} of the request was {how}; {counted}"
    who = f"{refused['rollout_id'] or '(no rollout)'}  REFUSED {refused['status']} {refused['code']}"
    if "times" in refused:
        return f"{who}: {refused['times']} more"
    next_step = _NEXT.get(refused["code"], "")
    said = refused["message"].rstrip(".")
    return f"{who}: {said}{f'. Next: {next_step}' if next_step else ''}"
