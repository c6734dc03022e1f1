"""Soak: one long campaign on the scripted engine, in which nothing may be lost, doubled, left behind or grow.

    make soak [SOAK_GROUPS=1000]      or      SOAK_GROUPS=40 python -m pytest campaign/soak.py

Not collected by `make test`. Writes a report to `reports/soak/` (rows, times, and the memory of every process).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
from campaign.loop_time import MOST_OWN_P99_S
from campaign.scripted_fleet import Running, own_data_plane, scripted_recipe

from workbench import runs
from workbench.campaign.verify import verify_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(7200)]

GROUPS = int(os.environ.get("SOAK_GROUPS", "1000"))
GROUPS_A_STEP = 20
N = 4
GROWTH_BYTES_A_GROUP = 64 * 1024
GROWTH_BYTES = 16 * 2**20
"""A process is flat when its memory grows by less than this, and less than that a group, over a run's second half."""


class Memory:
    """Resident bytes of every part, and of this process, over the groups that were finalised by then."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._processes = {"controller": psutil.Process()}
        self._processes |= {name: psutil.Process(pid) for name, pid in running.pids.items()}
        self.groups: list[int] = []
        self.rss: dict[str, list[int]] = {name: [] for name in self._processes}

    async def sample(self) -> None:
        """Every second until the campaign's parts end."""
        groups = self._running.run_dir / "groups.jsonl"
        while not self._running.task.done():
            try:
                rss = {name: process.memory_info().rss for name, process in self._processes.items()}
            except psutil.NoSuchProcess:
                return
            self.groups.append(groups.read_bytes().count(b"\n"))
            for name, value in rss.items():
                self.rss[name].append(value)
            await asyncio.wait([self._running.task], timeout=1.0)

    def report(self) -> dict[str, dict[str, float]]:
        """By process: bytes at the middle and at the end (medians of an eighth of the samples each), and the slope."""
        groups = np.array(self.groups)
        half, eighth = len(groups) // 2, max(1, len(groups) // 8)
        found = {}
        for name, values in self.rss.items():
            rss = np.array(values, dtype=np.float64)
            middle, end = np.median(rss[half : half + eighth]), np.median(rss[-eighth:])
            # Samples in which no group came to an end say nothing about growth by group.
            moved = np.ptp(groups[half:]) > 0
            slope = float(np.polyfit(groups[half:], rss[half:], 1)[0]) if moved else 0.0
            found[name] = {
                "middle_mib": round(float(middle) / 2**20, 1),
                "end_mib": round(float(end) / 2**20, 1),
                "slope_bytes_a_group": round(slope, 1),
                "grown_bytes": float(end - middle),
                "groups": float(groups[-1] - groups[half]),
            }
        return found


async def test_a_long_campaign_loses_doubles_and_keeps_nothing(ray_cluster: Any, tiny_model: Path) -> None:
    folder = Path(os.environ.get("SOAK_DIR", Path(__file__).parents[2] / "reports" / "soak"))
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / f"soak-{int(time.time())}"
    steps = max(1, GROUPS // GROUPS_A_STEP)
    recipe = scripted_recipe(
        folder,
        f"train.steps={steps}", f"train.groups_per_step={GROUPS_A_STEP}", f"train.rollouts_per_group={N}",
        "rollouts.max_inflight_groups=8", "environment.misbehave.retry=0.1", "environment.misbehave.branch=0.1",
        "environment.misbehave.edit=0.05", "environment.misbehave.stream=0.2", "checkpoint.every=10",
        delay_s=0.0,
    )  # fmt: skip
    began = time.monotonic()
    with own_data_plane():
        running = Running(recipe, run_dir)
        await running.until(lambda: running.events("started"), 900)
        await running.look()
        memory = Memory(running)
        await memory.sample()
        result = await running.task
    seconds = time.monotonic() - began
    groups = steps * GROUPS_A_STEP

    trained = pl.concat(
        [pl.read_parquet(part, columns=["rollout_id", "group_id"]) for part in (run_dir / "train").glob("*.parquet")]
    )
    rollouts = runs.open(run_dir).rollouts
    (swept,), (finished,) = running.events("swept"), running.events("finished")
    verified = verify_run(run_dir)
    causes = Counter(rollouts["cause"].drop_nulls())
    grown = memory.report()
    summary = {
        "groups": groups,
        "rows": trained.height,
        "distinct_rows": trained["rollout_id"].n_unique(),
        "rejected": dict(causes),
        "seconds": round(seconds, 1),
        "groups_a_second": round(groups / seconds, 2),
        "loop_lag_p99_s": finished["loop_lag_p99_s"],
        "loop_lag_own_p99_s": finished["loop_lag_own_p99_s"],
        "swept": swept,
        "memory": grown,
        "verified": repr(verified),
    }
    (folder / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + json.dumps(summary, indent=2))

    assert result.weight_version == steps
    assert trained.height == trained["rollout_id"].n_unique() == groups * N
    assert set(trained.group_by("group_id").len()["len"]) == {N}
    assert set(rollouts["rollout_id"]) == set(trained["rollout_id"])
    assert swept["left"] == {"staging": 0, "train": 0}
    assert not running.events("finalizer_lost") and verified.ok
    assert await running.survivors() == []
    assert finished["loop_lag_own_p99_s"] <= MOST_OWN_P99_S
    growing = {
        name: row
        for name, row in grown.items()
        if row["grown_bytes"] > GROWTH_BYTES + GROWTH_BYTES_A_GROUP * row["groups"]
    }
    assert growing == {}
