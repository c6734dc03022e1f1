from matrix import multiply, trace, transpose


def test_transpose_turns_rows_into_columns():
    assert transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]


def test_multiply():
    assert multiply([[1, 2]], [[3], [4]]) == [[11]]


def test_trace_takes_the_whole_diagonal():
    assert trace([[1, 9], [9, 5]]) == 6
