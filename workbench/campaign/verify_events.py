"""Verify events: what the events of a run say that its other files say as well.

In: events.jsonl. Out: `Told`: of each group how it was started, of each step how many groups were given up, and where
the run was gone on with. Invariant: of what happened again after a stop only the last time counts, as in the lines that
were written of it.
Not here: comparing (verify_steps, verify_run).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.runs.frames import scan_lines

_OF_A_GROUP = ("step", "task_seed", "weight_version")


@dataclass
class Told:
    """What the events say."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each group the step, task seed and weight version that it was started with."""
    evicted: Counter[int] = field(default_factory=Counter)
    """Step → groups that were given up while it waited for its own."""
    resumed_after: int = 0
    """The step after which the run was last gone on with; 0 where it never was."""


def read_told(run_dir: Path) -> Told:
    """All of it that can be read."""
    told = Told()
    for event in scan_lines(run_dir / "events.jsonl").rows:
        kind = event.get("kind")
        if kind == "group_started":
            told.groups[event.get("group_id", "")] = {name: event[name] for name in _OF_A_GROUP if name in event}
        elif kind == "group_evicted":
            told.evicted[event.get("step", 0)] += 1
        elif kind == "resumed":
            told.resumed_after = event.get("after_step", 0)
            told.evicted = Counter({step: many for step, many in told.evicted.items() if step <= told.resumed_after})
            for group_id in event.get("groups_published_again", ()):
                # It goes to the step that now comes first, unless it had its line before.
                told.groups.get(group_id, {}).pop("step", None)
    return told
