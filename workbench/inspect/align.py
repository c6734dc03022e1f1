"""Align: where two rows of ids are equal, and where they part.

In: two id arrays. Out: equal stretches `[one, other, length]`, in order in both. First the common beginning and end;
between them, windows of eight ids that occur exactly once in either row are taken as anchors (the longest run of them
that is in order in both, after Bram Cohen's patience diff) and grown in both directions; what is then still open and
small is compared token by token, where fewer than three equal ids count as chance. Invariants: every stretch is equal
id for id; the first one ends at the first diverging id. No text is looked at.
50,000 ids against 50,000 take well under half a second.
"""

from __future__ import annotations

from bisect import bisect_left
from difflib import SequenceMatcher

import numpy as np

Stretch = tuple[int, int, int]
_WINDOW = 8
_SMALL = 200
_SHORTEST = 3


def first_difference(one: np.ndarray, other: np.ndarray) -> int | None:
    """Position of the first id in which the rows differ (one may just be longer); None for equal rows."""
    size = min(one.size, other.size)
    differing = np.flatnonzero(one[:size] != other[:size])
    if differing.size:
        return int(differing[0])
    return None if one.size == other.size else size


def equal_stretches(one: np.ndarray, other: np.ndarray) -> list[Stretch]:
    """Equal stretches of two rows of ids, in order, none empty."""
    prefix = first_difference(one, other)
    if prefix is None:
        return [(0, 0, one.size)] if one.size else []
    room = min(one.size, other.size) - prefix
    suffix = first_difference(one[::-1][:room], other[::-1][:room]) if room else 0
    suffix = room if suffix is None else suffix
    stretches: list[Stretch] = [(0, 0, prefix)] if prefix else []
    at_one, at_other = prefix, prefix
    end_one, end_other = one.size - suffix, other.size - suffix
    for start_one, start_other, length in _anchored(one[prefix:end_one], other[prefix:end_other]):
        start_one, start_other = start_one + prefix, start_other + prefix
        stretches += _small(one, other, at_one, start_one, at_other, start_other)
        stretches.append((start_one, start_other, length))
        at_one, at_other = start_one + length, start_other + length
    stretches += _small(one, other, at_one, end_one, at_other, end_other)
    if suffix:
        stretches.append((end_one, end_other, suffix))
    # Each is as long as it can be on both sides, so no two of them adjoin.
    return stretches


def _anchored(one: np.ndarray, other: np.ndarray) -> list[Stretch]:
    """Stretches grown from anchors, in order and without overlap."""
    if min(one.size, other.size) < _WINDOW:
        return []
    hash_one, hash_other = _windows(one), _windows(other)
    once_one, once_other = _once(hash_one), _once(hash_other)
    _, left, right = np.intersect1d(hash_one[once_one], hash_other[once_other], assume_unique=True, return_indices=True)
    pairs_one, pairs_other = once_one[left], once_other[right]
    order = np.argsort(pairs_one)
    pairs_one, pairs_other = pairs_one[order], pairs_other[order]
    kept = _longest_rising(pairs_other.tolist())
    stretches: list[Stretch] = []
    at_one = at_other = 0
    for k in kept:
        a, b = int(pairs_one[k]), int(pairs_other[k])
        if a < at_one or b < at_other:
            continue
        back = _equal_run(one[at_one:a][::-1], other[at_other:b][::-1])
        forth = _equal_run(one[a:], other[b:])
        if forth == 0:
            continue
        stretches.append((a - back, b - back, back + forth))
        at_one, at_other = a + forth, b + forth
    return stretches


def _windows(ids: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every window of ids; a collision costs an anchor, never a wrong stretch."""
    mixed = (ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    total = np.zeros(ids.size - _WINDOW + 1, dtype=np.uint64)
    for k in range(_WINDOW):
        total = total * np.uint64(0x100000001B3) + mixed[k : k + total.size]
    return total


def _once(hashes: np.ndarray) -> np.ndarray:
    """Positions of the windows that occur exactly once."""
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return np.sort(first[counts == 1])


def _longest_rising(values: list[int]) -> list[int]:
    """Indices of a longest strictly rising subsequence (patience sorting)."""
    tails: list[int] = []
    last_at: list[int] = []
    before = [-1] * len(values)
    for i, value in enumerate(values):
        place = bisect_left(tails, value)
        if place == len(tails):
            tails.append(value)
            last_at.append(i)
        else:
            tails[place], last_at[place] = value, i
        before[i] = last_at[place - 1] if place else -1
    chain: list[int] = []
    i = last_at[-1] if last_at else -1
    while i >= 0:
        chain.append(i)
        i = before[i]
    return chain[::-1]


def _equal_run(one: np.ndarray, other: np.ndarray) -> int:
    """How many ids are equal from the start on; looked at in growing pieces, because most runs are short."""
    room, done, piece = min(one.size, other.size), 0, 64
    while done < room:
        differing = np.flatnonzero(one[done : min(room, done + piece)] != other[done : min(room, done + piece)])
        if differing.size:
            return done + int(differing[0])
        done, piece = done + piece, piece * 4
    return room


def _small(one: np.ndarray, other: np.ndarray, a: int, a_end: int, b: int, b_end: int) -> list[Stretch]:
    if not (0 < a_end - a <= _SMALL and 0 < b_end - b <= _SMALL):
        return []
    matcher = SequenceMatcher(None, one[a:a_end].tolist(), other[b:b_end].tolist(), autojunk=False)
    return [(a + m.a, b + m.b, m.size) for m in matcher.get_matching_blocks() if m.size >= _SHORTEST]
