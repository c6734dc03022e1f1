"""Differences: where in one conversation item a request departs from the record, and what stood there.

    was, now ─ leaves in the digest's order ─▶ first that differs ─ JSON values are entered ─▶ path, excerpts of both
Excerpts begin shortly before the first differing character, so that they tell the two apart however long they are.
Where two texts are the same but for white space, case or the like, that is said (forms).
Not here: which item differs, and why (drift).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import orjson

from workbench.ledger.forms import alike, forms_of
from workbench.ledger.items import ItemDigest, Leaf, as_json

BEFORE_CHARS = 20
EXCERPT_CHARS = 60
_ORDER = ("role", "content", "call", "result")


@dataclass(frozen=True)
class Difference:
    """`path` leads into the item (`tool_calls[0].function.arguments.query`), `at` is the first differing character of
    the value there; `was` and `came` are excerpts around it, None for what is not there at all; `only` says what alone
    differs, where that is little."""

    path: str
    at: int
    was: str | None
    came: str | None
    only: str | None = None

    def __str__(self) -> str:
        only = "" if self.only is None else f"; {self.only}"
        if self.was == self.came:
            return f"{self.path}: they part after the first {self.at:,} characters{only}"
        was = "nothing" if self.was is None else repr(self.was)
        came = "nothing" if self.came is None else repr(self.came)
        return f"{self.path}: {was} was recorded, {came} came{only}"


def first_difference(was: ItemDigest, now: ItemDigest | None) -> Difference | None:
    """The first leaf in which two items differ; None where their leaves are equal."""
    for old, new in zip_longest(was.leaves, () if now is None else now.leaves):
        if old is None or new is None:
            return _missing(old, new)
        if old.kind != new.kind:
            # One of the two lacks what comes first in an item.
            lacks_old = _ORDER.index(new.kind) < _ORDER.index(old.kind)
            return _missing(None, new) if lacks_old else _missing(old, None)
        if old.digest != new.digest:
            return _between(new.path, old, new)
    return None


def begin_alike(old: str, new: str) -> int:
    """With how many characters two texts begin alike."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _missing(old: Leaf | None, new: Leaf | None) -> Difference:
    return Difference(
        (old or new).path,  # type: ignore[union-attr]
        0,
        None if old is None else _excerpt(old.text, 0),
        None if new is None else _excerpt(new.text, 0),
    )


def _between(path: str, was: Leaf, now: Leaf) -> Difference:
    old, new = was.text, now.text
    only = alike(was.forms or forms_of(old), now.forms or forms_of(new))
    try:
        entered = _enter(path, _json(old), _json(new))
    except RecursionError:  # nested as deeply as JSON is read at all: told as texts
        entered = None
    if entered is not None:
        path, old_value, new_value = entered
        if old_value is _ABSENT or new_value is _ABSENT:
            told = [None if value is _ABSENT else _excerpt(_spelled(value), 0) for value in (old_value, new_value)]
            return Difference(path, 0, told[0], told[1])
        old, new = _spelled(old_value), _spelled(new_value)
        only = alike(forms_of(old), forms_of(new))
        if old == new:  # a text and a number that reads the same
            old, new = as_json(old_value), as_json(new_value)
    at = begin_alike(old, new)
    return Difference(path, at, _excerpt(old, at), _excerpt(new, at), only)


_ABSENT = object()


def _enter(path: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """Follow two JSON objects or lists to their first differing value; None where they are neither."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{path}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in sorted({*old, *new})]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip_longest(old, new, fillvalue=_ABSENT))]
    else:
        return None
    for inner, a, b in pairs:
        if a is _ABSENT or b is _ABSENT:
            return inner, a, b
        if type(a) is not type(b) or a != b:
            return _enter(inner, a, b) or (inner, a, b)
    return None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - BEFORE_CHARS)
    end = start + EXCERPT_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
