"""The order of the whole suite, alone and on several processes.

One process: fast tests first, then those that start Ray or a browser, then those with an engine. A slip in the
arithmetic is then reported in seconds.

Several (`-n 2`, as `make test` runs it): the files that start an engine are one group, which one process begins with,
so that a machine of two cores never runs two engines; those that start Ray without an engine are the next, which the
other begins with; those that share executed notebooks or a browser are another, and every other file is one of its
own. The waits of each are filled with the work of the others.
Not here: fixtures (`tests/conftest.py`).
"""

from __future__ import annotations

import functools
import gc
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent

# How long an example takes to make or to run says how busy the machine is, not whether the property holds.
settings.register_profile("workbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workbench")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes: the longest group first
        items.sort(key=lambda item: (_GROUPS.get(_group(_file(item.nodeid)), 3), _weight(item)))
    else:
        items.sort(key=_weight)  # stable: within a kind the order of the files stays


def pytest_collection_finish() -> None:
    gc.freeze()  # what the tests import lives as long as they do; no collection need walk through it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # By file, because the marks of a test do not reach the process that schedules: xdist 3.8 writes the groups of its
    # `loadgroup` into an attribute that pytest 9.2 no longer reads.
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatTheyStart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(_file(nodeid))

    return ByWhatTheyStart(config, log)


_ENGINES, _RAY, _NOTEBOOKS = "engines", "ray", "notebooks"
_GROUPS = {_ENGINES: 0, _RAY: 1, _NOTEBOOKS: 2}


@functools.cache
def _group(file: str) -> str:
    text = (ROOT / file).read_text()
    if re.search(r"\bmark\.engine\b", text):
        return _ENGINES
    if re.search(r"\bmark\.ray\b", text):
        return _RAY
    return _NOTEBOOKS if re.search(r"\bmark\.browser\b|\bexecuted_notebooks\b", text) else file


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("engine"):
        return 2
    return 1 if item.get_closest_marker("ray") or item.get_closest_marker("browser") else 0


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]
