"""Small matrices as lists of rows."""


def transpose(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def multiply(left, right):
    columns = transpose(right)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def trace(rows):
    return sum(rows[place][place] for place in range(len(rows)))
