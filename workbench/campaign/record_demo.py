r"""Record demo: cut a small run out of a real one, as the recorded run that comes with the package.

    workbench run cpu_misbehave --run demo train.steps=4 train.groups_per_step=1 environment.options.turns=4 \
        environment.misbehave.retry=0.3 environment.misbehave.stream=0.2
    python -m workbench.campaign.record_demo reports/demo [TARGET]
    python tests/notebooks/record_expected.py      # what the notebooks say of it

In: a finished run. Out: an ordinary run directory of at most 350 kB: the groups of the steps that fit, oldest first,
with their calls, rows, receipts, ledgers and training records, and a vocabulary of the ids that occur. Invariant:
things are left out, nothing is changed; the copy verifies like the original.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import polars as pl

from workbench import runs
from workbench.campaign.verify import verify_run
from workbench.errors import RunStoreError
from workbench.runs.custody import SUFFIX
from workbench.runs.frames import read_lines

MAX_BYTES = 350_000
_DEFAULT = Path(__file__).resolve().parents[1] / "demo" / "run"
# What tells about the machine and not about the run, or about a text that had its paths.
_PRIVATE = ("path", "model_path", "url", "pid", "host", "recipe_digest")
# What a status says that is not about its last step; the rest is left out with that step.
_OF_ANY_STEP = ("status", "phase", "run", "error", "resumed")


def record_demo(source: Path, target: Path = _DEFAULT) -> Path:
    """Write the demo run. Raises RunStoreError when the run does not verify, or not even one step fits."""
    run = runs.open(source)
    report = verify_run(source)
    if not report.ok:
        raise RunStoreError(f"Only a run that verifies can be the recorded one: {report!r}")
    steps = run.steps["step"].to_list()
    for count in range(len(steps), 0, -1):
        with tempfile.TemporaryDirectory() as scratch:
            trial = Path(scratch) / "run"
            _copy(run, trial, set(steps[:count]))
            size = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
            if size > MAX_BYTES:
                continue
            copied = verify_run(trial)
            if not copied.ok:
                raise RunStoreError(f"The copy does not verify: {copied}")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(trial, target)
            print(f"{target}: {count} of {len(steps)} steps, {size:,} bytes; {copied!r}")
            return target
    raise RunStoreError(f"Not even one step of {source} fits into {MAX_BYTES:,} bytes; take a run of smaller groups")


def _copy(run: runs.Run, target: Path, steps: set[int]) -> None:
    whole = steps == set(run.steps["step"])
    taken = run.rollouts.filter(pl.col("taken_step").is_in(steps) | (pl.col("taken_step").is_null() & whole))
    groups = taken["group_id"].unique(maintain_order=True).to_list()
    rollouts = taken["rollout_id"].to_list()
    for kind, names in (
        ("calls", [f"{group}.parquet" for group in groups]),
        ("rows", [f"{group}.parquet" for group in groups]),
        ("receipts", [f"{group}.jsonl" for group in groups]),
        ("ledger", [f"{rollout}{suffix}" for rollout in rollouts for suffix in (SUFFIX, ".events.jsonl")]),
    ):
        for name in names:
            _copy_file(run.path / kind / name, target / kind / name)
    for path in sorted((run.path / "train").glob("*.parquet")):
        if pl.read_parquet(path, columns=["step"])["step"].is_in(steps).all():
            _copy_file(path, target / "train" / path.name)
    target.mkdir(parents=True, exist_ok=True)
    if (run.path / "recipe.yaml").exists():
        (target / "recipe.yaml").write_text(_public((run.path / "recipe.yaml").read_text()))
    kept = {"step": steps, "group_id": set(groups)}
    for name in ("steps", "groups", "events"):
        lines = [_public(row) for row in read_lines(run.path / f"{name}.jsonl") if _belongs(row, kept)]
        lines = [line for line in lines if whole or line.get("kind") != "finished"]
        (target / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    status = {name: value for name, value in run.status.items() if whole or name in _OF_ANY_STEP}
    (target / "status.json").write_bytes(orjson.dumps(_public(status)))
    (target / "vocabulary.json").write_bytes(run.vocabulary().only(runs.open(target).token_ids()).dump())


def _copy_file(source: Path, target: Path) -> None:
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _belongs(row: dict[str, Any], kept: dict[str, set[Any]]) -> bool:
    """A line of a group by its group, whose `step` is the one it was sampled for; any other by its step."""
    name = "step" if row.get("group_id") is None else "group_id"
    return row.get(name) is None or row[name] in kept[name]


def _public(value: Any) -> Any:
    """Without what names this machine: keys of `_PRIVATE`, and absolute paths in texts."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if key not in _PRIVATE}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", value)
    return value


if __name__ == "__main__":
    record_demo(Path(sys.argv[1]), *(Path(argument) for argument in sys.argv[2:3]))
