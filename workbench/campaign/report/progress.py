"""Progress: one living line in the terminal about a run, read from its store.

In: a run directory that somebody else writes (`status.json`). Out: on a terminal a line that rewrites itself, elsewhere
a new line whenever the phase or step changes. Invariant: only reads; no status yet, half a status or none ever again
are all normal. Not here: what the run is doing (the controller says so), the last word (summary).
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, TextIO

import orjson

from workbench.campaign.terminal import tell

_LONGEST_REASON = 160


class ProgressLine:
    """Shows the status of `run_dir` on `stream` each time `tick` is called."""

    def __init__(self, run_dir: Path, stream: TextIO) -> None:
        self._status_path = run_dir / "status.json"
        self._stream = stream
        self._live = stream.isatty()
        self._began = time.monotonic()
        # When it was written, compared with others of its kind alone: a clock may be set back.
        self._before = self._status().get("updated_at")
        self._shown: tuple[Any, ...] | None = None
        self._width = 0

    def tick(self, note: str | None = None, detail: str = "") -> None:
        """Look at the status and show it; `note` replaces it (the runner's own word, such as "stopping").

        `detail` is what moves all the time, such as a count-down: by itself it is no reason for a new line.
        """
        status = self._read()
        key = (note,) if note else (status.get("phase"), status.get("step"))
        text = f"{_clock(time.monotonic() - self._began)}  {note or describe(status)}{detail}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            tell("\r" + text[:width].ljust(self._width), self._stream, end="")
            self._width = min(len(text), width)
        elif key != self._shown:
            tell(text, self._stream)
        self._shown = key

    def close(self) -> None:
        """Leave the last state standing and the cursor on a new line."""
        if self._live and self._shown is not None:
            tell("", self._stream)

    def _read(self) -> dict[str, Any]:
        status = self._status()
        # A run that is gone on with still has the last word of the process before.
        return {} if self._before is not None and status.get("updated_at") == self._before else status

    def _status(self) -> dict[str, Any]:
        try:
            status = orjson.loads(self._status_path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}
        return status if isinstance(status, dict) else {}


def describe(status: dict[str, Any]) -> str:
    """The status as one line, what is wanted most first, as a narrow terminal cuts it; the unknown is left out."""
    if not status:
        return "starting the kernel"
    parts = []
    if status.get("step") is not None:
        of = f"/{status['steps']}" if status.get("steps") is not None else ""
        parts.append(f"step {status['step']}{of}")
    parts.append(str(status.get("phase", status.get("status", "running"))))
    # Of the last step that was taken: between two steps it stands still, because nothing new is known.
    if status.get("eta_s"):
        parts.append(f"about {_clock(status['eta_s'])} to go")
    for key, words, spec in (
        ("reward_mean", "reward {}", ".3f"),
        ("rejected", _rejected(status), "d"),
        ("token_in_rate_after_roots", "token_in after roots {}", ".4g"),
        ("groups", "groups {}", "d"),
        ("weight_version", "weights v{}", "d"),
    ):
        value = status.get(key)
        if isinstance(value, (int, float)):
            parts.append(words.format(format(value, spec)))
    return " · ".join(parts)


def _rejected(status: dict[str, Any]) -> str:
    """How the number of rejected rollouts is told, with what most of them were rejected for."""
    reason = " ".join(str(status.get("rejected_for") or "").replace("{", "(").replace("}", ")").split())
    shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
    return "{} rejected" + (f", most often: {shown}" if shown else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:d}:{rest:02d}"
