"""The order of the whole suite, alone and on several processes.

One process: fast tests first, then those that start Ray or a browser, then those with an engine. A slip in the
arithmetic is then reported in seconds.

Several (`-n 2 --dist loadgroup`, as `make test` runs it): everything that starts Ray or an engine is one group, which
one process begins with, so that a machine of two cores never runs two engines; every other file is a group of its own,
and those that share executed notebooks are one. The waits of the first are filled with the work of the others.
Not here: fixtures (`tests/conftest.py`).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes to make or to run says how busy the machine is, not whether the property holds.
settings.register_profile("workbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workbench")

_FAST, _HEAVY, _ENGINE = range(3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_weight)  # stable: within a kind the order of the files stays
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -min(_weight(item), _HEAVY))
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("engine"):
        return _ENGINE
    return _HEAVY if item.get_closest_marker("ray") or item.get_closest_marker("browser") else _FAST


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("engine") or item.get_closest_marker("ray"):
        return "engines"
    if item.get_closest_marker("browser") or "executed_notebooks" in getattr(item, "fixturenames", ()):
        return "notebooks"
    return item.nodeid.split("::")[0]
