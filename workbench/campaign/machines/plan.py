"""Plan: what a run of a recipe would start, where and with which commands, without starting anything.

In: a checked recipe. Out: lines of text: Ray, places, processes, paths, commands, and what this machine lacks for it.
Invariant: every number and argument comes from the function that the run itself takes it from.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.campaign.machines.doctor import before_a_run
from workbench.campaign.machines.placement import WORKER, Bundle, bundles, in_words
from workbench.campaign.run_place import new_run_dir
from workbench.config import Recipe
from workbench.errors import ModelMissing
from workbench.models import resolve

RAY_PORT = 6379


def plan(
    recipe: Recipe,
    name: str,
    overrides: Sequence[str] = (),
    run_name: str | None = None,
    *,
    lacks: Sequence[str] | None = None,
) -> str:
    """The plan of `workbench run NAME OVERRIDES… [--run RUN_NAME]` as text. `lacks`: what `lacking` found before."""
    chosen = recipe.name if run_name is None else run_name
    run_dir = new_run_dir(recipe.reports.dir, chosen, named=run_name is not None).resolve()
    sections = {
        "ray": _ray(recipe),
        "places": _places(bundles(recipe), recipe),
        "processes": _processes(recipe),
        "paths": _paths(recipe, run_dir),
        "commands": _commands(recipe, name, overrides, run_name),
        "lacking": (lacking(recipe) if lacks is None else lacks) or ["nothing on this machine"],
    }
    lines = [f"Plan of {recipe.name}: nothing is started"]
    for title, content in sections.items():
        lines += [f"{title:<10} {line}" if number == 0 else f"{'':<10} {line}" for number, line in enumerate(content)]
    return "\n".join(lines)


def _ray(recipe: Recipe) -> Iterator[str]:
    if recipe.ray.address == "local":
        yield f"one of its own on this machine, {recipe.ray.num_cpus} logical CPUs"
    else:
        where = "that $RAY_ADDRESS or ray start names" if recipe.ray.address == "auto" else f"at {recipe.ray.address}"
        yield f"joins the cluster {where}; this machine must be one of its nodes"
    yield f"computes on {recipe.ray.device}; placement {recipe.ray.placement}"


def _places(placed: Sequence[Bundle], recipe: Recipe) -> Iterator[str]:
    yield from _counted(placed)
    cpus, gpus = (sum(bundle.resources.get(kind, 0.0) for bundle in placed) for kind in ("CPU", "GPU"))
    each = recipe.data_plane.storage_units_per_node
    units = f"{each} on every node" if each else f"{recipe.data_plane.storage_units} dealt out to the nodes in turn"
    yield f"TransferQueue's controller and storage units, {units} (1 CPU each)"
    yield f"in all {cpus:g} CPU and {gpus:g} GPU, and TransferQueue's"


def _counted(placed: Sequence[Bundle]) -> Iterator[str]:
    kinds: dict[tuple[str, int, int], list[Bundle]] = {}
    for bundle in placed:
        kinds.setdefault((bundle.role, bundle.count, bundle.gpus_each), []).append(bundle)
    for same in kinds.values():
        yield in_words(same)


def _processes(recipe: Recipe) -> Iterator[str]:
    from workbench.campaign.machines.part_settings import worker_config
    from workbench.serving.settings import WorkerConfig
    from workbench.serving.vllm_runtime import serving_arguments

    gateway = recipe.gateway
    at = f"{gateway.host}, port {gateway.port or 'free'}"
    yield f"here: the notebook's kernel with the controller in it; gateway processes: {gateway.workers}, at {at}"
    if recipe.engine.kind == "vllm":
        config = WorkerConfig.model_validate(worker_config(recipe, Path(_model(recipe)), 0))
        line = [text for key, value in serving_arguments(config).items() for text in (f"--{key}", str(value))]
        line += ["--enforce-eager"] if config.enforce_eager else []
        yield f"each {WORKER} ({recipe.engine.workers}): an engine as of vllm serve {shlex.join(line)}"
    else:
        yield f"each {WORKER} ({recipe.engine.workers}): the scripted engine, {recipe.engine.script_path}"
    ranks = recipe.train.ranks
    yield f"trainer: {ranks} ranks with FSDP2" if ranks > 1 else "trainer: one process"


def _paths(recipe: Recipe, run_dir: Path) -> Iterator[str]:
    shared = "" if recipe.ray.address == "local" else ", the same on every node"
    yield f"model {_model(recipe)}{shared}"
    yield f"run {run_dir}{shared}: weights/, checkpoints/, train/, calls/, rows/, receipts/"
    yield f"ledger {run_dir / 'ledger'}, written on this machine alone"


def _commands(recipe: Recipe, name: str, overrides: Sequence[str], run_name: str | None) -> Iterator[str]:
    if recipe.ray.address != "local":
        yield f"ray start --head --port={RAY_PORT} --num-cpus=N    on this machine"
        yield f"ray start --address=HEAD:{RAY_PORT} --num-cpus=N   on every other node"
    python = Path(sys.executable).with_name("workbench")
    command = [str(python), "run", name, *overrides, *(["--run", run_name] if run_name else [])]
    yield shlex.join(command)


def lacking(recipe: Recipe) -> list[str]:
    """What this machine lacks for the recipe, a line each."""
    return [f"{bad.what}: {bad.found}; {bad.cure}" for bad in before_a_run(recipe) if not bad.good]


def _model(recipe: Recipe) -> str:
    try:
        return str(resolve(recipe.model.path))
    except ModelMissing:
        return recipe.model.path
