"""Frames: a run of 10,000 rollouts, opened anew, to its first table.

The run is made once by the product's own writer: groups of 16 rollouts with 300 tokens each, four groups a step;
smaller runs are its first groups, and the steps that trained them. A run that came to an end has its parts' columns
gathered in one file; of one that was killed, or still runs, those since it was gathered last are read one by one, a
third at the most. Timed is opening it and showing the head of `rollouts`, nothing of it known before; memory is the
peak of a new process that does so, less that of one which only imports.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

from benchmarks.measure import Figure, Growth, alternate, in_memory, median, medians, timed, wall
from workbench import runs
from workbench.runs import schema
from workbench.runs.gathered import AGAIN, gather
from workbench.runs.writer import RunWriter, write_part

ROLLOUTS, A_GROUP, A_STEP, TOKENS = 10_000, 16, 4, 300
SIZES = (1_250, 2_500, 5_000, 10_000)
ROUNDS = 7

_PEAK = """
import sys
import polars, pyarrow.parquet, workbench.runs
if len(sys.argv) > 1:
    str(workbench.runs.open(sys.argv[1]).rollouts.head(20))
# Not getrusage's: that of a new process begins with what its parent had when it forked.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def make_run(path: Path, rollouts: int) -> Path:
    """A finished run of so many rollouts: the tables that the rollouts frame reads, `rows` and `train`."""
    rng = np.random.default_rng(0)
    to_train: list[dict[str, object]] = []
    with RunWriter(path) as writer:
        writer.status(status="done", run=path.name)
        for number in range(rollouts // A_GROUP):
            group_id = f"g{number:05d}"
            rows = [_row(group_id, f"{path.name}.{number}.{index}.0", index, rng) for index in range(A_GROUP)]
            _write(path / "rows" / f"{group_id}.parquet", "rows", rows)
            step = 1 + number // A_STEP
            writer.group({"group_id": group_id, "step": step, "weight_version": step - 1, "rows": A_GROUP})
            to_train += [_trained(step, row, rng) for row in rows]
            if (number + 1) % A_STEP == 0:
                _write(path / "train" / f"step-{step}.parquet", "train", to_train)
                to_train = []
    return path


def _write(path: Path, table: str, rows: list[dict[str, object]]) -> None:
    write_part(path, table, {c.name: [row.get(c.name) for row in rows] for c in schema.columns(table)})


def first_groups(run: Path, path: Path, groups: int) -> Path:
    """A run of the first groups of another, or one that has grown to them; its parts are the same files."""
    steps = [run / "train" / f"step-{step + 1}.parquet" for step in range(groups // A_STEP)]
    for part in [*sorted((run / "rows").glob("*.parquet"))[:groups], *steps]:
        (path / part.parent.name).mkdir(parents=True, exist_ok=True)
        if not (linked := path / part.parent.name / part.name).exists():
            linked.hardlink_to(part)
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


def _trained(step: int, row: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    """What the trainer says of a row."""
    return {
        "step": step,
        **{name: row[name] for name in ("group_id", "rollout_id", "index", "sample_mask")},
        "advantage": float(rng.normal()),
        "loss_mask": np.ones(TOKENS, dtype=np.uint8),
        "trainer_logprobs": -rng.random(TOKENS).astype(np.float32),
        "delta": rng.normal(0, 1e-3, TOKENS).astype(np.float32),
    }


def late(parts: int) -> int:
    """How many of so many parts came after those that were gathered, at the most."""
    return parts - int(parts / AGAIN)


def first_table(path: Path) -> Callable[[], str]:
    """Open the run anew and show the head of its rollouts."""
    return lambda: str(runs.open(path).rollouts.head(20))


def peak_mib(path: Path | None) -> float:
    """Peak memory of a new process that opens the run, or only imports."""
    command = [sys.executable, "-c", _PEAK, *([str(path)] if path else [])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


def measure() -> list[Figure | Growth]:
    """To the first table, the memory that took, and growth with rollouts."""
    # In memory where there is such a place: making the run waits for the disk 2,000 times, and reading it does not.
    with tempfile.TemporaryDirectory(dir=in_memory()) as scratch:
        whole = make_run(Path(scratch) / "run", ROLLOUTS)
        parts = {f"{size}": first_groups(whole, Path(scratch) / f"run{size}", size // A_GROUP) for size in SIZES}
        killed = first_groups(whole, Path(scratch) / "killed", int(ROLLOUTS // A_GROUP / AGAIN))
        gather(killed)
        first_groups(whole, killed, ROLLOUTS // A_GROUP)
        for path in parts.values():
            gather(path)
        sides = {size: timed(first_table(path)) for size, path in parts.items()}
        samples = alternate({**sides, "killed": timed(first_table(killed), wall)}, ROUNDS)
        grown = peak_mib(parts[str(ROLLOUTS)]) - peak_mib(None)
    name = "opening a run of 10,000 rollouts, to the first table"
    note = "Rows without their token arrays, which are read for one rollout at a time."
    groups = ROLLOUTS // A_GROUP
    return [
        median(name, samples[str(ROLLOUTS)], "ms", 1e3, at_most=300.0),
        median(
            f"{name}, killed",
            samples["killed"],
            "ms",
            1e3,
            at_most=300.0,
            note="Just before it would have been gathered again. Wall seconds, because its last "
            f"{late(groups)} parts of rows, and {late(groups // A_STEP)} of what steps trained, are read by as many "
            "threads as there are processors; a view that stays open reads only those that are new.",
        ),
        Figure(f"{name}: memory", grown, "MiB", note=note),
        Growth(
            "opening a run",
            "rollouts",
            [float(size) for size in SIZES],
            medians(samples, SIZES),
        ),
    ]
