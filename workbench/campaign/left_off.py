"""Left off: where a stopped run stood, read from its store alone.

    events.jsonl + groups.jsonl + steps.jsonl + the parts of groups and steps  ──read_left_off──▶  LeftOff

Which record commits what; everything else can be made up for from these two:
- a *group* is finished when `receipts/<group>.jsonl` is there, the last of its three parts. Its line in groups.jsonl
  may be missing. A group without it is sampled again as a new attempt: its staged calls were in memory and are gone.
- a *step* is taken when `train/step-<n>.parquet` is there. The trainer writes it after the optimiser's step and before
  anything else hears of it; the step's line in steps.jsonl and its checkpoint may be missing.
So a finished group that stands in no step's part is waiting, one that stands in a part is trained, and none is both.
Invariant: reading changes nothing; what cannot have been left by a process that just ended is an error that names it.
Not here: going on from there (resume), the trainer's weights (train.restore).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import RunStoreError
from workbench.finalizer.metrics import GroupMetrics
from workbench.finalizer.parts import PARTS, is_whole
from workbench.runs.custody import ledger_files, rollout_of
from workbench.runs.frames import read_lines, read_parts

# The end of a rollout id: <run>.<group>.<index>.<attempt>.
_PLACE = re.compile(r"\.(?P<group>\d+)\.\d+\.(?P<attempt>\d+)$")
_COUNTS = ("calls", "token_in_calls", "root_calls")


@dataclass(frozen=True)
class OpenGroup:
    """A group that was started, and neither trained nor given up.

    `finished`: its rows are stored; otherwise it is played again as `attempt`, under rollout ids that nobody has used.
    """

    group_id: str
    rollout_ids: list[str]
    """Of the attempt that was made, in index order; the keys of its rows when it is finished."""
    number: int
    attempt: int
    finished: bool
    recorded: bool
    """It has a line in groups.jsonl."""
    weight_version: int
    """At its dispatch."""


@dataclass(frozen=True)
class LeftOff:
    """`steps_done` steps were taken; `open_groups` come next, in the order in which they were started."""

    steps_done: int
    unrecorded: dict[int, list[str]]
    """Steps without a line in steps.jsonl, and the groups each was taken on."""
    open_groups: list[OpenGroup]
    next_group: int
    """Number of the first group that was never started."""
    segments: int
    """How often the run was begun or gone on with before; 0 for a new run alone."""
    replaced: int = 0
    evicted: int = 0
    step_lines: list[dict[str, Any]] = field(default_factory=list)
    """Of steps.jsonl, in order."""
    rejections: Counter[str] = field(default_factory=Counter)
    counts: GroupMetrics = field(default_factory=GroupMetrics)
    """Calls of the groups that have a line in groups.jsonl."""
    unfinished_parts: list[Path] = field(default_factory=list)
    """Parts of groups that are not finished, and drafts of files that were being written."""


NOTHING_YET = LeftOff(steps_done=0, unrecorded={}, open_groups=[], next_group=0, segments=0)
"""Where a new run stands."""


def read_left_off(run_dir: Path) -> LeftOff:
    """Where the run in `run_dir` stood. Raises RunStoreError for a damaged run, naming what does not fit."""
    events = read_lines(run_dir / "events.jsonl")
    kinds = Counter(event.get("kind") for event in events)
    trained = _steps_taken(run_dir)
    group_lines = {row["group_id"]: row for row in read_lines(run_dir / "groups.jsonl")}
    step_lines = read_lines(run_dir / "steps.jsonl")
    for step in (recorded := [line["step"] for line in step_lines]):
        if step not in trained:
            raise _damaged(run_dir, f"steps.jsonl has step {step}, but train/step-{step}.parquet is missing")
    for group_id in group_lines:
        if not is_whole(run_dir, group_id):
            raise _damaged(run_dir, f"groups.jsonl has group {group_id}, but not all of its parts are there")

    closed = {group_id for groups in trained.values() for group_id in groups}
    closed |= {e["group_id"] for e in events if e.get("kind") in ("group_replaced", "group_evicted")}
    started = {e["group_id"]: e for e in events if e.get("kind") == "group_started"}
    attempts = _attempts(run_dir, started)
    open_groups = [
        _open_group(run_dir, event, attempts, group_lines.get(group_id))
        for group_id, event in started.items()
        if group_id not in closed
    ]
    # Their rejections are told again, with the line that is missing.
    told_again = {group.group_id for group in open_groups if not group.recorded}
    rejected = [e for e in events if e.get("kind") == "rollout_rejected" and e["group_id"] not in told_again]
    return LeftOff(
        steps_done=len(trained),
        unrecorded={step: groups for step, groups in sorted(trained.items()) if step not in recorded},
        open_groups=sorted(open_groups, key=lambda group: group.number),
        next_group=max(attempts, default=-1) + 1,
        # A run that was stopped before it had `started` has `resumed` all the same.
        segments=max(kinds["started"], kinds["resumed"] + 1),
        replaced=kinds["group_replaced"],
        evicted=kinds["group_evicted"],
        step_lines=step_lines,
        rejections=Counter(str(event["cause"]) for event in rejected),
        counts=GroupMetrics(**{name: sum(line.get(name) or 0 for line in group_lines.values()) for name in _COUNTS}),
        unfinished_parts=[*_half_groups(run_dir), *_drafts(run_dir)],
    )


def remove_unfinished(left: LeftOff) -> list[str]:
    """Remove what `unfinished_parts` names, so that a new attempt finds its place free; returns the names."""
    for path in left.unfinished_parts:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [f"{path.parent.name}/{path.name}" for path in left.unfinished_parts]


def _steps_taken(run_dir: Path) -> dict[int, list[str]]:
    """Step → the groups it was taken on, in the order of the batch."""
    taken: dict[int, list[str]] = {}
    step_of: dict[str, int] = {}
    for path in sorted((run_dir / "train").glob("*.parquet")):
        part = read_parts("train", [path], ["step", "group_id"])
        groups = list(dict.fromkeys(part["group_id"].to_list()))
        steps = part["step"].unique().to_list()
        if len(steps) != 1 or path.name != f"step-{steps[0]}.parquet":
            raise _damaged(run_dir, f"train/{path.name} holds rows of steps {steps}")
        for group_id in groups:
            if group_id in step_of:
                both = f"{step_of[group_id]} and {steps[0]}"
                raise _damaged(run_dir, f"group {group_id} was trained on twice, in steps {both}")
            step_of[group_id] = steps[0]
        taken[steps[0]] = groups
    missing = sorted(set(range(1, max(taken, default=0) + 1)) - set(taken))
    if missing:
        raise _damaged(run_dir, f"train/step-{missing[0]}.parquet is missing, a later step is there")
    return taken


def _damaged(run_dir: Path, what: str) -> RunStoreError:
    return RunStoreError(
        f"{run_dir}: {what}; nobody can say where this run stood. Next: workbench verify {run_dir} names all that does "
        "not fit; put back what is missing, or begin another run."
    )


def _half_groups(run_dir: Path) -> list[Path]:
    parts = [path for kind, ending in PARTS.items() for path in sorted((run_dir / kind).glob(f"*.{ending}"))]
    return [path for path in parts if not is_whole(run_dir, path.stem)]


def _drafts(run_dir: Path) -> list[Path]:
    files = [path for path in run_dir.glob("*/.*.tmp") if path.is_file()]
    folders = [*(run_dir / "weights").glob(".v*"), *(run_dir / "checkpoints").glob(".step-*")]
    return sorted([*files, *run_dir.glob(".*.tmp"), *folders])


def _attempts(run_dir: Path, started: dict[str, dict[str, Any]]) -> dict[int, int]:
    """Group number → the highest attempt that any of its rollouts has had, by the events and by the ledgers."""
    ids = [rollout_id for event in started.values() for rollout_id in event["rollout_ids"]]
    ids += [rollout_of(path) for path in ledger_files(run_dir / "ledger")]
    attempts: dict[int, int] = {}
    for rollout_id in ids:
        if place := _PLACE.search(rollout_id):
            number, attempt = int(place["group"]), int(place["attempt"])
            attempts[number] = max(attempts.get(number, 0), attempt)
    return attempts


def _open_group(
    run_dir: Path, event: dict[str, Any], attempts: dict[int, int], line: dict[str, Any] | None
) -> OpenGroup:
    group_id = event["group_id"]
    place = _PLACE.search(event["rollout_ids"][0])
    if place is None:
        raise _damaged(run_dir, f"group {group_id} was started with the rollout id {event['rollout_ids'][0]!r}")
    number = int(place["group"])
    version = (line or event).get("weight_version")
    return OpenGroup(
        group_id=group_id,
        rollout_ids=event["rollout_ids"],
        number=number,
        attempt=attempts[number] + 1,
        finished=is_whole(run_dir, group_id),
        recorded=line is not None,
        weight_version=version if isinstance(version, int) else 0,
    )
