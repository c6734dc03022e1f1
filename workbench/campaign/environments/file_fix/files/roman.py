"""Roman numerals from 1 to 3999."""

VALUES = [
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
    (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
]  # fmt: skip


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError("expected 1 to 3999")
    text = ""
    for value, letters in VALUES:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    total = 0
    for value, letters in VALUES:
        while text.startswith(letters):
            total += value
            text = text[len(letters) :]
    if text:
        raise ValueError("not a numeral")
    return total
