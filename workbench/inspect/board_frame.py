"""Board frame: what a campaign is doing now, from nothing but the files of its run.

In: a run (being written, ended or crashed; a served one too) or a ledger, and the time. Out: one dict of plain values
for table, picture and live view alike. Invariants: only reads; a number that the files do not hold is None with its
reason, never 0; a run whose writer is gone has nothing in flight. Not here: how it looks (board).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import polars as pl

from workbench.inspect.causes import in_words
from workbench.inspect.html import number
from workbench.runs.shelf import token_in_rates

RATE = "token_in_rate after roots"
_LAST_STEPS = 200
_SHOWN_GROUPS = 12
_GIVEN_UP = frozenset({"group_replaced", "group_evicted"})
_PHASES = ("rollout_s", "train_s", "publish_s", "sync_s")
_NO_STEP = "no optimiser step"
_NOT_IN_STEP = "the step has none"
_ENDED = {
    "done": "the run is done",
    "failed": "the run has failed",
    "stopped": "the run was stopped",
    "unreadable": "how the run ended cannot be read",
}


def board_frame(run: Any, now: float) -> dict[str, Any]:
    """The board of `run` at Unix time `now`."""
    if not hasattr(run, "campaign"):
        return _ledger_frame(run)
    campaign = run.campaign.row(0, named=True)
    status, steps, groups = run.status, run.steps, run.groups
    events = run.events
    last = steps.row(steps.height - 1, named=True) if steps.height else {}
    flying = _in_flight(events, groups, now) if campaign["state"] == "running" else []
    calls = _calls(run.calls) if run.served else []
    return {
        "run": campaign["run"],
        "what": "served" if run.served else "campaign",
        "state": campaign["state"],
        "ended": _ENDED.get(campaign["state"]),
        "phase": status.get("phase"),
        "step": campaign["steps"],
        "steps": status.get("steps"),
        "error": campaign["error"] or _last(events, "failed", "group_replaced"),
        "rejection": _last(events, "rollout_rejected"),
        "damage": run.damage,
        "tiles": _served_tiles(campaign, run) if run.served else _tiles(campaign, last, groups, flying),
        "flying": flying[:_SHOWN_GROUPS],
        "in_flight": len(flying),
        "causes": _causes(groups),
        "calls": calls,
        "no_step": "a served run has no steps" if run.served else _no_step(campaign["state"]),
        "series": _series(steps),
    }


def _served_tiles(campaign: dict[str, Any], run: Any) -> list[dict[str, Any]]:
    """What a served run has: rollouts and their calls, with a receipt or not yet."""
    calls, finalised = run.calls, run.rollouts
    rollouts = calls["rollout_id"].n_unique()
    rewards = finalised.filter(pl.col("sample_mask") == 1)["reward"].drop_nulls()
    without = calls.filter(~pl.col("rollout_id").is_in(finalised["rollout_id"].implode()))["rollout_id"].n_unique()
    after_roots = token_in_rates(calls)["token_in_rate_after_roots"]
    return [
        _tile("rollouts", f"{rollouts:,}", ""),
        _tile("calls", f"{calls.height:,}", ""),
        _tile("calls captured", f"{calls.height - calls['failure_reason'].count():,} of {calls.height:,}", ""),
        _tile(RATE, _number(after_roots, ".4g"), "only roots"),
        _tile("rollouts without a receipt", f"{without:,}", ""),
        _tile("rollouts valid", f"{campaign['valid_rollouts']:,} of {campaign['rollouts']:,}", ""),
        _tile("reward, mean", f"{rewards.mean():.3f}" if rewards.len() else None, "no valid rollout has one"),
        *_guessed(run.groups),
    ]


def _guessed(groups: pl.DataFrame) -> list[dict[str, Any]]:
    """A tile where the last call of a rollout was named by nobody; none where there is no such rollout."""
    if "terminal_selection_counts" not in groups.columns:
        return []
    chosen: Counter[str] = Counter()
    for counts in groups["terminal_selection_counts"].drop_nulls():
        chosen.update(orjson.loads(counts))
    told = f"{chosen['heuristic']:,} of {chosen.total():,}"
    return [_tile("last calls chosen by heuristic", told, "")] if chosen["heuristic"] else []


def _calls(calls: pl.DataFrame) -> list[dict[str, Any]]:
    """How many calls were captured, and as what; the others by their reason."""
    counts: dict[tuple[bool, str], int] = {}
    for mode, reason in calls.select("mode", "failure_reason").rows():
        how = f"not captured: {reason}" if reason else "captured, root" if mode == "text" else f"captured, {mode}"
        counts[not reason, how] = counts.get((not reason, how), 0) + 1
    ordered = sorted(counts.items(), key=lambda each: (not each[0][0], -each[1], each[0][1]))
    return [{"how": how, "captured": captured, "calls": count} for (captured, how), count in ordered]


def _after_roots(groups: pl.DataFrame) -> float | None:
    """The run's rate over all finished groups, as summary and list have it, without a look at every call."""
    if groups.is_empty() or not {"token_in_calls", "root_calls"} <= set(groups.columns):
        return None
    calls, token_in, roots = (int(groups[name].sum()) for name in ("calls", "token_in_calls", "root_calls"))
    return token_in / (calls - roots) if calls > roots else None


def _tiles(
    campaign: dict[str, Any], last: dict[str, Any], groups: pl.DataFrame, flying: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    running = campaign["state"] == "running"
    idle = "nothing is in flight" if running else _ENDED[campaign["state"]]
    oldest = flying[0] if flying else None
    # Of the whole step: groups that were ready when it began have taken no time of it.
    seconds = sum(last.get(phase) or 0.0 for phase in _PHASES)
    rate = last["sampled_tokens"] / seconds if seconds and last.get("sampled_tokens") is not None else None
    unit = "tokens/s sampled, last step"
    missing = _NOT_IN_STEP if last else _no_step(campaign["state"])
    return [
        _tile("groups in flight", f"{len(flying):,}" if running else None, idle),
        _tile("oldest running rollout", f"{oldest['rollout']}, {clock(oldest['age_s'])}" if oldest else None, idle),
        _tile(unit, None if rate is None else f"{rate:,.1f}", missing),
        _tile(RATE, _number(_after_roots(groups), ".4g"), "only roots" if groups.height else "no finished group"),
        _tile("reward, last step", _number(last.get("reward_mean"), ".3f"), missing),
        _tile("staleness (versions), last step", _number(last.get("staleness_max"), ",d"), missing),
        _tile("rollouts valid", f"{campaign['valid_rollouts']:,} of {campaign['rollouts']:,}", ""),
        _tile("groups finalised", f"{campaign['groups']:,}", ""),
        _tile("weight version", _number(campaign["weight_version"], ",d"), _no_step(campaign["state"])),
        *_guessed(groups),
    ]


def _no_step(state: str) -> str:
    """Of a run that has ended none is still to come."""
    return f"{_NO_STEP}{'' if state in _ENDED else ' yet'}"


def _tile(label: str, value: str | None, why: str) -> dict[str, Any]:
    return {"label": label, "value": value, "why": None if value is not None else why}


def _number(value: Any, spec: str) -> str | None:
    return None if value is None else number(value, spec)


def _in_flight(events: pl.DataFrame, groups: pl.DataFrame, now: float) -> list[dict[str, Any]]:
    """Groups that were started and neither finalised nor given up, oldest first."""
    done = set(groups["group_id"].to_list())
    started: dict[str, dict[str, Any]] = {}
    for at, kind, fields in (
        events.filter(pl.col("kind").str.starts_with("group_")).select("at", "kind", "fields").rows()
    ):
        event = orjson.loads(fields)
        group_id = event.get("group_id")
        if kind == "group_started" and group_id not in done:
            rollouts = event.get("rollout_ids") or [group_id]
            started[group_id] = {
                "group": group_id,
                "step": event.get("step"),
                "rollouts": len(rollouts),
                "rollout": rollouts[0],
                "age_s": max(0.0, now - at),
            }
        elif kind in _GIVEN_UP:
            started.pop(group_id, None)
    return sorted(started.values(), key=lambda group: -group["age_s"])


def _causes(groups: pl.DataFrame) -> list[dict[str, Any]]:
    total: dict[str, int] = {}
    for text in groups["rejections"].drop_nulls().to_list():
        for cause, count in orjson.loads(text).items():
            total[cause] = total.get(cause, 0) + count
    return [{"cause": cause, "rollouts": count} for cause, count in sorted(total.items(), key=lambda x: (-x[1], x[0]))]


def _series(steps: pl.DataFrame) -> dict[str, list[Any]]:
    shown = steps.tail(_LAST_STEPS)
    names = ("step", "reward_mean", "token_in_rate_after_roots", "valid_row_rate", "staleness_max", *_PHASES)
    return {name: shown[name].to_list() for name in names}


def _last(events: pl.DataFrame, *kinds: str) -> str | None:
    """The last event of these kinds in a line. A rejected rollout is data; only the others are errors of the run."""
    found = events.filter(pl.col("kind").is_in(kinds))
    if found.is_empty():
        return None
    event = orjson.loads(found["fields"][-1])
    parts = [event.get("rollout_id") or event.get("group_id"), event.get("cause") or event.get("error")]
    detail = in_words(event.get("detail")) or event.get("message")
    return f"{found['kind'][-1]}: {' '.join(str(p) for p in parts if p)}{f', {detail}' if detail else ''}"


def _ledger_frame(ledger: Any) -> dict[str, Any]:
    rollouts, calls = ledger.rollouts, ledger.calls
    causes = rollouts["cause"].drop_nulls().value_counts(sort=True, name="rollouts").to_dicts()
    why = "a ledger holds custody rows only"
    return {
        "run": ledger.path.name,
        "what": "ledger",
        "state": "ledger",
        "ended": "a ledger: custody rows only",
        "phase": None,
        "step": 0,
        "steps": None,
        "error": None,
        "rejection": None,
        "damage": ledger.damage,
        "tiles": [
            _tile("rollouts rejected", f"{rollouts['cause'].count():,} of {rollouts.height:,}", ""),
            _tile("calls recorded", f"{calls.height:,}", ""),
            _tile("failed or unresolved", f"{calls['failure_reason'].count():,}", ""),
            *(_tile(name, None, why) for name in ("groups in flight", "tokens/s sampled", "reward", "staleness")),
        ],
        "flying": [],
        "in_flight": 0,
        "causes": sorted(causes, key=lambda row: (-row["rollouts"], row["cause"])),
        "calls": [],
        "no_step": "a ledger has no steps",
        "series": {"step": []},
    }


def clock(seconds: float) -> str:
    """A duration as "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
