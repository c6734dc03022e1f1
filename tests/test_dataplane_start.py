"""What the data plane refuses before it starts, and what it leaves where it does not come up in time.

Ray is asked through stand-ins here; that it starts and stops for real is in test_dataplane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import NonTensorStack, TensorDict

from workbench import dataplane
from workbench.errors import DeadlineExceeded, SetupError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A Ray of one node with eight slots, and a data plane on none of them; the slots can be changed."""
    slots = {"total": 8.0, "free": 8.0, "node": 8.0}
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.7"}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [node | {"Resources": {"CPU": slots["node"]}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": slots["total"]})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": slots["free"]})
    monkeypatch.setattr(dataplane, "_controller", lambda: None)
    return slots


def test_without_a_ray_it_says_what_to_call_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(SetupError, match=r"call ray\.init before workbench\.dataplane\.start"):
        dataplane.start()


def test_a_node_that_cannot_hold_its_share_of_the_units_is_named(cluster: dict[str, float]) -> None:
    cluster["node"] = 1.0
    with pytest.raises(SetupError, match=r"node 10\.0\.0\.7 .* has 1 logical CPUs and is to hold 2 storage units"):
        dataplane.start(2)


def test_slots_of_an_actor_that_has_just_ended_are_waited_for(
    cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray frees them a moment later."""
    cluster["free"] = 0.0
    monkeypatch.setattr(dataplane.time, "sleep", lambda seconds: cluster.update(free=8.0))
    assert dataplane._logical_cpus(3) == (8.0, 8.0)


def test_what_was_started_of_one_that_does_not_come_up_is_killed(
    cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []

    def call(function: Any, timeout_s: float, awaited: str) -> None:
        monkeypatch.setattr(dataplane, "_controller", lambda: "half started")
        raise DeadlineExceeded(f"{awaited} took longer than {timeout_s:g} s")

    monkeypatch.setattr(dataplane, "_call", call)
    monkeypatch.setattr(ray, "kill", killed.append)
    with pytest.raises(DeadlineExceeded, match="3 actors of the data plane to start"):
        dataplane.start(2, start_timeout_s=1.0)
    assert killed == ["half started"]


def test_a_batch_without_columns_has_no_rows() -> None:
    assert dataplane.split_rows(TensorDict({}, batch_size=[0])) == []


@pytest.mark.parametrize(
    "column",
    [
        torch.nested.as_nested_tensor([torch.tensor([5]), torch.tensor([6, 7])], layout=torch.jagged),
        torch.nested.as_nested_tensor([torch.tensor([5]), torch.tensor([6, 7])]),
        NonTensorStack(torch.tensor([5]), torch.tensor([6, 7])),
    ],
    ids=["jagged", "strided", "stack"],
)
def test_rows_are_the_same_whatever_container_their_column_came_in(column: Any) -> None:
    rows = dataplane.split_rows(TensorDict({"ids": column}, batch_size=[2]))
    assert [row["ids"].tolist() for row in rows] == [[5], [6, 7]]
    assert all(row["ids"].dtype == np.int64 for row in rows)
