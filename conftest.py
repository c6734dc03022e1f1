"""The order of the whole suite: fast tests first, then those that start Ray or a browser, then those with an engine.

A slip in the arithmetic is then reported in seconds, and the session's Ray is up before the engines need the cores.
Not here: fixtures (`tests/conftest.py`).
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def weight(item: pytest.Item) -> int:
        if item.get_closest_marker("engine"):
            return 2
        if item.get_closest_marker("ray") or item.get_closest_marker("browser"):
            return 1
        # Notebook cells (nbval) start a kernel each notebook; they belong behind the fast ones, in cell order.
        return 1 if item.nodeid.split("::")[0].endswith(".ipynb") else 0

    items.sort(key=weight)  # stable: within a kind the order of the files stays
