"""Data plane: start, reach and stop TransferQueue, with a deadline on every wait.

    start() in the driver -> connect() in every process that stages, finalises or trains -> put / get / clear -> stop()

Two partitions: `staging` (one row a call, key rollout/call) and `train` (one row a sample, key = rollout id).
Why a layer over `transfer_queue` at all: its start waits for ever when Ray has too few logical CPUs, a put after the
controller's death never returns, a get silently leaves out missing keys (see `staging`), and a clear that is cancelled
half-way leaves rows that nobody can reach. Here each of them ends in a typed error within its deadline.
SimpleStorage only: the other backends block the event loop inside their clear.
Not here: what a row looks like (staging, finalizer.rows).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from workbench.deadline import TooLate, call_with_deadline
from workbench.errors import ComponentDied, DeadlineExceeded, SetupError, WorkbenchError

if TYPE_CHECKING:
    from tensordict import TensorDict

STAGING = "staging"
TRAIN = "train"

#: Logical CPUs of Ray that the controller takes besides one for each storage unit.
CONTROLLER_CPUS = 1

#: `_system_config` for a local Ray. It starts its workers with niceness 15 otherwise: next to anything else that
#: computes they get a thirtieth of a processor, and every deadline on them passes. Nobody reads its metrics here.
LOCAL_RAY = {"worker_niceness": 0, "enable_metrics_collection": False, "enable_open_telemetry": False}

_CONTROLLER = {"name": "TransferQueueController", "namespace": "transfer_queue"}
_MANAGER_MODULE = "transfer_queue.storage.managers.simple_storage_manager"
_SEND_RECV, _ATTEMPTS, _PROBE = (
    f"TQ_SIMPLE_STORAGE_{name}" for name in ("SEND_RECV_TIMEOUT", "MAX_ATTEMPTS", "PROBE_TIMEOUT")
)

_lock = threading.RLock()
_connected = False
_clears: set[asyncio.Task[None]] = set()

T = TypeVar("T")


def interpreter() -> str:
    """`py_executable` for the `runtime_env` of a local Ray.

    Ray gives the interpreter's path to a shell unquoted: with a space in it no actor would ever start.
    """
    return shlex.quote(sys.executable)


def environment(send_recv_timeout_s: float = 20.0, max_attempts: int = 2) -> dict[str, str]:
    """Environment variables for Ray actors that use the data plane (`runtime_env={"env_vars": ...}`).

    TransferQueue's own limits are 200 s and 3 attempts, which would hide a dead storage unit for ten minutes.
    """
    return {
        _SEND_RECV: str(max(1, round(send_recv_timeout_s))),
        _ATTEMPTS: str(max_attempts),
        _PROBE: "2",  # only words the log line after a failure, on top of the attempts
    }


def start(
    storage_units: int = 2,
    send_recv_timeout_s: float = 20.0,
    max_attempts: int = 2,
    start_timeout_s: float = 120.0,
    *,
    backend: str = "SimpleStorage",
) -> dict[str, Any]:
    """Start controller and storage units in the Ray this process is connected to, and connect this process.

    Returns `{"storage_units", "seconds"}`. Raises SetupError when Ray is not up, has too few free logical CPUs, runs a
    data plane already, or another backend is asked for; DeadlineExceeded after `start_timeout_s`.
    """
    import ray

    began = time.monotonic()
    if backend != "SimpleStorage":
        raise SetupError(
            f"data plane backend {backend!r} is refused: its clear blocks the event loop, so one slow group would "
            f"stop all of them; use SimpleStorage"
        )
    if not ray.is_initialized():
        raise SetupError("the data plane needs Ray: call ray.init before workbench.dataplane.start")
    if _controller() is not None:
        raise SetupError(
            "this Ray runs a data plane already (actor TransferQueueController); stop that campaign first, "
            "or set ray.address=local to start a Ray of its own"
        )
    needed = storage_units + CONTROLLER_CPUS
    total, free = _logical_cpus(needed)
    if free < needed:
        raise SetupError(
            f"the data plane needs {needed} logical CPUs of Ray (1 controller + {storage_units} storage units), "
            f"{free:g} of {total:g} are free; raise ray.num_cpus or lower data_plane.storage_units"
        )
    alive = [node for node in ray.nodes() if node["Alive"]]
    for node in alive:
        # TransferQueue deals them out to all nodes in turn and would wait for ever on one without a free slot.
        each, has = storage_units // len(alive), node["Resources"].get("CPU", 0.0)
        if has < each:
            raise SetupError(
                f"node {node['NodeManagerAddress']} of the Ray cluster has {has:g} logical CPUs and is to hold {each} "
                "storage units; start it with more (ray start --num-cpus), or lower data_plane.storage_units"
            )
    _set_limits(send_recv_timeout_s, max_attempts)

    def initialise() -> None:
        import transfer_queue as tq
        from omegaconf import OmegaConf

        units = {"num_data_storage_units": storage_units}
        _leave_torch_threads_alone()
        tq.init(OmegaConf.create({"backend": {"storage_backend": backend, "SimpleStorage": units}}))

    try:
        _call(initialise, start_timeout_s, f"{needed} actors of the data plane to start")
    except DeadlineExceeded:
        if (half_started := _controller()) is not None:
            ray.kill(half_started)
        raise
    global _connected
    _connected = True
    return {"storage_units": storage_units, "seconds": time.monotonic() - began}


def connect_blocking(timeout_s: float = 30.0) -> None:
    """Connect this process to the running data plane; once connected it returns at once.

    The limits on storage units are those of its environment (see `environment`), else TransferQueue's own.
    Raises ComponentDied when none is running, DeadlineExceeded after `timeout_s`.
    """
    global _connected
    with _lock:
        if _connected:
            return

        def attach() -> None:
            if _controller() is None:
                raise ComponentDied(
                    "the data plane is not running (no actor TransferQueueController in this Ray); "
                    "workbench.dataplane.start must come first, and its driver must be alive"
                )
            import transfer_queue as tq

            _leave_torch_threads_alone()
            tq.init()

        _call(attach, timeout_s, "the data plane to answer")
        _connected = True


async def connect(timeout_s: float = 30.0) -> None:
    """`connect_blocking` without blocking the event loop."""
    if not _connected:
        await asyncio.to_thread(connect_blocking, timeout_s)


def stop(timeout_s: float = 30.0) -> None:
    """Stop what `start` started; harmless when nothing runs. DeadlineExceeded after `timeout_s`."""
    global _connected
    if "transfer_queue" in sys.modules:
        import transfer_queue as tq

        _call(tq.close, timeout_s, "the data plane to stop")
    _connected = False


def actors(storage_units: int) -> dict[str, Any]:
    """Ray handles of what `start` started in this process, by a name for people."""
    import ray

    units = {
        f"TransferQueue's storage unit {number}": ray.get_actor(f"TransferQueueStorageUnit#{number}")
        for number in range(storage_units)
    }
    return {"TransferQueue's controller": ray.get_actor(**_CONTROLLER)} | units


async def put(
    partition: str, keys: Sequence[str], fields: TensorDict, tags: Sequence[Mapping[str, Any]], *, deadline_s: float
) -> None:
    """Store one row a key and return when the storage units have acknowledged it. Overwrites rows, merges tags."""
    import transfer_queue as tq

    call = tq.async_kv_batch_put(keys=list(keys), partition_id=partition, fields=fields, tags=[dict(t) for t in tags])
    await _within(call, deadline_s, f"put of {_named(keys)} into {partition}")


async def get(
    partition: str, keys: Sequence[str], *, deadline_s: float, fields: Sequence[str] | None = None
) -> TensorDict:
    """One batched read. Missing keys are left out *silently* and only fields that all rows have come back: the caller
    must compare. Raises ValueError when no key is there or one of them is a tag without a row."""
    import transfer_queue as tq

    call = tq.async_kv_batch_get(
        keys=list(keys), partition_id=partition, select_fields=None if fields is None else list(fields)
    )
    return await _within(call, deadline_s, f"get of {_named(keys)} from {partition}")


def split_rows(batch: TensorDict) -> list[dict[str, np.ndarray]]:
    """Rows of a TransferQueue batch as numpy columns, whatever container each column came back in."""
    names = sorted(map(str, batch.keys()))
    if not names:
        return []
    columns = {name: _rows_of(batch.get(name)) for name in names}
    return [{name: columns[name][i] for name in names} for i in range(batch.batch_size[0])]


def _rows_of(column: Any) -> list[np.ndarray]:
    import torch

    if getattr(column, "layout", None) == torch.jagged and column.lengths() is None:
        # Rows that lie one after the other. `unbind` gives the same views and takes 6 µs for each.
        values, ends = column.values().numpy(), column.offsets().tolist()
        return [values[start:end] for start, end in itertools.pairwise(ends)]
    rows = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    return [np.asarray(row) for row in rows]


async def clear(partition: str, keys: Sequence[str], *, deadline_s: float) -> None:
    """Remove rows; unknown keys are fine. A clear that outlives its deadline or its caller goes on in the background,
    because one that stops half-way leaves rows that are marked for deletion and never freed."""
    import transfer_queue as tq

    if not keys:
        return
    task = asyncio.ensure_future(tq.async_kv_clear(keys=list(keys), partition_id=partition))
    _clears.add(task)
    task.add_done_callback(_forget)
    done, _ = await asyncio.wait({task}, timeout=deadline_s)
    if not done:
        raise DeadlineExceeded(
            f"clear of {_named(keys)} from {partition} took longer than {deadline_s:g} s; it goes on in the "
            f"background, see whether the controller and storage units are alive"
        )
    await task


async def drain_clears(timeout_s: float) -> None:
    """Wait, at most `timeout_s`, for clears that outlived their deadline or their caller in this event loop.

    For the end of a process or of the data plane: what has not ended by then never will, and is given up, because
    TransferQueue's client must not be closed while one of its requests is under way.
    """
    loop = asyncio.get_running_loop()
    if mine := [task for task in _clears if task.get_loop() is loop]:
        _, late = await asyncio.wait(mine, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def tags(partition: str, *, deadline_s: float) -> dict[str, dict[str, Any]]:
    """Tags by key. A listed key is no proof of a stored row."""
    import transfer_queue as tq

    listed = await _within(tq.async_kv_list(partition_id=partition), deadline_s, f"list of {partition}")
    return listed.get(partition, {})


async def check_alive(timeout_s: float = 5.0) -> None:
    """Raise ComponentDied when the controller does not answer: then no row can be told from a missing one."""
    try:
        await tags(STAGING, deadline_s=timeout_s)
    except DeadlineExceeded as error:
        raise ComponentDied(
            f"the data plane's controller has not answered for {timeout_s:g} s (actor TransferQueueController); "
            f"stop and start the data plane, rows that were not finalised are lost"
        ) from error


def _forget(task: asyncio.Task[None]) -> None:
    _clears.discard(task)
    if not task.cancelled():
        task.exception()  # an error of a clear nobody waits for any more is not "never retrieved"


async def _within(call: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{what} took longer than {deadline_s:g} s; a data plane whose controller died never answers, "
            f"see whether its actors are alive"
        ) from error


def _named(keys: Sequence[str]) -> str:
    return f"{len(keys)} keys ({keys[0]}, …)" if len(keys) > 1 else f"key {keys[0]}" if keys else "no keys"


def _set_limits(send_recv_timeout_s: float, max_attempts: int) -> None:
    variables = environment(send_recv_timeout_s, max_attempts)
    os.environ.update(variables)
    # TransferQueue reads them once, at import; a process that imported it earlier needs them in the module.
    if (module := sys.modules.get(_MANAGER_MODULE)) is not None:
        for variable, value in variables.items():
            setattr(module, variable, int(value))


def _logical_cpus(needed: int, wait_s: float = 5.0) -> tuple[float, float]:
    """(total, free). Ray frees the slots of an actor some time after its end, so a restart waits a little for them."""
    import ray

    deadline = time.monotonic() + wait_s
    while True:
        total = ray.cluster_resources().get("CPU", 0.0)
        free = ray.available_resources().get("CPU", 0.0)
        if free >= needed or total < needed or time.monotonic() > deadline:
            return total, free
        time.sleep(0.1)


def _leave_torch_threads_alone() -> None:
    # Around every put and get TransferQueue sets torch's process-wide number of threads, and "restores" it to what it
    # was at import: 1 in a Ray actor. A trainer that reads its batch would compute on one thread from then on.
    import transfer_queue.client

    transfer_queue.client.limit_pytorch_auto_parallel_threads = lambda **_: contextlib.nullcontext()


def _controller() -> Any:
    import ray

    with contextlib.suppress(ValueError):
        return ray.get_actor(**_CONTROLLER)
    return None


def _call(function: Callable[[], None], timeout_s: float, what: str) -> None:
    """Make a call that may never return."""
    try:
        call_with_deadline(function, timeout_s)
    except TooLate:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}: a busy machine, or too few logical CPUs") from None
    except WorkbenchError:
        raise
    except Exception as error:
        raise ComponentDied(f"waiting for {what} failed: {type(error).__name__}: {error}") from error
