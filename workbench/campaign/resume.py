"""Resume: go on with a stopped run, from its store and its last checkpoint, as if it had not been stopped.

    recipe.yaml + allowed changes ─► the run's own recipe
    left_off ─► trainer: checkpoint, later steps taken again ─► weights synced and proved ─► missing records ─► pumps

Invariants: what is sampled and how it is learned from does not change within a run; no group is trained on twice, none
that was finished is sampled again; the weight version goes on from the last step that was taken.
Not here: what counts as finished and taken (left_off), publishing finished groups again (sampling).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import runs
from workbench.actors import within
from workbench.campaign.left_off import LeftOff, read_left_off
from workbench.campaign.state import CampaignState
from workbench.campaign.training import TrainPump
from workbench.config import load_recipe
from workbench.errors import RecipeError, RunStoreError, SetupError
from workbench.finalizer.messages import FinalizedGroup
from workbench.finalizer.metrics import pool_metrics
from workbench.finalizer.stored import read_group
from workbench.places import as_word, refuse_shipped
from workbench.recipe_schema import Recipe
from workbench.runs.condition import broken_status
from workbench.runs.frames import read_parts

# What may change in the middle of a run: how far it goes, how long things may take, what the machine offers.
_MAY_CHANGE = {
    "train.steps", "train.threads", "train.micro_batch_tokens", "train.buffer_groups", "engine.threads",
    "train.ranks", "train.ranks_per_node", "engine.kv_cache_gib", "engine.port", "engine.workers",
    "engine.tensor_parallel", "engine.enforce_eager", "gateway.host", "gateway.port", "rollouts.max_inflight_groups",
    "rollouts.max_inflight_rollouts", "finalizer.actors", "reports.dir",
}  # fmt: skip
_SECTIONS_MAY_CHANGE = ("checkpoint.", "deadlines.", "data_plane.", "ray.")


def resumable(run_dir: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe to go on with, the run's own with `overrides`; reads only.

    What a run last said of itself decides nothing: where that cannot be read, its records are gone on with.
    Raises RunStoreError where there is no run, one that is being written, or a damaged one; SetupError for a served run
    and one that has taken all its steps; RecipeError for an override of what must stay.
    """
    run = runs.open(run_dir)
    refuse_shipped(run_dir, "workbench run cpu_smoke begins a run of your own")
    state, _ = run.campaign.select("state", "error").row(0)
    if state == "running":
        raise RunStoreError(f"{run_dir} is still running: another process writes it. Next: wait for it, or stop it.")
    if run.served:
        raise SetupError(
            f"{run_dir} is a served run: nothing is trained in it, so there is nothing to go on with. Next: workbench "
            f"serve RECIPE begins another one, workbench inspect {as_word(run_dir)} shows this one"
        )
    if state == "unreadable" and run.events.filter(kind="started").is_empty():
        raise RunStoreError(
            f"{broken_status(run_dir)[0]}, and no event says that a campaign began there, so there is nothing to go on "
            f"with. Next: workbench run or workbench serve begins another run"
        )
    if not (run_dir / "recipe.yaml").exists():
        raise RunStoreError(f"{run_dir} has no recipe.yaml, so it cannot be known what to go on with.")
    before, recipe = load_recipe(run_dir / "recipe.yaml"), load_recipe(run_dir / "recipe.yaml", overrides)
    _check_changes(run_dir, before, recipe)
    left = read_left_off(run_dir)
    if recipe.train.steps < left.steps_done:
        raise RecipeError(f"train.steps: {run_dir} has taken {left.steps_done} steps already; got {recipe.train.steps}")
    if state == "done" and recipe.train.steps == left.steps_done:
        raise SetupError(
            f"{run_dir} is done, all {left.steps_done} steps are taken. Next: workbench report {as_word(run_dir)}, or "
            f"go on further: workbench resume {as_word(run_dir)} train.steps={2 * left.steps_done}"
        )
    _check_readable(run_dir, left)
    return recipe


async def catch_up(state: CampaignState, training: TrainPump, left: LeftOff) -> None:
    """Bring trainer, worker and records to where the run stopped; then the pumps go on after `left.steps_done`.

    Raises TrainerError or RunStoreError where the weights cannot be had again, and what a weight sync raises.
    """
    done, trainer, timeout_s = left.steps_done, state.fleet.trainer, state.recipe.train.timeout_s
    state.replaced, state.evicted, state.rejections = left.replaced, left.evicted, left.rejections.copy()
    state.counts = left.counts
    restored: dict[str, Any] = {"step": 0, "unusable": []}
    retaken: dict[int, dict[str, Any]] = {}
    synced: dict[str, Any] = {}
    if done:
        state.writer.status_soon(phase="loading a checkpoint", step=done, steps=state.recipe.train.steps)
        restored = await within(trainer.restore.remote(done), timeout_s, "the trainer", "loading a checkpoint")
        for step in range(restored["step"] + 1, done + 1):
            state.writer.status_soon(phase="taking a step again", step=step)
            retaken[step] = await within(
                trainer.retake.remote(step), timeout_s, "the trainer", f"taking step {step} again"
            )
        synced = await state.weights.advance(done)
    state.writer.event(
        "resumed",
        after_step=done,
        checkpoint=restored["step"],
        unusable_checkpoints=restored["unusable"],
        steps_taken_again=list(retaken),
        groups_published_again=[group.group_id for group in left.open_groups if group.finished],
        groups_sampled_again=[group.group_id for group in left.open_groups if not group.finished],
    )
    for step, group_ids in left.unrecorded.items():
        groups = [await asyncio.to_thread(_finalized, state.fleet.run_dir, group_id) for group_id in group_ids]
        measured = retaken.get(step, {}) | (synced if step == done else {})
        state.writer.step(_step_line(step, groups, measured))
    if retaken and state.recipe.checkpoint.every:
        await training.checkpoint(done)


def _check_readable(run_dir: Path, left: LeftOff) -> None:
    """Read what going on will read back, while nothing has been started that a damaged part would end."""
    names = [path.name.removeprefix("step-") for path in (run_dir / "checkpoints").glob("step-*")]
    saved = max((int(name) for name in names if name.isdecimal() and int(name) <= left.steps_done), default=0)
    groups = [group.group_id for group in left.open_groups if group.finished]
    groups += [group_id for group_ids in left.unrecorded.values() for group_id in group_ids]
    again = [run_dir / "train" / f"step-{step}.parquet" for step in range(saved + 1, left.steps_done + 1)]
    try:
        groups += read_parts("train", again)["group_id"].to_list()
        for group_id in dict.fromkeys(groups):
            read_group(run_dir, group_id)
    except RunStoreError as error:
        raise RunStoreError(
            f"Nothing was started: {error} That part is needed to go on: put it back from a copy, or begin a new run."
        ) from error


def _step_line(step: int, groups: list[FinalizedGroup], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a step that was taken and not recorded; what nobody knows any more is left out."""
    versions = [row.weight_version_min for group in groups for row in group.rows]
    oldest = min((version for version in versions if version is not None), default=None)
    return {
        "step": step,
        "weight_version": step,
        **pool_metrics(groups),
        **measured,
        "staleness_max": None if oldest is None else step - 1 - oldest,
        "train_s": measured.get("seconds"),
    }


def _finalized(run_dir: Path, group_id: str) -> FinalizedGroup:
    stored = read_group(run_dir, group_id)
    if stored is None:
        raise RunStoreError(f"{run_dir}: group {group_id} was trained on, but not all of its parts are there")
    return stored.finalized(0, {})


def _check_changes(run_dir: Path, before: Recipe, after: Recipe) -> None:
    was = dict(_leaves(before.model_dump()))
    for key, value in _leaves(after.model_dump()):
        if was.get(key) == value or key in _MAY_CHANGE or key.startswith(_SECTIONS_MAY_CHANGE):
            continue
        if key.endswith("timeout_s"):
            continue
        raise RecipeError(
            f"{key}: a resumed run keeps its recipe, because its steps would otherwise be of two experiments; it was "
            f"{was.get(key)!r}, got {value!r}. What may change: train.steps, deadlines, and what the machine offers. "
            f"Next: start a new run; {_a_beginning(run_dir)}"
        )


def _a_beginning(run_dir: Path) -> str:
    """Where a new run can have this one's weights from."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*/model")]
    if not steps:
        return "this one left no checkpoint to begin from, as checkpoint.every was 0 or it took too few steps"
    return f"it may begin from model.path={run_dir}/checkpoints/step-{max(steps)}/model"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "options":
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
