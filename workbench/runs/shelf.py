"""Shelf: the runs that lie in a directory, one row each, with what truly became of them.

    run_directories("reports") ─► overview(…) ─► one row a run: status, step, reward, token_in_rate

A run whose process is gone without a last word was stopped, whatever its status file still says; one that nobody can
read is a row with its error. Runs of a sweep lie one level deeper and are found too. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from workbench.runs import reader
from workbench.runs.damage import in_short
from workbench.runs.gradient import learned_nothing

COLUMNS = {
    "run": pl.String,
    "status": pl.String,  # a state of `runs.condition`
    "resumed": pl.Int64,  # how often it was stopped and gone on with
    "step": pl.Int64,  # null, as `steps` is, of a served run: nothing is trained there
    "steps": pl.Int64,  # what its recipe asks for
    "reward": pl.Float64,  # mean of the last step; of a served run that of all valid rollouts
    "token_in_rate": pl.Float64,  # of a campaign's finished rollouts: all calls, roots and failed ones too
    "token_in_rate_after_roots": pl.Float64,
    "rejected": pl.Int64,  # rollouts without a vote
    "rollouts": pl.Int64,
    "guessed": pl.Int64,  # valid rollouts whose last call nobody named
    "ended_early": pl.Int64,
    "learned_nothing": pl.Boolean,  # steps were taken, and none had a gradient from a reward; null of a served run
    "started_at": pl.Float64,  # Unix time, s
    "error": pl.String,
    "path": pl.String,
}


def run_directories(folder: Path) -> list[Path]:
    """Directories of runs in `folder` and in the folders below it, by name. `folder` itself, where it is a run."""
    if (folder / "status.json").is_file():
        return [folder]
    found = {path.parent for pattern in ("*/status.json", "*/*/status.json") for path in folder.glob(pattern)}
    return sorted(found)


def overview(directories: Iterable[Path]) -> pl.DataFrame:
    """One row a run, oldest first: the columns of `COLUMNS`. What was not recorded is null."""
    rows = [_row(directory) for directory in directories]
    return pl.DataFrame(rows, schema=COLUMNS).sort("started_at", "run", nulls_last=True)


def _row(directory: Path) -> dict[str, Any]:
    try:
        return _read(reader.open(directory))
    except Exception as error:  # whatever is wrong with one run, the others are listed
        return {"run": directory.name, "status": "unreadable", "error": str(error), "path": str(directory)}


def finished_rollouts(run: reader.Run) -> pl.DataFrame:
    """The rollouts of `run` whose group has its receipts, the last of a group's parts: what `workbench verify` counts,
    and what a resumed run goes on with. Of what has no directory all of them."""
    if getattr(run, "path", None) is None:
        return run.rollouts
    finished = [path.stem for path in (run.path / "receipts").glob("*.jsonl")]
    return run.rollouts.filter(pl.col("group_id").is_in(finished))


def counted_calls(run: reader.Run) -> pl.DataFrame:
    """The calls that a run's numbers are about: of a campaign those of its finished rollouts, since how the others end
    is not known; of a served run all of them, as agents may never ask for a receipt."""
    return (
        run.calls
        if getattr(run, "served", False)
        else run.calls.join(finished_rollouts(run), on="rollout_id", how="semi")
    )


def guessed(rollouts: pl.DataFrame) -> pl.DataFrame:
    """The valid rollouts whose last call nobody named: the parent links chose it."""
    return rollouts.filter((pl.col("sample_mask") == 1) & (pl.col("terminal_selection") == "heuristic"))


def token_in_rates(calls: pl.DataFrame) -> dict[str, float | None]:
    """How many of `calls` went on from recorded tokens, of all of them and of those after a rollout's first."""
    token_in, roots = (int((calls["mode"] == mode).sum()) for mode in ("token_in", "text"))
    return {
        "token_in_rate": token_in / calls.height if calls.height else None,
        "token_in_rate_after_roots": token_in / (calls.height - roots) if calls.height > roots else None,
    }


def _read(run: reader.Run) -> dict[str, Any]:
    campaign, steps, rollouts = run.campaign.row(0, named=True), run.steps, run.rollouts
    served = run.served
    return {
        "run": run.name,
        "status": campaign["state"],
        "resumed": int(run.status.get("resumed") or 0),
        "step": None if served else steps["step"].max() or 0,
        "steps": None if served else (run.recipe.get("train") or {}).get("steps"),
        "reward": _valid_mean(rollouts) if served else steps.sort("step")["reward_mean"][-1] if steps.height else None,
        **token_in_rates(counted_calls(run)),
        "rejected": int((rollouts["sample_mask"] == 0).sum()),
        "rollouts": rollouts.height,
        "guessed": guessed(rollouts).height,
        "ended_early": rollouts["ended_early"].count(),
        "learned_nothing": None if served else learned_nothing(steps, rollouts),
        "started_at": campaign["started_at"],
        "error": campaign["error"] or in_short(run.damage, run.path).removeprefix(" · ") or None,
        "path": str(run.path),
    }


def _valid_mean(rollouts: pl.DataFrame) -> float | None:
    """Mean reward of the valid rollouts that have one."""
    rewards = rollouts.filter(pl.col("sample_mask") == 1)["reward"].drop_nulls()
    return float(rewards.to_numpy().mean()) if rewards.len() else None
