"""A campaign of a mixture of experts: what the engine's routers chose is what the trainer replays.

One run; everything else is asked of what it stored. The engine computes in bfloat16, the trainer in float32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from campaign.test_campaign import STARTS_WITHIN_S, Command
from train.samples import MemoryRows
from train.test_recompute import recompute

from workbench import models, runs
from workbench.campaign.verify import verify_run
from workbench.train import Trainer
from workbench.train.restore import stored_step
from workbench.wire import decode_routes

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models.build("tiny-moe")
    command = Command(tmp_path_factory.mktemp("moe"), recipe="moe_router_replay")
    assert command.end(STARTS_WITHIN_S + 60) == 0, command.err
    assert command.survivors() == []
    return command.run_dir


def first_step(run_dir: Path, folder: Path, mode: str, change: Any = None) -> dict[str, Any]:
    """Metrics of the run's first step, taken again on its stored rows by a trainer with the starting weights."""
    # With several threads the sums of a mixture's gradients differ in their last bit from run to run.
    config = {"model_path": "tiny-moe", "run_dir": str(folder), "router_replay": mode, "threads": 1}
    rows = stored_step(run_dir, 1).rows
    metrics, _ = Trainer(config, MemoryRows([])).step_on(1, [change(row) for row in rows] if change else rows)
    return metrics


def test_every_position_in_the_loss_is_replayed_and_the_run_verifies(run_dir):
    run = runs.open(run_dir)
    assert run.groups["route_coverage"].to_list() == [1.0] * run.groups.height
    assert run.steps["replay_coverage"].to_list() == [1.0, 1.0]
    assert all(0.5 < share <= 1 for share in run.steps["router_agreement"])
    report = verify_run(run_dir)
    assert report.ok, report.differences[:3]


def test_weights_change_and_every_sync_of_them_is_proved(run_dir):
    """Experts and routers included: what the engine holds afterwards scores as the trainer's does."""
    run = runs.open(run_dir)
    assert all(norm > 0 for norm in run.steps["grad_norm"])
    # What bfloat16 leaves; an engine whose experts were not packed again is 0.4 away.
    proofs = json.loads((run_dir / "summary.json").read_text())["proofs"]
    assert [proof["weight_version"] for proof in proofs] == [1, 2]
    assert all(proof["mean_abs_delta"] < 0.1 for proof in proofs)
    assert proofs[0]["mean_abs_delta"] != proofs[1]["mean_abs_delta"]
    assert set(run.calls["mode"]) == {"text", "token_in"}


def test_code_that_shares_none_of_ours_replays_the_same(run_dir, tmp_path):
    model = models.build("tiny-moe")
    code, said = recompute(run_dir, "--model", str(model))
    assert code == 0, said
    # It is the routes that do it: with its own routers it scores the tokens otherwise.
    copied = Path(shutil.copytree(run_dir, tmp_path / "run"))
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    recipe["train"]["router_replay"]["mode"] = "none"
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, said = recompute(copied, "--model", str(model))
    assert code == 1, said


def test_routes_are_aligned_with_the_tokens_that_went_in(run_dir, tmp_path):
    """Routers of a trainer with the same weights agree with the routes as they are, and not one token beside."""
    aligned = first_step(run_dir, tmp_path, "direct")["router_agreement"]
    beside = [
        first_step(run_dir, tmp_path, "direct", lambda row, by=by: replace(row, routes=np.roll(row.routes, by, axis=0)))
        for by in (1, -1)
    ]
    assert aligned > 0.8
    assert all(metrics["router_agreement"] < 0.3 for metrics in beside)


def test_replay_brings_the_trainer_nearer_to_the_sampler(run_dir, tmp_path):
    recorded = runs.open(run_dir).steps["mean_abs_logprob_delta"][0]
    replayed, alone = (first_step(run_dir, tmp_path, mode)["mean_abs_logprob_delta"] for mode in ("direct", "none"))
    assert replayed == pytest.approx(recorded, rel=1e-3)
    assert replayed < 0.8 * alone


def test_deferred_replay_trains_the_same(run_dir, tmp_path):
    direct = first_step(run_dir, tmp_path, "direct")
    deferred = first_step(run_dir, run_dir, "deferred", lambda row: replace(row, routes=None))
    for name in ("loss", "grad_norm", "mean_abs_logprob_delta", "router_agreement", "replay_coverage"):
        assert deferred[name] == direct[name], name


def test_a_step_taken_again_replays_the_stored_routes(run_dir):
    """As a resumed campaign does after a checkpoint: from the run's files alone."""
    config = {"model_path": "tiny-moe", "run_dir": str(run_dir)}
    off = {
        mode: Trainer(config | {"router_replay": mode}, MemoryRows([])).retake(1)["retaken_mean_abs_delta"]
        for mode in ("direct", "deferred", "none")
    }
    assert off["direct"] < 1e-5 and off["deferred"] < 1e-5 < 1e-3 < off["none"], off


def test_every_captured_call_has_one_route_a_token_but_the_last(run_dir):
    run = runs.open(run_dir)
    calls = 0
    for rollout_id in run.rollouts["rollout_id"].to_list():
        for call in run.staged(rollout_id):
            routes = decode_routes(call.extras["routed_experts"])
            assert routes.values.shape == (call.delta_len, 3, 4) and routes.dtype == "int8"
            assert (routes.values[:-1] >= 0).all() and (routes.values[:-1] < 16).all()
            assert (routes.values[-1] == -1).all()
            calls += 1
    assert calls >= run.rollouts.height
