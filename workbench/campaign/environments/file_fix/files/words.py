"""Counting and shortening words."""


def counts(text):
    """How often each word occurs, whatever its case."""
    found: dict[str, int] = {}
    for word in text.lower().split():
        found[word] = found.get(word, 0) + 1
    return found


def most_common(text):
    """The most frequent word; of several, the first in the alphabet."""
    found = counts(text)
    return min(found, key=lambda word: (-found[word], word))


def shorten(text, limit):
    """At most `limit` characters, with … in place of what was cut."""
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"
