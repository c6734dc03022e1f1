"""Where actors stand, and what is said where there is no room for them; a cluster's real placement: test_two_nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from workbench.campaign.fleet import Fleet
from workbench.campaign.machines.placement import WORKER, Placement
from workbench.config import load_recipe
from workbench.errors import SetupError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Ray that makes no room; its nodes can be changed."""
    nodes: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray.util, "placement_group", lambda resources, strategy: SimpleNamespace(wait=lambda s: False))
    return nodes


def test_no_room_is_said_with_what_was_asked_for_and_what_the_nodes_have(cluster: list[dict[str, Any]]) -> None:
    placement = Placement(load_recipe("cpu_smoke", ["ray.placement_timeout_s=2"]))
    with pytest.raises(SetupError, match=r"\(local\) made no room within 2 s: asked for .*; its nodes have nothing\."):
        placement.reserve()
    cluster += [
        {"Alive": True, "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.8", "Resources": {}},
    ]
    with pytest.raises(SetupError, match=r"its nodes have 10\.0\.0\.7: 2 CPU, 1 GPU\. Next: start more nodes"):
        placement.reserve()
    with pytest.raises(KeyError, match="no place for policy worker 0"):
        placement.options(WORKER, 0)


async def test_routes_of_a_model_without_experts_are_refused_before_ray_starts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    recipe = load_recipe("cpu_smoke", [f"model.path={tiny_model}", "token_capture.routes=true"])
    fleet = Fleet(recipe, tmp_path)
    monkeypatch.setattr(fleet, "_check_machine", lambda: None)
    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(SetupError, match=r"token_capture\.routes is true and .* has no experts"):
        async with fleet:
            pass


async def test_a_second_ray_in_one_process_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(SetupError, match=r"Ray is already running in this process. Next: ray\.shutdown\(\)"):
        await Fleet(load_recipe("cpu_smoke"), tmp_path)._start_ray()
