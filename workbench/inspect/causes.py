"""Causes: the vocabulary's one line about a cause, wherever a view names one."""

from __future__ import annotations

from workbench.wire import Cause

_CAUSES = {cause.value: cause for cause in Cause}


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
