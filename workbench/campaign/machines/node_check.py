"""Node check: before anything heavy starts on a cluster, every node that carries a part of the campaign is looked at.

    placement ─► nodes ─► a task on each (node_look) ─► same Python, packages and code? shared directories there?

Invariant: a node that lacks a package, has another version, or does not see the run's directory or the model is named
in one sentence with what it lacks, at set-up; not minutes later as an import error in a log on that node.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.campaign.machines import node_look
from workbench.campaign.machines.environment_record import PACKAGES
from workbench.campaign.machines.placement import Bundle
from workbench.errors import SetupError


def check_nodes(
    nodes: Mapping[str, Sequence[Bundle]], run_dir: Path, model_path: Path, timeout_s: float
) -> dict[str, dict[str, Any]]:
    """Look at each of `nodes` (Ray's node id -> what stands there); returns what each said. Blocks, for at most
    `timeout_s` a node: it starts a process for it, and on a busy one that takes a minute.

    Raises SetupError with the first thing that is wrong, naming the node, what it lacks and what to do.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    # By value: by name it could not arrive where this package is missing, which is what it is to tell.
    ray.cloudpickle.register_pickle_by_value(node_look)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        reads = {str(model_path / "config.json"): "", str(model_path / "tokenizer.json"): ""}
        words = {node: secrets.token_hex(8) for node in nodes}
        here = node_look.look(list(PACKAGES), reads, str(run_dir / ".node-here"), "here")
        task = ray.remote(node_look.look)
        asked = {
            node: task.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(list(PACKAGES), reads, str(run_dir / f".node-{node}"), words[node])
            for node in nodes
        }
        said: dict[str, dict[str, Any]] = {}
        for node, reference in asked.items():
            name = f"node {addresses.get(node, node)} ({', '.join(sorted({b.role for b in nodes[node]}))})"
            try:
                said[node] = ray.get(reference, timeout=timeout_s)
            except ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                raise SetupError(
                    f"{name} could not be looked at: {why[0]} Next: see whether it runs the same Python and Ray."
                ) from error
            if lack := _lack(here, said[node], run_dir, run_dir / f".node-{node}", words[node]):
                raise SetupError(f"{name} {lack}")
        return said
    finally:
        ray.cloudpickle.unregister_pickle_by_value(node_look)
        for left in run_dir.glob(".node-*"):
            left.unlink(missing_ok=True)


def _lack(here: Mapping[str, Any], there: Mapping[str, Any], run_dir: Path, written: Path, word: str) -> str:
    """What is wrong with a node, as the rest of a sentence that begins with its name; empty where nothing is."""
    same = "Next: install the same packages there, best from one shared environment."
    if there["code"] is None:
        return f"lacks the package workbench (its Python is {there['executable']}). {same}"
    for name, version in here["packages"].items():
        found = there["packages"][name]
        if version is not None and found is None:
            return f"lacks the package {name} ({version} here; its Python is {there['executable']}). {same}"
        if version is not None and found != version:
            return f"has {name} {found}, and {version} is here. {same}"
    if there["python"].rpartition(".")[0] != here["python"].rpartition(".")[0]:
        return f"runs Python {there['python']}, and {here['python']} is here. {same}"
    if there["code"] != here["code"]:
        return "has another workbench than this machine, of the same version. Next: bring both to one commit."
    for path, digest in here["reads"].items():
        if there["reads"][path] != digest:
            what = there["reads"][path]
            seen = "another file" if len(what) == 64 else what
            return (
                f"does not see the model as this machine does: {path}: {seen}. Next: keep models on a shared file "
                "system (model.path, WORKBENCH_HOME), under the same path on every node."
            )
    try:
        arrived = written.read_text() == word
    except OSError:
        arrived = False
    if there["written"] != "written" or not arrived:
        why = there["written"] if there["written"] != "written" else "what it wrote there is not seen here"
        return (
            f"does not share the run's directory {run_dir}: {why}. Weights, checkpoints and records go there. Next: "
            "set reports.dir to a directory on a file system that every node mounts under the same path."
        )
    return ""
