"""Frames: a run of 10,000 rollouts, opened in a new process, to its first table.

The run is made once by the product's own writer: groups of 16 rollouts with 300 tokens each; smaller
runs are its first groups. A new process imports,
opens the run and shows the head of `rollouts`; memory is that process's peak beside one that only imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import orjson

from benchmarks.measure import Figure, Growth, in_memory, median
from workbench.runs import schema
from workbench.runs.writer import RunWriter, write_part

ROLLOUTS, A_GROUP, TOKENS = 10_000, 16, 300
SIZES = (1_250, 2_500, 5_000, 10_000)
ROUNDS = 7

_OPEN = """
import json, resource, sys, time
import polars, workbench.runs
began, spent = time.perf_counter(), time.process_time()
if len(sys.argv) > 1:
    str(workbench.runs.open(sys.argv[1]).rollouts.head(20))
took = {"wall": time.perf_counter() - began, "processor": time.process_time() - spent}
print(json.dumps(took | {"kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
"""


def make_run(path: Path, rollouts: int) -> Path:
    """A finished run of so many rollouts; only the tables that the rollouts frame reads."""
    rng = np.random.default_rng(0)
    with RunWriter(path) as writer:
        writer.status(status="done", run=path.name)
        for number in range(rollouts // A_GROUP):
            group_id = f"g{number:05d}"
            rows = [_row(group_id, f"{path.name}.{number}.{index}.0", index, rng) for index in range(A_GROUP)]
            columns = {c.name: [row.get(c.name) for row in rows] for c in schema.columns("rows")}
            write_part(path / "rows" / f"{group_id}.parquet", "rows", columns)
            writer.group({"group_id": group_id, "step": 1 + number // 4, "weight_version": 0, "rows": A_GROUP})
    return path


def first_groups(run: Path, path: Path, groups: int) -> Path:
    """A run of the first groups of another; its parts are the same files."""
    (path / "rows").mkdir(parents=True)
    for part in sorted((run / "rows").glob("*.parquet"))[:groups]:
        (path / "rows" / part.name).hardlink_to(part)
    lines = (run / "groups.jsonl").read_bytes().splitlines(keepends=True)
    (path / "groups.jsonl").write_bytes(b"".join(lines[:groups]))
    (path / "status.json").write_bytes((run / "status.json").read_bytes())
    return path


def _row(group_id: str, rollout_id: str, index: int, rng: np.random.Generator) -> dict[str, object]:
    calls = [f"{rollout_id}-c{number}" for number in range(6)]
    return {
        "group_id": group_id,
        "rollout_id": rollout_id,
        "index": index,
        "task_id": "task",
        "sample_mask": 1,
        "reward": float(index % 2),
        "prompt_len": 100,
        "tokens": TOKENS,
        "sampled_tokens": TOKENS // 2,
        "terminal_selection": "content",
        "terminal_model_call_id": calls[-1],
        "calls": 6,
        "model_call_ids": calls,
        "weight_versions": [0] * 6,
        "weight_version_spans": orjson.dumps([]).decode(),
        "link_spans": orjson.dumps([]).decode(),
        "token_ids": rng.integers(0, 50_000, TOKENS).astype(np.uint64),
        "token_mask": np.ones(TOKENS, dtype=np.uint8),
        "logprobs": -rng.random(TOKENS).astype(np.float32),
    }


def opened(path: Path | None) -> dict[str, float]:
    """Seconds to the first table in a new process, imports not counted, and its peak memory."""
    command = [sys.executable, "-c", _OPEN, *([str(path)] if path else [])]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


def measure() -> list[Figure | Growth]:
    """To the first table, the memory that took, and growth with rollouts."""
    # In memory where there is such a place: making the run waits for the disk 2,000 times, and reading it does not.
    with tempfile.TemporaryDirectory(dir=in_memory()) as scratch:
        whole = make_run(Path(scratch) / "run", ROLLOUTS)
        runs = {size: first_groups(whole, Path(scratch) / f"run{size}", size // A_GROUP) for size in SIZES}
        opened(runs[ROLLOUTS])
        taken = {size: [opened(runs[size]) for _ in range(ROUNDS)] for size in SIZES}
        idle = [opened(None) for _ in range(3)]
    most = taken[ROLLOUTS]
    name = "opening a run of 10,000 rollouts, to the first table"
    grown = (np.array([one["kib"] for one in most]) - np.median([one["kib"] for one in idle])) / 1024
    return [
        median(name, [one["processor"] for one in most], "ms", 1e3, at_most=300.0),
        median(f"{name}: wall", [one["wall"] for one in most], "ms", 1e3),
        median(
            f"{name}: memory",
            grown,
            "MiB",
            note="Rows without their token arrays, which are read for one rollout at a time.",
        ),
        Growth(
            "opening a run",
            "rollouts",
            [float(size) for size in SIZES],
            [min(one["processor"] for one in taken[size]) for size in SIZES],
        ),
    ]
