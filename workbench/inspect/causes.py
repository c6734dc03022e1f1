"""Causes: the vocabulary's one line about a cause or a witness, wherever a view names one."""

from __future__ import annotations

import re

from workbench.wire import Cause
from workbench.wire.causes import REASONS

_CAUSES = {cause.value: cause for cause in Cause}
_NOWHERE = re.compile(r" See stack trace \(above\)[^.]*\.")
_CODE = re.compile(r"[a-z_]+(?=$|[=\[])")


def is_known(cause: str | None) -> bool:
    """Whether a word is in the vocabulary."""
    return cause in _CAUSES


def explain(cause: str) -> str:
    """The vocabulary's one line for a cause; a foreign one says that it is not in the vocabulary."""
    known = _CAUSES.get(cause)
    return known.explanation if known is not None else "Not in the vocabulary of causes."


def explain_failure(reason: str, detail: str | None) -> str:
    """The line for a call that left no tokens: its detail's where that is a cause itself, which says more."""
    return explain(detail if detail is not None and is_known(detail) else reason)


def in_words(detail: str | None, cause: str | None = None) -> str:
    """A rollout's detail for a reader: behind each code what it means, in brackets; a sentence stays as it is.

    Codes are causes and what the witnesses said; several are joined by commas, and may bring something of their own
    along: `no_content_match,witness_disagreement[response_id=…;content=…]`; after `; ` a sentence may follow. A `cause`
    that is said beside it is left out, and so is what vLLM says of a stack trace above, which is nowhere near.
    """
    detail = _NOWHERE.sub("", detail or "")
    codes, more, sentence = detail.partition("; ")
    parts = []
    for part in codes.split(","):
        if part == cause:
            continue
        code = _CODE.match(part)
        words = None if code is None else REASONS.get(code[0]) or (explain(code[0]) if is_known(code[0]) else None)
        if words is None:
            return detail
        parts.append(f"{part} ({words[0].lower()}{words[1:].rstrip('.')})")
    return ", ".join(parts) + more + sentence
