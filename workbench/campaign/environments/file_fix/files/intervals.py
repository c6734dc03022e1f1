"""Closed intervals of whole numbers, as pairs (low, high)."""


def merge(intervals):
    """Overlapping or touching intervals become one; the result is in order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def length(interval):
    """How many whole numbers lie in it."""
    low, high = interval
    return high - low + 1
