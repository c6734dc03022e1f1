"""Nearest: how a sentence about an unknown name ends, the same everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?` where a known name is near, else `.`; the sentence goes on with what is allowed."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]}?" if near else "."
