"""Terminal: words for whoever watches, who may be gone: a closed window or ssh session, a pipe that nobody reads.

Invariant: that nobody hears what is said ends nothing. A stream that failed is written to nowhere from then on, so that
Python's own last flush of it does not change the exit code.
"""

from __future__ import annotations

import contextlib
import os
from typing import TextIO


def tell(text: str, stream: TextIO, end: str = "\n") -> None:
    """Write `text` at once, as far as somebody is there."""
    try:
        stream.write(f"{text}{end}")
        stream.flush()
    except (OSError, ValueError):  # EIO of a closed terminal, EPIPE; ValueError of a closed file
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, stream.fileno())
            finally:
                os.close(nowhere)
