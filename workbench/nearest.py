"""Nearest: how a sentence about an unknown name ends, the same everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BEGUN = 3
"""Letters from which a name counts as begun."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?` where a known name is near, else `.`; the sentence goes on with what is allowed."""
    near = nearest(word, known)
    return f", did you mean {near}?" if near else "."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was meant: in other letters' case, misspelt, or begun and not ended."""
    by_letters = {name.lower(): name for name in known}
    lower = word.lower()
    near = difflib.get_close_matches(lower, list(by_letters), n=1)
    begun = [name for name in by_letters if len(lower) >= _BEGUN and name.startswith(lower)]
    found = near or (begun if len(begun) == 1 else [])
    return by_letters[found[0]] if found else None
