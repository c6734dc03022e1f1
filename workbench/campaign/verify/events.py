"""Verify events: what the events of a run say that its other files say as well.

In: events.jsonl. Out: `Told`: how each group was started, why rollouts were rejected, how many groups were given up,
where the run was gone on with and how it ended. Invariant: of what happened again after a stop only the last time
counts, as in the lines that were written of it; a line that is there twice, to its time, counts once.
Not here: comparing (steps, account).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from workbench.runs.frames import scan_lines

_OF_A_GROUP = ("step", "task_seed", "weight_version")
_OTHER_ENDS = ("stopped", "failed", "ended_by_runner")
_BY_RECIPE = ("set_up", "started", "serving", "finished")
_VERDICTS = ("rollout_rejected", "receipt")


@dataclass
class Told:
    """What the events say."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each group the step, task seed and weight version that it was started with."""
    rollouts: dict[str, list[str]] = field(default_factory=dict)
    """Of each group the ids of its rollouts."""
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By rollout what was said of it when its group was finished: of a campaign's those that were rejected."""
    evicted: Counter[int] = field(default_factory=Counter)
    """Step → groups that were given up while it waited for its own."""
    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int | None = None
    """How often the run had been begun before the last time; None where that was not recorded."""
    resumed_after: int = 0
    """The step after which the run was last gone on with; 0 where it never was."""
    repeated: list[dict[str, Any]] = field(default_factory=list)
    """Each event that is there another time, as nobody writes it."""
    recipes: list[str] = field(default_factory=list)
    """SHA-256 of recipe.yaml each time that it was stored."""
    by_recipe: bool = False
    """A recipe was run or served here; a benchmark, say, stores what it does as a run and has none."""
    finished: dict[str, Any] | None = None
    """What was said at the end of a campaign that came to it; None where something else ended it."""


def read_told(run_dir: Path) -> Told:
    """All of it that can be read."""
    told = Told()
    seen: set[bytes] = set()
    for event in scan_lines(run_dir / "events.jsonl").rows:
        line = orjson.dumps(event, option=orjson.OPT_SORT_KEYS)
        if "at" in event and line in seen:
            told.repeated.append(event)
            continue
        seen.add(line)
        kind, group_id = event.get("kind"), event.get("group_id", "")
        if kind == "group_started":
            told.groups[group_id] = {name: event[name] for name in _OF_A_GROUP if name in event}
            told.rollouts[group_id] = event.get("rollout_ids") or []
        elif kind in _VERDICTS:
            told.verdicts[event.get("rollout_id", "")] = event
        elif kind == "group_evicted":
            told.evicted[event.get("step", 0)] += 1
        elif kind == "set_up":
            told.finished = None
            told.resumed = max(told.kinds["started"], told.kinds["resumed"] + 1) if told.kinds["set_up"] else 0
        elif kind == "resumed":
            told.resumed_after = event.get("after_step", 0)
            told.evicted = Counter({step: many for step, many in told.evicted.items() if step <= told.resumed_after})
            for published in event.get("groups_published_again", ()):
                # It goes to the step that now comes first, unless it had its line before.
                told.groups.get(published, {}).pop("step", None)
        elif kind == "finished" or kind in _OTHER_ENDS:
            told.finished = event if kind == "finished" else None
        if "recipe_digest" in event:
            told.recipes.append(event["recipe_digest"])
        told.kinds[str(kind)] += 1
    told.by_recipe = not told.kinds.keys().isdisjoint(_BY_RECIPE)
    return told
