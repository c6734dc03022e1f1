"""Nearest answer: what a scored response that no captured call gave nearly is.

In: the items that were noted of a rollout's calls, the response. Out: one sentence with the nearest answer that was
served, in what the two differ, and the next step.
Invariant: it decides nothing. Whether a response is a witness is a matter of fingerprints, to the character
(attribution); an answer that is merely near may be that of another call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.ledger.attribution import scored_items
from workbench.ledger.differences import begin_alike
from workbench.ledger.forms import alike, forms_of
from workbench.ledger.items import CallItems, ItemDigest, visible_text

_EXCERPT_CHARS = 60
_CALL_CHARS = 12
_NEXT = (
    'Next: leave the answer to the character (in Python `print(answer, end="")`, and nothing else on that output), or '
    "the served response itself, whose id is enough"
)


def nearest_answer(calls: Sequence[CallItems], response: Mapping[str, Any]) -> str | None:
    """What `response` nearly is; None where it has no message, or no answer of `calls` has a text."""
    messages = [item for item in scored_items(response) if isinstance(item, Mapping)]
    left = "".join(visible_text(item.get("content")) for item in messages)
    answers = [
        (call.model_call_id[:_CALL_CHARS], item, _text(item))
        for call in calls
        for item in call.items[call.response_at :]
        if item.authored and item.role != "reasoning"
    ]
    answers = [answer for answer in answers if answer[2]]
    if not messages or not answers:
        return None
    if not left:
        call, _, served = answers[-1]
        return f"the response that was left has no text; call {call} answered {_excerpt(served)!r}. {_NEXT}"
    whole = forms_of(left)
    best = max(
        range(len(answers)),
        key=lambda order: (bool(_alike(answers[order], whole)), _common(answers[order][2], left), order),
    )
    return f"{_told(left, whole, answers[best])}. {_NEXT}"


_Answer = tuple[str, ItemDigest, str]


def _told(left: str, whole: Sequence[str], answer: _Answer) -> str:
    call, item, served = answer
    cut, the_answer = _cut(item), f"the answer of call {call}"
    if left == served and not cut:
        return f"the text that was left is {the_answer}, whose tool calls or other parts are missing or differ"
    if served in left and not cut:
        around = _around(left, served)
        return f"the text that was left is {the_answer} with {around}"
    if left in served and not cut:
        return f"the text that was left is {the_answer} without {_around(served, left)}"
    if (only := _alike(answer, whole)) is not None:
        return f"the text that was left is nearly {the_answer}: {only}"
    if not _common(served, left):
        return f"no answer that was served is like the text that was left; call {call} answered {_excerpt(served)!r}"
    at = begin_alike(served, left)
    return (
        f"nearest to the text that was left is {the_answer}; from character {at:,} on {_excerpt(served[at:])!r} was "
        f"served and {_excerpt(left[at:])!r} was left"
    )


def _around(long: str, short: str) -> str:
    before, _, after = long.partition(short)
    said = [f"{_excerpt(text)!r} {where} it" for text, where in ((before, "before"), (after, "after")) if text]
    return " and ".join(said)


def _alike(answer: _Answer, whole: Sequence[str]) -> str | None:
    _, item, served = answer
    if not _cut(item):
        return alike(forms_of(served), whole)
    # Of a long text the forms were kept; of several parts each has its own, which say nothing of the whole.
    leaves = [leaf for leaf in item.leaves if leaf.kind == "content"]
    return alike(leaves[0].forms, whole) if len(leaves) == 1 else None


def _common(served: str, left: str) -> int:
    """Characters in common: all of one that stands in the other, else those at the beginning."""
    if served in left or left in served:
        return min(len(served), len(left))
    return begin_alike(served, left)


def _text(item: ItemDigest) -> str:
    return "".join(leaf.text for leaf in item.leaves if leaf.kind == "content")


def _cut(item: ItemDigest) -> bool:
    return any(leaf.forms for leaf in item.leaves)


def _excerpt(text: str) -> str:
    return text[:_EXCERPT_CHARS] + "…" * (len(text) > _EXCERPT_CHARS)
