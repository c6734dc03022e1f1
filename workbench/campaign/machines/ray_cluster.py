"""Ray cluster: start a Ray of the campaign's own, or join one that runs.

In: the recipe's section `ray`. Out: this process connected, and the temporary directory of a Ray of its own.
Invariant: a cluster that does not answer, does not let us in, or has this machine for no node of its own is said in one
sentence, within seconds. Not here: where actors stand on it (placement), whether its nodes fit (node_check).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from workbench import dataplane
from workbench.config import Recipe
from workbench.errors import ComponentDied, SetupError
from workbench.places import make_ray_directory

REACH_WITHIN_S = 5.0
_NODE_ANSWERS_S = 2.0
_ASK_AGAIN_S = 0.5
ONE_TRY_S = 60.0
"""What one try to start a Ray takes at the most: Ray's own 30 s for its processes, and what stands around them."""
TOO_SLOW = "timed out during startup"
START_ONE = "start one with ray start --head, and on every other node ray start --address=HEAD:6379 (docs/cluster.md)"


def connect(recipe: Recipe) -> str | None:
    """Connect this process to Ray; blocks. Returns the temporary directory of a Ray that was started, None of a cluster
    that was joined. Raises SetupError where it cannot be joined, ComponentDied where it did not start."""
    import ray

    plane = recipe.data_plane
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Of this process, on a cluster that was joined too: the thread that gathers Ray's metrics has ended a campaign (Ray
    # 2.60, SIGSEGV in opentelemetry's MetricReader).
    for switch in ("RAY_enable_metrics_collection", "RAY_enable_open_telemetry"):
        os.environ.setdefault(switch, "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        # Its start-up lines carry times and would stand in the notebook; what goes wrong is raised.
        "configure_logging": False,
        "runtime_env": {
            "env_vars": {
                **dataplane.environment(plane.send_recv_timeout_s, plane.max_attempts),
                # Engine and trainer share this machine's processors: a thread that spins while it waits for
                # its team would take them from the other.
                "OMP_WAIT_POLICY": "PASSIVE",
            }
        },
    }
    if recipe.ray.address != "local":
        _join(ray, recipe.ray.address, options)
        return None
    temp_dir = str(make_ray_directory())
    options |= {"address": "local", "num_cpus": recipe.ray.num_cpus, "_temp_dir": temp_dir, "include_dashboard": False}
    options["_system_config"] = dict(dataplane.LOCAL_RAY)
    options["runtime_env"]["py_executable"] = dataplane.interpreter()
    start_own(options, recipe.deadlines.start_s)
    return temp_dir


def start_own(options: dict[str, Any], within_s: float) -> None:
    """`ray.init(**options)`, again where Ray's own processes took too long, until `within_s` are over; blocks.

    They get 30 s from Ray, which nobody can raise; on a busy machine a second try finds their files in memory. Raises
    ComponentDied with what Ray said last.
    """
    import ray

    deadline = time.monotonic() + within_s
    mine = psutil.Process()
    while True:
        before = set(mine.children(recursive=True))
        try:
            ray.init(**options)
            return
        except Exception as error:
            ray.shutdown()
            # What it had started stays otherwise, and would keep the next try from the processors.
            for left in set(mine.children(recursive=True)) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            said = " ".join(str(error).split()) or type(error).__name__
            if TOO_SLOW not in said:
                raise ComponentDied(f"Ray did not start: {said} Next: workbench doctor.") from error
            if time.monotonic() >= deadline:
                raise ComponentDied(
                    f"Ray did not start within {within_s:g} s: {said} Next: raise deadlines.start_s, or try when the "
                    "machine is less busy."
                ) from error


def meant_by(address: str) -> str | None:
    """The host:port that `ray.address` means; None where `auto` finds no cluster on this machine.

    `auto` is $RAY_ADDRESS, else what `ray start` has noted here. Ray itself would also take any Ray that it finds among
    the processes, another campaign's own one too.
    """
    if address != "auto":
        return address
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):
        return noted.read_text().strip() or None
    return None


def unreachable(address: str) -> str:
    """Why no cluster can be joined at `ray.address`, as far as that is known without Ray; empty where one may be there.

    Ray itself asks for twenty seconds, writes a warning for each, and does not say which of the two it is.
    """
    if address == "local":
        return ""
    meant = meant_by(address)
    if meant is None:
        return "auto, and no ray start has been run on this machine ($RAY_ADDRESS is not set either)"
    address = meant
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=REACH_WITHIN_S):
            return ""
    except (OSError, OverflowError) as error:
        return f"nothing answers at {address} ({getattr(error, 'strerror', None) or error})"
    except ValueError:
        return f"{address!r} is not host:port"


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    if why := unreachable(address):
        raise SetupError(f"ray.address: {why}. Next: {START_ONE}.")
    try:
        ray.init(**options, address=meant_by(address))
    except Exception as error:
        said = (" ".join(str(error).split()) or type(error).__name__)[:300].rstrip(".")
        raise SetupError(
            f"ray.address: what listens at {meant_by(address)} lets this process not in: {said}. Next: the same "
            "token here as there (RAY_AUTH_TOKEN, as ray get-auth-token prints it), the same version of Ray, and this "
            "machine one of its nodes (docs/cluster.md)."
        ) from error


def wait_for_lost_nodes(within_s: float, on_wait: Callable[[str], None]) -> None:
    """Wait until every node that Ray counts as alive answers at its port; blocks. `on_wait` is told which do not.

    Of a machine that fell silent Ray learns after half a minute, and until then it would place actors there. Raises
    SetupError naming the nodes that are still counted after `within_s`.
    """
    deadline = time.monotonic() + within_s
    said = ""
    while silent := ", ".join(_name(node) for node in alive_nodes() if not _answers(node)):
        if silent != said:
            on_wait(f"waiting until Ray gives up {silent}, which does not answer")
            said = silent
        if time.monotonic() >= deadline:
            raise SetupError(
                f"the Ray cluster still counts {silent} as alive, and nothing has answered there for {within_s:g} s "
                "(ray.placement_timeout_s), so actors placed there would be lost. Next: ray stop there or switch that "
                "machine off, and try again when ray status no longer lists it; or open its ports (docs/cluster.md)."
            )
        time.sleep(_ASK_AGAIN_S)


def _answers(node: dict[str, Any]) -> bool:
    """Whether the process that starts actors on a node takes connections."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_NODE_ANSWERS_S):
            return True
    except OSError:
        return False


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def alive_nodes() -> list[dict[str, Any]]:
    """Nodes of the cluster that this process is connected to."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]
