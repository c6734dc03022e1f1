"""Going on with a stopped run, in one process: the trainer is real, the worker and the data plane are stand-ins.

All groups of the run are stored, so nothing is sampled; what is trained, recorded and saved is what a resumed run does.
The same with every part real is in test_resume, and with every part real and killed in soak_resume.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from train.samples import MemoryRows

from workbench import runs
from workbench.campaign.controller import run_campaign
from workbench.campaign.policy import PolicyWorkers
from workbench.campaign.proof import SyncProof
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.demo import recorded_run
from workbench.errors import ComponentDied
from workbench.finalizer.rows import pack_row
from workbench.finalizer.stored import read_group
from workbench.finalizer.sweeper import Sweeper
from workbench.runs.writer import store_recipe
from workbench.train import Trainer
from workbench.train.rows import unpack_row


class Remote:
    """An object as a Ray handle shows it: every method is a coroutine under `.remote`."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)

        async def remote(*args, **kwargs):
            return await asyncio.to_thread(method, *args, **kwargs)

        return SimpleNamespace(remote=remote)


class Worker:
    """Counts versions, and dies while it loads the one in `dies_at`."""

    def __init__(self, dies_at):
        self.dies_at = dies_at
        self.versions = []

    def update_weights(self, path, version, hold, straddle):
        if version == self.dies_at:
            raise ComponentDied("the policy worker is gone")
        self.versions.append(version)
        return {}

    def resume(self):
        pass

    def status(self):
        return {"live_calls": 0, "running_generations": 0}


class LocalFleet:
    """The parts that a run of stored groups needs."""

    gateway_url, control = "http://127.0.0.1:1", None

    def __init__(self, recipe, run_dir, *, dies_at=None, **_):
        self.run_dir, self.timings_s, self.probe = run_dir, {}, {}
        settings = recipe.train.model_dump(include={"learning_rate", "threads", "dtype"})
        self.rows = MemoryRows([])
        config = settings | {"model_path": recipe.model.path, "run_dir": str(run_dir), "publish_dtype": "float32"}
        self.trainer = Remote(Trainer(config, source=self.rows))
        self.worker_object = Worker(dies_at)
        self.policy = PolicyWorkers([Remote(self.worker_object)])
        self.finalizers = self

    async def republish(self, request):
        stored = read_group(self.run_dir, request.group_id)
        rows = [unpack_row(pack_row(row)) for row in stored.rows]
        assert not self.rows.rows.keys() & {row.rollout_id for row in rows}
        self.rows.rows |= {row.rollout_id: row for row in rows}
        return stored.finalized(request.weight_version, {})

    async def prove(self, version):
        return SyncProof(version, 0.0, 0.0)

    def heartbeats(self):
        return {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


@pytest.fixture(scope="module")
def go_on(tmp_path_factory, tiny_model):
    """A function that makes a run of four stored, untrained groups and resumes it until its worker dies, if it does."""

    async def nothing(*_):
        await asyncio.sleep(0)
        return {}

    folder = tmp_path_factory.mktemp("runs")

    async def resume(name, *overrides, dies_at=None):
        run_dir = folder / name
        if not run_dir.exists():
            shutil.copytree(recorded_run(), run_dir)
            shutil.rmtree(run_dir / "train")
            (run_dir / "steps.jsonl").write_bytes(b"")
        settings = [f"model.path={tiny_model}", "train.steps=4", "train.groups_per_step=1", "train.learning_rate=0.001"]
        recipe = load_recipe("cpu_misbehave", [*settings, "train.threads=1", *overrides])
        store_recipe(run_dir, recipe.model_dump(mode="json"))
        fleets = []

        def make_fleet(*args, **kwargs):
            fleets.append(LocalFleet(*args, dies_at=dies_at, **kwargs))
            return fleets[0]

        try:
            await run_campaign(recipe, run_dir, resume=True, make_fleet=make_fleet)
        except ComponentDied:
            assert dies_at is not None
        return runs.open(run_dir), fleets[0].worker_object.versions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweeper, "run", nothing)
        patch.setattr(Sweeper, "finish", nothing)
        yield resume


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def whole(go_on):
    """The run that nothing stopped, which writes no checkpoint."""
    run, versions = await go_on("whole", "checkpoint.every=0")
    assert versions == [1, 2, 3, 4]
    return run


def events(run, kind):
    found = [json.loads(line) for line in (run.path / "events.jsonl").read_bytes().splitlines()]
    return [event for event in found if event["kind"] == kind]


def final_weights(run):
    return load_file(run.path / "weights" / "v4" / "model.safetensors")


@pytest.mark.parametrize("every", [0, 1, 2])
async def test_a_run_that_died_in_a_sync_goes_on_to_the_same_weights(go_on, whole, every):
    stopped = f"stopped-{every}"
    died, versions = await go_on(stopped, f"checkpoint.every={every}", dies_at=3)
    assert versions == [1, 2] and died.campaign["state"].to_list() == ["failed"]
    # Step 3 was taken, and nothing of it is recorded but its part.
    assert died.steps["step"].to_list() == [1, 2] and (died.path / "train" / "step-3.parquet").exists()

    run, versions = await go_on(stopped, f"checkpoint.every={every}")
    assert versions == [3, 4]
    resumed = events(run, "resumed")[-1]
    checkpoint = {0: 0, 1: 2, 2: 2}[every]
    assert (resumed["after_step"], resumed["checkpoint"]) == (3, checkpoint)
    assert resumed["steps_taken_again"] == list(range(checkpoint + 1, 4))
    assert resumed["groups_published_again"] == ["g00003"] and resumed["groups_sampled_again"] == []
    assert run.steps["step"].to_list() == run.steps["weight_version"].to_list() == [1, 2, 3, 4]
    # The step whose line was missing has what is known of it again, its weight sync too.
    assert run.steps["sync_s"].null_count() == 0
    written = sorted(path.name for path in (run.path / "checkpoints").glob("step-*"))
    assert written == ([] if every == 0 else ["step-3", "step-4"])
    np.testing.assert_allclose(run.steps["loss"], whole.steps["loss"], rtol=1e-6)
    assert run.steps["group_ids"].to_list() == whole.steps["group_ids"].to_list()
    trained = pl.concat([pl.read_parquet(path) for path in sorted((run.path / "train").glob("*.parquet"))])
    assert trained["rollout_id"].is_unique().all() and trained.height == 16
    for name, weight in final_weights(whole).items():
        assert np.array_equal(weight, final_weights(run)[name]), name
    assert verify_run(run.path).ok and run.status["status"] == "done"


async def test_a_finished_run_goes_on_further_from_its_last_checkpoint(go_on, whole):
    await go_on("finished", "train.steps=2", "checkpoint.every=2")
    run, versions = await go_on("finished")
    assert versions == [2, 3, 4]
    assert events(run, "resumed")[-1]["checkpoint"] == 2 and events(run, "resumed")[-1]["steps_taken_again"] == []
    for name, weight in final_weights(whole).items():
        assert np.array_equal(weight, final_weights(run)[name]), name
