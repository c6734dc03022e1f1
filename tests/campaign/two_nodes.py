"""A campaign on a Ray cluster of two nodes, both on this machine, in a process of its own: python two_nodes.py FOLDER

Two raylets, each with its own processes, make two nodes: what differs from two machines is that they share a file
system and an address. The engine is scripted; Ray, TransferQueue, gateway, finalizers and trainer are real.
Writes FOLDER/seen.json: what a test then looks at.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from campaign.scripted_fleet import Running, ScriptedFleet, scripted_recipe

from workbench import dataplane, models, runs
from workbench.campaign.controller import run_campaign
from workbench.campaign.fleet import Fleet
from workbench.campaign.machines.node_check import check_nodes
from workbench.campaign.machines.placement import Bundle
from workbench.campaign.resume import resumable
from workbench.campaign.verify import verify_run
from workbench.errors import SetupError, WorkbenchError
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.pool import FinalizerPool

#: On a node with this before everything else in its path, one package cannot be found.
HIDES_A_PACKAGE = """
from importlib import metadata
found = metadata.version
def version(name):
    if name == "TransferQueue":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""


class ClusterFleet(ScriptedFleet):
    """A scripted engine in a cluster that the fleet joins as a campaign does."""

    _start_ray = Fleet._start_ray
    _start_data_plane = Fleet._start_data_plane


class ClusterRunning(Running):
    def _make_fleet(self, *args: Any, **kwargs: Any) -> ScriptedFleet:
        self.fleet = ClusterFleet(*args, **kwargs)
        return self.fleet


def standing(fleet: Fleet) -> dict[str, list[str]]:
    """What stands on each node: placed actors by name, storage units too."""
    import ray

    where = {
        node: [str(bundle).partition(" (")[0] for bundle in there] for node, there in fleet.placement.nodes().items()
    }
    for name, actor in fleet._data_plane_actors.items():
        node = ray.get(actor.__ray_call__.remote(lambda self: __import__("ray").get_runtime_context().get_node_id()))
        where.setdefault(node, []).append(name)
    return where


def a_third_node(folder: Path, cluster: Any) -> dict[str, Any]:
    """One that lacks a package, and is lost with a finalizer as the only part on it."""
    import ray

    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDES_A_PACKAGE)
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    node = cluster.add_node(num_cpus=1, object_store_memory=10**8, env_vars={"PYTHONPATH": path})
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)

    def looked() -> str:
        try:
            check_nodes({node.node_id: [Bundle("finalizer", 0, 1)]}, folder / "looked", models.resolve("tiny"), 180.0)
        except SetupError as error:
            return str(error)
        return ""

    lacking = looked()
    pool = asyncio.run(lose_a_finalizers_node(folder, cluster, node))
    return {"lacking": lacking, "pool": pool, "gone": looked()}


async def lose_a_finalizers_node(folder: Path, cluster: Any, node: Any) -> list[str]:
    """Kinds of what its pool reports."""
    import ray
    from finalizer.test_pool import Clerk
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}], strategy="STRICT_PACK", _soft_target_node_id=node.node_id)
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    kinds: list[str] = []
    pool = FinalizerPool(
        lambda number: Clerk.options(num_cpus=1, scheduling_strategy=place).remote(str(folder / "log.jsonl")),
        1,
        timeout_s=600.0,
        replace_timeout_s=200.0,
        report=lambda kind, **fields: kinds.append(kind),
    )
    await pool.start(200.0)
    assert ray.util.placement_group_table(group)["bundles_to_node_id"] == {0: node.node_id}
    rollouts = [RolloutOutcome(rollout_id="run.0.0.0", index=0)]
    request = FinalizationRequest(group_id="silent", weight_version=0, rollouts=rollouts)
    asked = asyncio.create_task(pool.finalize(request))  # the first finalizer never answers
    deadline = time.monotonic() + 60
    while not (folder / "log.jsonl").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await asyncio.to_thread(cluster.remove_node, node, False)
    finalized = await asyncio.wait_for(asked, 240.0)
    await pool.stop(5.0)
    return [*kinds, finalized.group_id]


async def campaign(folder: Path, cluster: Any, lost: Any, address: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    run_dir = folder / "run"
    settings = (
        f"ray.address={address}", "ray.placement=spread", "engine.workers=2", "data_plane.storage_units_per_node=1",
        "finalizer.actors=1", "train.steps=200", "ray.placement_timeout_s=120",
    )  # fmt: skip
    recipe = scripted_recipe(folder, *settings)
    async with ClusterRunning(recipe, run_dir) as running:
        await running.until_under_way()
        assert running.fleet is not None
        seen["standing"] = await asyncio.to_thread(standing, running.fleet)
        seen["lost"] = lost.node_id
        seen["placed"] = running.events("placed")[0]["nodes"]
        statuses = await asyncio.gather(*(actor.status.remote() for actor in running.fleet.policy.actors))
        seen["urls"], seen["versions"] = running.fleet.policy.urls, [each["weight_version"] for each in statuses]
        began = time.monotonic()
        await asyncio.to_thread(cluster.remove_node, lost, False)
        try:
            await running.task
        except WorkbenchError as error:
            seen["error"], seen["error_type"] = str(error), type(error).__name__
        seen["ended_within_s"] = time.monotonic() - began
        seen["survivors"] = await running.survivors()
    seen["state"] = runs.open(run_dir).campaign["state"].to_list()
    report = verify_run(run_dir)
    seen["verifies"], seen["groups"] = report.ok, report.groups
    steps = runs.open(run_dir).steps.height

    # On the node that is left, from the records alone, and at once: most often before Ray has given the other one up.
    rest = resumable(run_dir, ["engine.workers=1", f"train.steps={steps + 2}"])
    result = await run_campaign(rest, run_dir, resume=True, make_fleet=ClusterFleet)
    seen["steps_before"], seen["steps_after"] = steps, result.steps
    seen["verifies_after"] = verify_run(run_dir).ok
    seen["left_by_looks"] = [path.name for path in run_dir.glob(".node-*")]
    return seen


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 6, "object_store_memory": 10**8, "include_dashboard": False,
            "_system_config": dict(dataplane.LOCAL_RAY),
        },
    )  # fmt: skip
    try:
        lost = cluster.add_node(num_cpus=4, object_store_memory=10**8)
        seen = asyncio.run(campaign(folder, cluster, lost, cluster.address))
        seen |= a_third_node(folder, cluster)
        (folder / "seen.json").write_text(json.dumps(seen, indent=1))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
