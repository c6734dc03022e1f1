"""SSE: cut a stream of bytes into server-sent events, keeping each one's exact bytes.

Not here: what an event means (dialects).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

DONE = b"[DONE]"


@dataclass(frozen=True)
class Frame:
    """`raw` is what goes to the client, its blank line included; `event` the JSON of its data, None for none (a
    comment, `[DONE]`)."""

    raw: bytes
    event: Any
    done: bool = False


async def frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[Frame]:
    """Yield whole frames. A last frame without its blank line is a cut stream and is not yielded."""
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while (cut := _frame_end(buffer)) is not None:
            raw, buffer = buffer[:cut], buffer[cut:]
            yield parse(raw)


def split(stream: bytes) -> list[Frame]:
    """The frames of a whole stream."""
    found = []
    at = 0
    while (cut := _frame_end(stream, at)) is not None:
        found.append(parse(stream[at:cut]))
        at = cut
    return found


def parse(raw: bytes) -> Frame:
    """One frame. Data that is no JSON counts as none."""
    data = b"\n".join(line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:"))
    if not data or data.strip() == DONE:
        return Frame(raw, None, bool(data))
    try:
        return Frame(raw, orjson.loads(data))
    except orjson.JSONDecodeError:
        return Frame(raw, None)


def encode(event: Any, name: str | None = None) -> bytes:
    """A frame of one JSON value; `name` is its event field, which some APIs' clients go by."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(event) + b"\n\n"


def _frame_end(buffer: bytes, at: int = 0) -> int | None:
    """Where the frame that begins at `at` ends. Nothing behind its end is looked at: a stream has thousands."""
    end = buffer.find(b"\n\n", at)
    other = buffer.find(b"\r\n\r\n", at, len(buffer) if end < 0 else end)
    if other >= 0:
        return other + 4
    return end + 2 if end >= 0 else None
