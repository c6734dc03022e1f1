"""Relatives: how much of a request each recorded call shares, all calls in one walk of their tree.

In: calls of which each holds only the items that its parent does not have. Out: leading items and items at all that
each call's whole history has in common with a request, and the history of one of them.
Invariant: time grows with the items that are stored, not with the sum of the histories, which is its square.
Not here: what follows from it (drift), the items (items).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from workbench.ledger.items import CallItems, ItemDigest


def history(calls: Sequence[CallItems], order: int) -> list[ItemDigest]:
    """The whole request and response of `calls[order]`."""
    parents = _parents(calls)
    line = [order]
    while (parent := parents[line[-1]]) is not None:
        line.append(parent)
    whole: list[ItemDigest] = []
    for place in reversed(line):
        del whole[calls[place].skip :]
        whole += calls[place].items
    return whole


def shared_items(calls: Sequence[CallItems], came: Sequence[str]) -> list[tuple[int, int]]:
    """For each call: how many leading digests of its history `came` begins with, and how many it has at all."""
    children: list[list[int]] = [[] for _ in calls]
    roots: list[int] = []
    for order, parent in enumerate(_parents(calls)):
        (roots if parent is None else children[parent]).append(order)
    ranks = [(0, 0)] * len(calls)
    path = _Path(came)
    # Every call is entered, its children walked, and left again; a stack, because a chain may have thousands of calls.
    stack: list[tuple[int, int | None]] = [(root, None) for root in reversed(roots)]
    undo: list[tuple[int, list[str]]] = []
    while stack:
        order, parent = stack.pop()
        if order < 0:
            path.leave(*undo.pop())
            continue
        lead = 0 if parent is None else ranks[parent][0]
        undo.append(path.enter(calls[order], 0 if parent is None else calls[order].skip))
        ranks[order] = (path.lead(lead, len(path.digests) - len(calls[order].items)), path.shared)
        stack.append((-1, None))
        stack += [(child, order) for child in reversed(children[order])]
    return ranks


class _Path:
    """The history of the call that the walk is at, and what it has in common with `came`."""

    def __init__(self, came: Sequence[str]) -> None:
        self.digests: list[str] = []
        self.shared = 0
        self._came = came
        self._there, self._here = Counter(came), Counter[str]()

    def enter(self, call: CallItems, skip: int) -> tuple[int, list[str]]:
        """Go on from the first `skip` items to the call's own; what is returned undoes it."""
        begin, tail = min(skip, len(self.digests)), self.digests[skip:]
        self._drop(begin)
        self._add(item.digest for item in call.items)
        return begin, tail

    def leave(self, begin: int, tail: list[str]) -> None:
        self._drop(begin)
        self._add(tail)

    def lead(self, parents: int, begin: int) -> int:
        """Leading items in common, where the parent has `parents` of them and the call's own items begin at `begin`."""
        if parents < begin:
            return parents
        at = begin
        for one, other in zip(self.digests[begin:], self._came[begin:], strict=False):
            if one != other:
                break
            at += 1
        return at

    def _add(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.digests.append(digest)
            self._here[digest] += 1
            self.shared += self._here[digest] <= self._there[digest]

    def _drop(self, begin: int) -> None:
        for digest in self.digests[begin:]:
            self.shared -= self._here[digest] <= self._there[digest]
            self._here[digest] -= 1
        del self.digests[begin:]


def _parents(calls: Sequence[CallItems]) -> list[int | None]:
    """The place of each call's parent, which stands before it; None for a root and where there is no such call."""
    places: dict[str, int] = {}
    parents: list[int | None] = []
    for order, call in enumerate(calls):
        parents.append(places.get(call.parent) if call.parent else None)
        places[call.model_call_id] = order
    return parents
