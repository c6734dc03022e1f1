"""Forms: what alone differs between two texts, where that is little.

    text ─ without line ends of two kinds, white space, Unicode's spellings, case: a digest each ─▶ the first form in
    which two texts are equal, in words
Digests, because a text is kept only in its beginning, and what an agent trims is mostly the end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from hashlib import sha256

_FORMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("only its JSON type differs", str),
    ("only its line ends differ (CR LF and LF)", lambda text: text.replace("\r\n", "\n").replace("\r", "\n")),
    ("only white space at its ends differs", str.strip),
    ("only white space in it differs", lambda text: "".join(text.split())),
    ("only the Unicode form of its characters differs", lambda text: unicodedata.normalize("NFKC", text)),
    ("only upper and lower case differ", str.casefold),
)


def forms_of(text: str) -> tuple[str, ...]:
    """A digest of each form of a text."""
    return tuple(sha256(form(text).encode("utf-8", "surrogatepass")).hexdigest()[:16] for _, form in _FORMS)


def alike(one: Sequence[str], other: Sequence[str]) -> str | None:
    """What alone differs between two texts that are not equal, by their forms; None where it is more than that."""
    same = (words for (words, _), a, b in zip(_FORMS, one, other, strict=False) if a == b)
    return next(same, None)
