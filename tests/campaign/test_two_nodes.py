"""A campaign over two nodes of a Ray cluster; one of them, with a storage unit on it, is killed in its middle.

What a lost node does is stated in docs/cluster.md: the run ends with the names of the parts that were on it, what was
finalised until then stays and verifies, and the run goes on from its records on the nodes that are left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

TESTS = Path(__file__).parents[1]
#: Ray takes a node for dead after a number of missed answers; the campaign's own deadlines in this test are seconds.
ENDS_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(TESTS / "campaign" / "two_nodes.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


def test_parts_stand_on_both_nodes_and_both_workers_have_the_new_weights(seen: dict[str, Any]) -> None:
    assert len(seen["standing"]) == 2
    for there in seen["standing"].values():
        assert sum(name.startswith("policy worker") for name in there) == 1
        assert sum("storage unit" in name for name in there) == 1
    recorded = sorted(len(there) for there in seen["placed"].values())
    assert len(recorded) == 2 and sum(recorded) == 4, "the run's record says what stood where"
    assert len(set(seen["urls"])) == 2 and not any("127.0.0.1" in url for url in seen["urls"])
    assert len(set(seen["versions"])) == 1 and seen["versions"][0] >= 1


def test_a_lost_node_ends_the_run_in_time_with_the_names_of_what_was_on_it(seen: dict[str, Any]) -> None:
    assert seen["error_type"] == "ComponentDied"
    on_it = [name for name in seen["standing"][seen["lost"]] if not name.startswith(("finalizer", "trainer rank 0"))]
    for name in on_it:
        assert name in seen["error"]
    assert "in flight" in seen["error"]
    assert seen["ended_within_s"] < ENDS_WITHIN_S
    assert seen["survivors"] == []
    assert seen["state"] == ["failed"]


def test_a_lost_storage_node_loses_nothing_that_was_finalised_and_the_run_goes_on_without_it(
    seen: dict[str, Any],
) -> None:
    assert seen["verifies"] and seen["groups"] >= 2
    assert seen["steps_after"] == seen["steps_before"] + 2
    assert seen["verifies_after"]
    assert seen["left_by_looks"] == []


def test_a_node_that_lacks_a_package_is_refused_with_the_packages_name(seen: dict[str, Any]) -> None:
    assert "(finalizer) lacks the package TransferQueue" in seen["lacking"]
    assert "install the same packages there" in seen["lacking"]


def test_a_node_that_is_lost_before_it_was_looked_at_is_named(seen: dict[str, Any]) -> None:
    assert "(finalizer) could not be looked at: " in seen["gone"]
    assert seen["gone"].endswith("Next: see whether it runs the same Python and Ray.")


def test_a_finalizer_whose_node_is_lost_is_replaced_on_another_node(seen: dict[str, Any]) -> None:
    assert seen["pool"] == ["finalizer_lost", "finalizer_replaced", "group_reconciled", "silent"]
