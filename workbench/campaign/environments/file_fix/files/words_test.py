from words import counts, most_common, shorten


def test_counts_ignore_case():
    assert counts("To be or not to be") == {"to": 2, "be": 2, "or": 1, "not": 1}


def test_most_common_breaks_ties_by_alphabet():
    assert most_common("b a b a c") == "a"


def test_short_text_stays():
    assert shorten("abc", 3) == "abc"


def test_long_text_fits_the_limit():
    assert shorten("abcdef", 4) == "abc…"
