"""Benchmarks: how fast the product is, against the reference implementation and against what the hardware allows.

    python -m benchmarks [question …]      from the repository's root; `make bench` does it from a fresh clone

One file a question, each with a `measure() -> list[Figure | Growth]`; the list of them is in `__main__`. They are no
tests: nothing here fails because a machine is slow. Not here: what a target means (the notebook says it), the
inspectors at full size (`benchmarks/inspectors.py`, on its own).
"""
