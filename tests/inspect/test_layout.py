"""Layout: every call has one place, parents come first, and size and depth do not matter."""

from __future__ import annotations

import random
import time

from workbench.inspect.layout import place_calls


def places(parents: list[str | None], on_chain: set[int] = frozenset(), rootless: set[int] = frozenset()):
    ids = [str(i) for i in range(len(parents))]
    flags = range(len(parents))
    return place_calls(ids, parents, [i in on_chain for i in flags], [i in rootless for i in flags])


def test_the_chain_has_the_first_row_and_side_calls_their_own():
    spots = {p.call: (p.row, p.column) for p in places([None, "0", "0", "2", "1"], on_chain={0, 2, 3})}
    assert spots == {0: (0, 0), 2: (0, 1), 3: (0, 2), 1: (1, 1), 4: (1, 2)}


def test_every_call_is_placed_once_and_after_its_parent():
    rng = random.Random(1)
    parents = [None if i < 3 or rng.random() < 0.02 else str(rng.randrange(i)) for i in range(2_000)]
    spots = places(parents)
    assert sorted(p.call for p in spots) == list(range(2_000))
    order = {p.call: n for n, p in enumerate(spots)}
    assert all(p.parent is None or order[p.parent] < order[p.call] for p in spots)
    assert len({(p.row, p.column) for p in spots}) == 2_000


def test_ten_thousand_calls_in_one_chain_take_no_recursion_and_little_time():
    parents = [None, *(str(i) for i in range(9_999))]
    began = time.process_time()
    spots = places(parents, on_chain=set(range(10_000)))
    assert time.process_time() - began < 2.0
    assert spots[-1].column == 9_999 and {p.row for p in spots} == {0}


def test_ten_thousand_siblings_are_placed():
    spots = places([None, *["0"] * 9_999])
    assert len({p.row for p in spots}) == 9_999


def test_circles_and_strangers_are_placed_all_the_same():
    spots = places(["1", "0", "7", "3"])
    assert sorted(p.call for p in spots) == [0, 1, 2, 3]
    assert all(p.parent is None for p in spots if p.call in (2, 3))


def test_calls_without_a_place_in_the_tree_share_the_last_row():
    spots = {p.call: (p.row, p.column) for p in places([None, None, None], on_chain={0}, rootless={1, 2})}
    assert spots == {0: (0, 0), 1: (1, 0), 2: (1, 1)}
