from roman import from_roman, to_roman


def test_there_and_back():
    for number in (1, 4, 9, 14, 40, 90, 400, 944, 2024, 3999):
        assert from_roman(to_roman(number)) == number


def test_known_numerals():
    assert to_roman(1994) == "MCMXCIV"
    assert from_roman("XLII") == 42


def test_zero_is_refused():
    try:
        to_roman(0)
    except ValueError:
        return
    raise AssertionError("0 has no numeral")
