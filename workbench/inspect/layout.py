"""Layout: place the calls of one rollout as root-to-leaf paths.

In: calls in ledger order with their parent links and the set on the terminal chain. Out: one `Place` a call (row =
path, column = depth), the chain in row 0. Invariants: a parent comes before its children in the order given back; a
path keeps its row until it forks, the first child (the chain's, where there is one) inherits it. Not here: drawing.

Iterative, one pass over the calls and one over the tree: 10,000 calls in a chain are as fine as 10,000 siblings. A link
that points nowhere or round in a circle does not hide its call: such calls come last, as roots of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where one call stands. `call` is its position in the input; `parent` is the parent's, or None."""

    call: int
    row: int
    column: int
    parent: int | None


def place_calls(
    call_ids: Sequence[str], parent_ids: Sequence[str | None], on_chain: Sequence[bool], rootless: Sequence[bool]
) -> list[Place]:
    """Places of all calls, in drawing order (a parent before its children, the chain first).

    `rootless[i]` marks calls that have no place in the tree (failed before a parent was known, unresolved): they share
    rows of their own below the tree, side by side, and are linked to nothing.
    """
    by_id = {call_id: i for i, call_id in enumerate(call_ids) if not rootless[i]}
    children: list[list[int]] = [[] for _ in call_ids]
    roots: list[int] = []
    for i, parent_id in enumerate(parent_ids):
        if rootless[i]:
            continue
        parent = by_id.get(parent_id) if parent_id is not None else None
        (children[parent] if parent is not None and parent != i else roots).append(i)

    places: list[Place] = []
    seen = [False] * len(call_ids)
    next_row = 0

    def chain_first(nodes: list[int]) -> list[int]:
        return sorted(nodes, key=lambda i: (not on_chain[i], i))

    stack: list[tuple[int, int | None, int, int]] = [(i, None, -1, 0) for i in reversed(chain_first(roots))]
    while stack:
        node, parent, inherited, column = stack.pop()
        seen[node] = True
        if inherited < 0:
            row, next_row = next_row, next_row + 1
        else:
            row = inherited
        places.append(Place(node, row, column, parent))
        ordered = chain_first(children[node])
        for position in range(len(ordered) - 1, -1, -1):
            stack.append((ordered[position], node, row if position == 0 else -1, column + 1))

    for i in range(len(call_ids)):
        if not seen[i] and not rootless[i]:
            places.append(Place(i, next_row, 0, None))
            next_row += 1
    loose = [i for i in range(len(call_ids)) if rootless[i]]
    places.extend(Place(i, next_row, column, None) for column, i in enumerate(loose))
    return places
