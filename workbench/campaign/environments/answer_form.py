"""Answer form: reading `Guess: 42` out of what a model wrote.

A small model first learns to say a thing in the form asked for, long before it says the right thing, so the form is
scored in steps: the whole answer is the form → 1; the form stands somewhere in it → 0.5; a number stands
somewhere → 0.2; no number → 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """`form` in {0, 0.2, 0.5, 1}; `number` is None when none was found."""

    form: float
    number: int | None


def read_answer(label: str, text: str) -> Reading:
    """Read one answer that was asked for as `<label>: <whole number>`."""
    form = re.compile(rf"{re.escape(label)}: (-?\d{{1,9}})(?!\d)")
    text = text.strip()
    if whole := form.fullmatch(text):
        return Reading(1.0, int(whole[1]))
    if inside := form.search(text):
        return Reading(0.5, int(inside[1]))
    if number := re.search(r"(?<!\d)-?\d{1,9}(?!\d)", text):
        return Reading(0.2, int(number[0]))
    return Reading(0.0, None)
