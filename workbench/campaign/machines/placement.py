"""Placement: where the actors of a campaign stand, asked of Ray before any of them is started.

    recipe ─► bundles (what stands together on one node) ─► placement groups ─► options for each actor

Invariant: either there is room for all workers, finalizers and trainer ranks, or nothing is started and all of it is
given back: a campaign that got half of what it needs would hold it from others and wait for ever.
Not here: storage units, which TransferQueue deals out to all nodes in turn (data plane), starting the actors (fleet),
whether a node can run them (node_check).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.config import Recipe
from workbench.errors import SetupError

WORKER, FINALIZER, RANK = "policy worker", "finalizer", "trainer rank"


@dataclass(frozen=True)
class Bundle:
    """`count` actors of one role, beginning with number `first`, that stand together on one node."""

    role: str
    first: int
    count: int
    gpus_each: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """What Ray must have free on that node: a logical CPU for each actor, and its GPUs."""
        gpus = self.gpus_each * self.count
        return {"CPU": float(self.count)} | ({"GPU": float(gpus)} if gpus else {})

    def __str__(self) -> str:
        numbers = f"{self.first}" if self.count == 1 else f"{self.first} to {self.first + self.count - 1}"
        gpus = self.gpus_each * self.count
        return f"{self.role} {numbers} ({self.count} CPU{f', {gpus} GPU' if gpus else ''})"


def bundles(recipe: Recipe, *, training: bool = True) -> list[Bundle]:
    """Everything that is placed, the largest first: what needs a whole node must find one that is still empty."""
    gpu = recipe.ray.device == "gpu"
    placed = []
    if training:
        together = recipe.train.ranks_per_node or 1
        placed += [Bundle(RANK, first, together, int(gpu)) for first in range(0, recipe.train.ranks, together)]
    parts = recipe.engine.tensor_parallel if gpu else 0
    placed += [Bundle(WORKER, number, 1, parts) for number in range(recipe.engine.workers)]
    if recipe.token_capture.enabled:
        placed += [Bundle(FINALIZER, number, 1) for number in range(recipe.finalizer.actors)]
    return placed


class Placement:
    """The placement groups of one campaign. `reserve` and `release` block."""

    def __init__(self, recipe: Recipe, *, training: bool = True) -> None:
        self.bundles = bundles(recipe, training=training)
        self._recipe = recipe
        self._groups: list[tuple[Any, list[Bundle]]] = []

    def reserve(self) -> None:
        """Take the room that all actors need. Raises SetupError saying what was asked and what the nodes have."""
        import ray

        section = self._recipe.ray
        deadline = time.monotonic() + section.placement_timeout_s
        for together in self._taken_together():
            resources = [bundle.resources for bundle in together]
            group = ray.util.placement_group(resources, strategy=section.placement.upper())
            self._groups.append((group, together))
            if group.wait(max(1.0, deadline - time.monotonic())):
                continue
            self.release()
            raise SetupError(
                f"the Ray cluster ({section.address}) made no room within {section.placement_timeout_s:g} s: asked for "
                f"{in_words(self.bundles)}; its nodes have {_nodes_in_words()}. Next: start more nodes, or lower "
                "engine.workers, engine.tensor_parallel, train.ranks, train.ranks_per_node or finalizer.actors."
            )

    def _taken_together(self) -> list[list[Bundle]]:
        """Packed, all at once. Spread, role by role: Ray gives each bundle of a group a node of its own only as long as
        there are some, and cares no more for the others."""
        if self._recipe.ray.placement == "pack":
            return [self.bundles]
        roles = dict.fromkeys(bundle.role for bundle in self.bundles)
        return [[bundle for bundle in self.bundles if bundle.role == role] for role in roles]

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Options of the actor `number` of a role: its place and what it takes of it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for group, together in self._groups:
            for index, bundle in enumerate(together):
                if bundle.role == role and bundle.first <= number < bundle.first + bundle.count:
                    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                    return {"num_cpus": 1, "num_gpus": bundle.gpus_each, "scheduling_strategy": place}
        raise KeyError(f"no place for {role} {number}")

    def nodes(self) -> dict[str, list[Bundle]]:
        """What stands where: Ray's node id -> bundles."""
        import ray

        standing: dict[str, list[Bundle]] = {}
        for group, together in self._groups:
            where = ray.util.placement_group_table(group)["bundles_to_node_id"]
            for index, bundle in enumerate(together):
                standing.setdefault(where[index], []).append(bundle)
        return standing

    def described(self) -> dict[str, list[str]]:
        """What stands where, for the run's record: a node's address and id -> its parts."""
        import ray

        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return {f"{address[node]} {node[:8]}": [str(b) for b in there] for node, there in self.nodes().items()}

    def release(self) -> None:
        """Give the room back; harmless when none was taken."""
        import ray

        while self._groups:
            group, _ = self._groups.pop()
            if ray.is_initialized():
                ray.util.remove_placement_group(group)


def in_words(placed: Sequence[Bundle]) -> str:
    """Bundles for a sentence, equal ones counted: `4 × 8 trainer ranks (8 CPU, 8 GPU), 8 × policy worker (…)`."""
    counted: dict[tuple[str, int, int], int] = {}
    for bundle in placed:
        key = (bundle.role, bundle.count, bundle.gpus_each)
        counted[key] = counted.get(key, 0) + 1
    words = []
    for (role, count, gpus), times in counted.items():
        what = role if count == 1 else f"{count} {role}s together"
        words.append(f"{times} × {what} ({count} CPU{f', {gpus * count} GPU' if gpus else ''})")
    return ", ".join(words)


def _nodes_in_words() -> str:
    import ray

    words = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            words.append(f"{node['NodeManagerAddress']}: {has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU")
    return "; ".join(words) or "nothing"
