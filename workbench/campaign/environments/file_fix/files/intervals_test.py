from intervals import length, merge


def test_touching_intervals_merge():
    assert merge([(1, 2), (3, 5)]) == [(1, 5)]


def test_apart_stay_apart():
    assert merge([(7, 9), (1, 2)]) == [(1, 2), (7, 9)]


def test_inner_interval_does_not_shorten():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]


def test_length_counts_both_ends():
    assert length((4, 4)) == 1
