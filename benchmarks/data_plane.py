"""Data plane: a group of 16 rollouts × 6 calls, staged in a real TransferQueue, read back and finalised.

One batched read of the group beside one read a rollout; then the finalizer itself, by phase, for several group sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, Growth, median, ratio
from benchmarks.verifier import custody
from workbench import dataplane
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.finalizer.actor import Finalizer
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.places import make_ray_directory
from workbench.wire import StagedCall

ROLLOUTS, CALLS, TOKENS = 16, 6, 200
SIZES = (4, 8, 16, 32)
ROUNDS = 5


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A Ray of this process's own, with a data plane in it."""
    import ray

    directory = make_ray_directory()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(directory),
        _system_config=dict(dataplane.LOCAL_RAY),
        runtime_env={"env_vars": dataplane.environment(), "py_executable": dataplane.interpreter()},
    )
    try:
        dataplane.start()
        yield
        dataplane.stop()
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def group(name: str, rollouts: int) -> tuple[FinalizationRequest, list[StagedCall]]:
    """A finished group and everything that it staged."""
    outcomes, staged = [], []
    for index in range(rollouts):
        rollout_id = f"bench.{name}.{index}.0"
        receipt, calls = custody(CALLS, TOKENS, rollout_id, seed=index)
        staged += calls
        outcomes.append(
            RolloutOutcome(rollout_id=rollout_id, index=index, receipt=receipt, failures=[], reward=float(index % 2))
        )
    return FinalizationRequest(group_id=f"bench.{name}", weight_version=1, rollouts=outcomes), staged


async def stage(calls: list[StagedCall]) -> None:
    """Stage all of them, some at a time."""
    sink = TransferQueueSink()
    for begin in range(0, len(calls), 32):
        await asyncio.gather(*map(sink.stage_async, calls[begin : begin + 32]))


async def reads() -> list[Figure | Growth]:
    """One put; one read of a group, beside one read a rollout."""
    request, staged = group("reads", ROLLOUTS)
    sink, source = TransferQueueSink(), TransferQueueSource()
    await stage(staged)
    keys = request.staging_keys()
    puts, together, apart = [], [], []
    for _ in range(ROUNDS * 3):
        began = time.perf_counter()
        await sink.stage_async(staged[0])
        puts.append(time.perf_counter() - began)
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        await source.fetch(keys)
        middle = time.perf_counter()
        for begin in range(0, len(keys), CALLS):
            await source.fetch(keys[begin : begin + CALLS])
        if number:
            together.append(middle - began)
            apart.append(time.perf_counter() - middle)
    await source.clear(keys)
    grown = []
    for size in SIZES:
        more, calls = group(f"read{size}", size)
        await stage(calls)
        took = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            await source.fetch(more.staging_keys())
            took.append(time.perf_counter() - began)
        grown.append(float(np.median(took[1:])))
        await source.clear(more.staging_keys())
    name = f"staging read of a group of {ROLLOUTS} × {CALLS} calls"
    return [
        ratio(f"{name}: one read a rollout over one read", np.array(apart), np.array(together), at_least=5.0),
        median(f"{name}: one read", together, "ms", 1e3),
        median("staging one call: a put, acknowledged", puts, "ms", 1e3),
        Growth("one staging read of a group", "calls in the group", [float(CALLS * size) for size in SIZES], grown),
    ]


async def finalising(run_dir: Path) -> list[Figure | Growth]:
    """The finalizer, in this process, over groups of several sizes."""
    source = TransferQueueSource()
    finalizer = Finalizer(str(run_dir), bos_token_id=1, source=source)
    over_read: dict[int, list[float]] = {size: [] for size in SIZES}
    verify: dict[int, list[float]] = {size: [] for size in SIZES}
    groups = {size: group(f"of{size}", size) for size in SIZES}
    for number in range(ROUNDS + 1):
        for size, (request, staged) in groups.items():
            await stage(staged)
            before = source.reads
            answer = await finalizer.finalize(request.model_dump(mode="json"))
            finalized = FinalizedGroup.model_validate(answer)
            assert source.reads == before + 1 and all(row.sample_mask for row in finalized.rows)
            await dataplane.clear(dataplane.TRAIN, finalized.train_keys, deadline_s=30)
            if number:
                seconds = finalized.timings_s
                over_read[size].append(sum(seconds.values()) - seconds["fetch"])
                verify[size].append(seconds["verify"])
    name = f"finalising a group of {ROLLOUTS} × {CALLS} calls"
    per_rollout = np.array(over_read[ROLLOUTS]) / ROLLOUTS
    return [
        median(
            f"{name}: a rollout, over the one read",
            per_rollout,
            "ms",
            1e3,
            at_most=3.0,
            note="Verifying, publishing, three fsynced parts and the clear of the staged rows.",
        ),
        median(f"{name}: verifying, a rollout", np.array(verify[ROLLOUTS]) / ROLLOUTS, "ms", 1e3),
        Growth(
            "finalising a group, over the read",
            "rollouts in the group",
            [float(size) for size in SIZES],
            [float(np.median(over_read[size])) for size in SIZES],
            note="Below 1: publishing, storing and clearing are once a group; a rollout of its own costs little.",
        ),
    ]


def measure() -> list[Figure | Growth]:
    """Reads, then finalising."""

    async def all_of_it() -> list[Figure | Growth]:
        with tempfile.TemporaryDirectory() as scratch:
            return [*await reads(), *await finalising(Path(scratch))]

    with running():
        return asyncio.run(all_of_it())
