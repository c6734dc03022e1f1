"""Heuristic: choose the terminal call from parent links alone, for trajectories that nobody attributes.

    earliest root with descendants, else the earliest root  →  down the only child, or the only child that went on

It is a guess: a retried single-turn root looks like two finished rollouts, so our own campaigns bring the scored
response as a witness (attribution) and this is left for ledgers written elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SELECTED = "selected"


class Link(Protocol):
    """What the walk looks at; a `CallRecord` is one."""

    @property
    def model_call_id(self) -> str: ...
    @property
    def parent_call_id(self) -> str | None: ...
    @property
    def admitted_at(self) -> float | None: ...


@dataclass(frozen=True)
class Selection:
    """`terminal` is a model call id, or None; `reason` is `selected` or why nothing was; `candidates` are, for
    `ambiguous_terminal`, the calls that could not be told apart."""

    terminal: str | None
    reason: str
    candidates: tuple[str, ...] = ()


def select_terminal(records: Sequence[Link]) -> Selection:
    """Walk the parent links of a manifest's records, in manifest order, to the call that ends the trajectory.

    Reasons: `selected`, `no_records`, `duplicate_call_id`, `orphaned_row` (a parent that is not there), `no_root`,
    `ambiguous_terminal` (several children went on, or several ended). Two roots of the same `admitted_at` keep their
    order in the list; a root without a time comes last.
    """
    if not records:
        return Selection(None, "no_records")
    ids = [record.model_call_id for record in records]
    known = set(ids)
    if len(known) != len(ids):
        return Selection(None, "duplicate_call_id")
    children: dict[str, list[str]] = defaultdict(list)
    roots: list[tuple[float, int, str]] = []
    for position, record in enumerate(records):
        if record.parent_call_id is None:
            # None sorts behind every time: an unstamped root never displaces a stamped one.
            at = float("inf") if record.admitted_at is None else record.admitted_at
            roots.append((at, position, record.model_call_id))
        elif record.parent_call_id not in known:
            return Selection(None, "orphaned_row")
        else:
            children[record.parent_call_id].append(record.model_call_id)
    if not roots:
        return Selection(None, "no_root")
    in_order = [call_id for _, _, call_id in sorted(roots)]
    call_id = next((root for root in in_order if children[root]), in_order[0])
    while following := children[call_id]:
        if len(following) > 1:
            alike = following
            following = [child for child in following if children[child]]
            if len(following) != 1:
                return Selection(None, "ambiguous_terminal", tuple(following or alike))
        call_id = following[0]
    return Selection(call_id, SELECTED)
