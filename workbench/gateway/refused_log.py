"""Refused log: what the gateway refused or changed, as lines of a file that whoever serves an agent's author follows,
and that a run's refusals are counted from.

Every refusal is counted (metrics); the file gets a JSON line each, at most `BURST` in `WINDOW_S` seconds a process,
then one that says so, and when the window is over one a rollout and code with how often (`times`): a gateway that is
killed loses the counts of one window at most. A file of `MOST_BYTES` ends with a line that says so. Of a field that an
agent set and the recipe replaces, the first request has a line. Invariant: nothing of a request's headers and body but
such a field's value, cut to `LONGEST_VALUE` characters, and what the refusal's own words quote, cut to `LONGEST`.
Not here: calls that were admitted and failed (they have rows in the ledger), showing and counting the lines.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import orjson
from starlette.requests import Request

from workbench.errors import WireError
from workbench.gateway.metrics import Metrics
from workbench.gateway.refusals import Refused
from workbench.wire import check_rollout_id

BURST, WINDOW_S = 10, 10.0
LONGEST, LONGEST_VALUE = 240, 40
MOST_BYTES = 4 * 2**20
MOST_COUNTED = 1_000
_NOBODYS_FAULT = ("client_left", "gateway_stopping")


class RefusedLog:
    """Counts refusals in `metrics` and appends them to `path`; None: they are counted alone."""

    def __init__(self, path: str | None, metrics: Metrics) -> None:
        self._path = None if path is None else Path(path)
        self._metrics = metrics
        self._window_began = -WINDOW_S
        self._written = 0
        self._counted: Counter[tuple[str | None, int, str]] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self._changed: set[str] = set()

    def note(self, refused: Refused, request: Request) -> None:
        """One refusal, of `request`."""
        self._metrics.refused.labels(refused.code).inc()
        if self._path is None or refused.code in _NOBODYS_FAULT:
            return
        now = time.monotonic()
        if now - self._window_began >= WINDOW_S:
            self.tell_counted()
            self._window_began, self._written = now, 0
        self._written += 1
        if self._written <= BURST:
            self._append({"rollout_id": _rollout_of(request), "status": refused.status, "code": refused.code,
                          "message": _plain(refused.message)})  # fmt: skip
            return
        if self._written == BURST + 1:
            left_s = WINDOW_S - (now - self._window_began)
            self._append({"more_within_s": round(left_s, 1)})
            self._telling = asyncio.get_running_loop().call_later(left_s, self.tell_counted)
        # A name that an agent made up costs memory only so often.
        rollout_id = _rollout_of(request) if len(self._counted) < MOST_COUNTED else None
        self._counted[rollout_id, refused.status, refused.code] += 1

    def tell_counted(self) -> None:
        """Append what was only counted since the last time."""
        for (rollout_id, status, code), times in self._counted.items():
            self._append({"rollout_id": rollout_id, "status": status, "code": code, "times": times})
        self._counted.clear()
        if self._telling is not None:
            self._telling.cancel()

    def changed(self, rollout_id: str, field: str, came: object, used: object) -> None:
        """The field of a request came as `came` and goes to the worker as `used`; None: it is left out."""
        if self._path is None or field in self._changed:
            return
        self._changed.add(field)
        said = None if used is None else _short(used)
        self._append({"rollout_id": rollout_id, "field": field, "came": _short(came), "used": said})

    def _append(self, line: dict[str, object]) -> None:
        assert self._path is not None
        try:
            # One write to a file that is open for appending: the processes of one gateway share it.
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                if size < MOST_BYTES:
                    text = orjson.dumps({"at": time.time(), **line}) + b"\n"
                    if size + len(text) >= MOST_BYTES:
                        text += orjson.dumps({"at": time.time(), "full_at_bytes": MOST_BYTES}) + b"\n"
                    os.write(handle, text)
            finally:
                os.close(handle)
        except OSError:
            return  # the agent is told all the same, and a full disk is said where records are written


def _rollout_of(request: Request) -> str | None:
    """The rollout that a request is of, where its path names one that can be."""
    try:
        return check_rollout_id(request.path_params["rollout_id"])
    except (KeyError, WireError):
        return None


def _short(value: object) -> str:
    text = _plain(orjson.dumps(value).decode())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _plain(text: str) -> str:
    """In one line, without what a terminal takes for an order."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line).encode(errors="replace").decode()
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
