"""Widget: what the live views have in common.

A subclass names its JavaScript module and declares its traits; it is given data, it computes nothing. The module's
relative imports are resolved here, once at import time, into one ES module without a build step: each file is valid ESM
by itself, and names are unique across files (a test sees to it).
Invariants: an unknown keyword is refused; `repr` holds no address; nothing is loaded from a network.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import traitlets as t

JS = Path(__file__).parent / "js"
_IMPORT = re.compile(r'^import\s+\{[^}]*\}\s+from\s+"\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


@cache
def stylesheet() -> str:
    """The one style sheet of all live views."""
    return (JS / "inspect.css").read_text(encoding="utf-8")


@cache
def module(name: str) -> str:
    """`js/<name>` with everything it imports, dependencies first, as the text of one ES module."""
    order: list[str] = []
    _collect(name, order)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", (JS / part).read_text(encoding="utf-8"))) for part in order)


def _collect(name: str, order: list[str]) -> None:
    for part in _IMPORT.findall((JS / name).read_text(encoding="utf-8")):
        if part not in order:
            _collect(part, order)
    if name not in order:
        order.append(name)


class LiveWidget(anywidget.AnyWidget):
    """Base of the live views. `fallbacks` is how many outputs under this one are its snapshot."""

    sentence = t.Unicode("").tag(sync=True)
    fallbacks = t.Int(0).tag(sync=True)
    block = t.Bytes(b"").tag(sync=True)

    _css = stylesheet()

    def __init__(self, **kwargs: Any) -> None:
        known = self.trait_names()
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{type(self).__name__} has no keyword {name!r}{hint}")
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        return self.sentence or type(self).__name__
