"""A run that is stopped and gone on with is the run that was never stopped: same groups, same steps, same weights.

Ray, TransferQueue, gateway, finalizers and trainer are real. The same with every process killed is in soak_resume.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign.resume_case import FOR_EVER_S, SETTINGS, reply
from campaign.scripted_fleet import STARTS_WITHIN_S, Running, ScriptedFleet, empty_data_plane
from campaign.soak_resume import events, tear, trained_rows
from safetensors.torch import load_file

from workbench import runs
from workbench.campaign.controller import run_campaign
from workbench.campaign.proof import SyncProof
from workbench.campaign.resume import resumable
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.runs.shelf import overview

pytestmark = [pytest.mark.ray, pytest.mark.timeout(800)]

SHARED_PLANE = ["data_plane.storage_units=2", "finalizer.actors=1", "train.steps=3"]


def write_script(path: Path) -> Path:
    """Answers that depend on group, index and turn alone, so that a group sampled again says the same."""
    lines: list[dict[str, Any]] = [{"text": "for the probe, which is of no rollout"}]
    for group, index in ((group, index) for group in range(6) for index in range(2)):
        said = [reply(f"run.{group}.{index}.0", turn, []) for turn in range(8)]
        lines += [{"rollout": f"*.{group}.{index}.[0-9]", **line} for line in said]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


async def test_a_run_that_was_stopped_in_its_middle_ends_as_the_one_that_was_not(
    tq: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    script = write_script(tmp_path / "script.jsonl")
    recipe = load_recipe("cpu_smoke", [*SETTINGS, *SHARED_PLANE, f"engine.script_path={script}"])
    await asyncio.wait_for(run_campaign(recipe, whole, make_fleet=ScriptedFleet), STARTS_WITHIN_S)

    # Stopped after step 2 was taken, before its weights are proved and anything is recorded of it.
    in_the_proof = asyncio.Event()

    async def never_proved(fleet: ScriptedFleet, version: int) -> SyncProof:
        if version == 2:
            in_the_proof.set()
            await asyncio.sleep(FOR_EVER_S)
        return SyncProof(version, 0.0, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedFleet, "prove", never_proved)
        async with Running(recipe, halted) as running:
            await running.until(in_the_proof.is_set, STARTS_WITHIN_S)
    assert runs.open(halted).campaign["state"].to_list() == ["stopped"]
    assert runs.open(halted).steps["step"].to_list() == [1]
    await empty_data_plane()  # as it would be in a new process
    tear(halted)

    again = resumable(halted)
    result = await asyncio.wait_for(run_campaign(again, halted, resume=True, make_fleet=ScriptedFleet), STARTS_WITHIN_S)
    assert (result.steps, result.weight_version) == (3, 3)
    (resumed,) = events(halted, "resumed")
    assert (resumed["after_step"], resumed["checkpoint"], resumed["steps_taken_again"]) == (2, 1, [2])
    open_groups = resumed["groups_published_again"] + resumed["groups_sampled_again"]
    assert set(open_groups) <= {"g00004", "g00005"} and len(set(open_groups)) == len(open_groups)

    run, unstopped = runs.open(halted), runs.open(whole)
    assert run.campaign["state"].to_list() == ["done"]
    assert run.steps["step"].to_list() == run.steps["weight_version"].to_list() == [1, 2, 3]
    # Every row of every group once, with the tokens of the run that was not stopped.
    assert trained_rows(halted) == trained_rows(whole)
    assert run.groups["group_id"].is_unique().all() and run.rollouts["rollout_id"].is_unique().all()
    assert run.rollouts.height == unstopped.rollouts.height == 12
    # What the terminal showed last is of the whole run, as the list of runs has it; the first half of it included.
    for listed in overview([whole, halted]).iter_rows(named=True):
        assert runs.open(listed["path"]).status["token_in_rate"] == pytest.approx(listed["token_in_rate"])
    assert verify_run(halted).ok and not list(halted.rglob("*.tmp"))
    for swept in (*events(whole, "swept"), *events(halted, "swept")):
        assert swept["left"] == {"staging": 0, "train": 0}
    left, right = (load_file(run_dir / "weights" / "v3" / "model.safetensors") for run_dir in (halted, whole))
    before = load_file(whole / "weights" / "v2" / "model.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-6, err_msg=name)
    assert max(float((left[name] - before[name]).abs().max()) for name in left) > 1e-4
