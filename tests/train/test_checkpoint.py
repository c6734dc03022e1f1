"""Checkpoints: a trainer goes on as if it had never stopped, and what is not whole is never gone on from."""

from __future__ import annotations

import errno
import json
import shutil
from itertools import groupby

import numpy as np
import polars as pl
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from train.samples import MemoryRows, row, store_group

from workbench.errors import DiskFull, RunStoreError, TrainerError
from workbench.train import Trainer, checkpoint, publish
from workbench.train.restore import check_same_weights, newest_checkpoint, stored_step


def batch(step):
    """The eight rows of a step: two groups of four, one placeholder in each."""
    return [
        row(8 * step + i, 20 + i, sampled=slice(8, 18), reward=float(i % 4 == 0), valid=i % 4 != 1) for i in range(8)
    ]


@pytest.fixture
def trainer(tiny_model, tmp_path):
    """A factory of trainers that all work in one run directory and can fetch the rows of four steps."""

    def make(model=tiny_model, **settings):
        config = {"model_path": str(model), "run_dir": str(tmp_path), "learning_rate": 1e-2, "threads": 2}
        source = MemoryRows([item for step in range(1, 5) for item in batch(step)])
        return Trainer(config | {"weight_decay": 0.1} | settings, source=source)

    return make


def take(learner, *steps):
    """Take steps as the campaign does: parts on disk, rows fetched by key."""
    for step in steps:
        for _, rows in groupby(batch(step), key=lambda item: item.group_id):
            store_group(learner.run_dir, list(rows))
        learner.train_step(step, [item.rollout_id for item in batch(step)])


def state_of(learner):
    """Weights, optimiser and generator as one comparable dictionary."""
    weights = learner.float32_weights()
    optimizer = checkpoint.optimizer_state(learner._optimizer, list(weights))
    flat = {f"{name}.{key}": value for name, state in optimizer.items() for key, value in state.items()}
    model = {f"model.{name}": value for name, value in learner.model.named_parameters()}
    return {
        name: value.detach().clone() for name, value in (weights | flat | model | checkpoint.generator_states()).items()
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped(trainer, dtype):
    unstopped = trainer(dtype=dtype)
    take(unstopped, 1, 2)
    torch.rand(3)  # so that the generator is somewhere
    unstopped.save_checkpoint(2, keep=2)
    before = state_of(unstopped)
    take(unstopped, 3, 4)
    again = trainer(dtype=dtype)
    assert again.restore(upto=3) == {"step": 2, "unusable": []}
    assert_same(state_of(again), before)
    take(again, 3, 4)
    assert_same(state_of(again), state_of(unstopped))


def test_steps_after_the_checkpoint_are_taken_again_from_their_stored_rows(trainer):
    stopped = trainer()
    take(stopped, 1)
    stopped.save_checkpoint(1, keep=1)
    take(stopped, 2, 3)
    again = trainer()
    assert again.restore(upto=3)["step"] == 1
    for step in (2, 3):
        assert again.retake(step)["retaken_mean_abs_delta"] == 0.0
    assert_same(state_of(again), state_of(stopped))


def test_without_a_checkpoint_all_steps_are_taken_again(trainer):
    stopped = trainer()
    take(stopped, 1, 2)
    again = trainer()
    assert again.restore(upto=2) == {"step": 0, "unusable": []}
    again.retake(1)
    again.retake(2)
    assert_same(state_of(again), state_of(stopped))


def test_a_step_taken_again_with_other_weights_is_an_error(trainer):
    stopped = trainer()
    take(stopped, 1, 2)
    with pytest.raises(TrainerError, match=r"Step 2, taken again, scores its rows .* off its own record"):
        trainer().retake(2)  # step 1 was left out


def test_a_step_without_its_parts_is_named(trainer, tmp_path):
    stopped = trainer()
    take(stopped, 1)
    with pytest.raises(RunStoreError, match=r"step-2.parquet is missing"):
        stopped.retake(2)
    group = pl.read_parquet(tmp_path / "train" / "step-1.parquet")["group_id"][0]
    (tmp_path / "receipts" / f"{group}.jsonl").unlink()
    with pytest.raises(RunStoreError, match=f"group {group} of step 1 has lost a part"):
        stopped.retake(1)


def test_the_model_of_a_checkpoint_opens_in_transformers_and_is_laid_out_like_published_weights(trainer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = trainer()
    take(learner, 1)
    folder = tmp_path / "checkpoints" / "step-1" / "model"
    assert learner.save_checkpoint(1, keep=1)["path"] == str(folder.parent)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, learner.model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    # vLLM reads every safetensors file of a folder, so there must be no other; the published ones are known to load.
    published = tmp_path / "weights" / "v1"
    learner.publish(1)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in published.iterdir())
    names = [set(load_file(f / "model.safetensors")) for f in (folder, published)]
    assert names[0] == names[1]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.fixture
def save(tiny_model, tmp_path):
    """Writes a small checkpoint of a step below `tmp_path`."""

    def write(step, keep=2):
        weights, state = {"a.weight": torch.full((4,), step)}, {"a.weight": {"step": torch.tensor(step)}}
        checkpoint.save(tmp_path, step, weights, state, {"cpu": torch.get_rng_state()}, source=tiny_model, keep=keep)

    return write


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "model/config.json", "trainer.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(save, tmp_path, name, damage):
    save(1)
    save(2)
    assert newest_checkpoint(tmp_path, upto=9)[0].step == 2
    path = tmp_path / "step-2" / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    if damage == "gone":
        path.unlink()
    held, wrong = newest_checkpoint(tmp_path, upto=9)
    assert held is not None and held.step == 1
    assert len(wrong) == 1 and "step-2" in wrong[0]
    shutil.rmtree(tmp_path / "step-1")
    assert newest_checkpoint(tmp_path, upto=9) == (None, wrong)


def test_a_checkpoint_of_another_layout_or_step_is_named(save, tmp_path):
    save(1)
    (tmp_path / "step-1").rename(tmp_path / "step-2")
    with pytest.raises(TrainerError, match=rf"expected layout {checkpoint.LAYOUT} and step 2, got .* and 1"):
        checkpoint.load(tmp_path, 2)


def test_generators_of_devices_that_are_not_here_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_rng_state()
    checkpoint.load_generators({"cpu": before, "cuda:0": torch.zeros(16, dtype=torch.uint8)})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_last_few_stay_and_what_a_killed_process_left_goes(save, tmp_path):
    (tmp_path / ".step-3-abc").mkdir()
    for step in (1, 2, 5, 10):
        save(step)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-10", "step-5"]
    assert newest_checkpoint(tmp_path, upto=9)[0].step == 5


def test_a_checkpoint_that_cannot_be_finished_leaves_the_old_one(save, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    save(1, keep=1)
    monkeypatch.setattr(checkpoint, "save_file", full)
    for step in (1, 2):
        with pytest.raises(OSError, match="no space"):
            save(step, keep=1)
    assert [item.name for item in tmp_path.iterdir()] == ["step-1"]
    assert checkpoint.load(tmp_path, 1).weights["a.weight"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_said_with_what_was_wanted_and_what_is_free(save, trainer, tmp_path, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(publish, "save_file", full)
    with pytest.raises(DiskFull, match=r"^the disk is full: .*/step-3 takes 0\.0 MB, and [\d,.]+ MB are free there"):
        save(3)
    learner = trainer(publish_dtype="float32")
    wanted = sum(weight.numel() for weight in learner.float32_weights().values()) * 4 / 1e6
    said = rf"/weights/v1 takes {wanted:,.1f} MB, .* Next: make room there, then .* workbench resume"
    with pytest.raises(DiskFull, match=said):
        learner.publish(1)
    assert list(tmp_path.glob("**/.*")) == []


def test_a_checkpoint_of_another_model_changes_nothing(trainer, tmp_path):
    learner = trainer()
    take(learner, 1)
    weights = dict(learner.float32_weights())
    weights["lm_head.other"] = weights.pop("model.norm.weight")
    checkpoint.save(tmp_path / "checkpoints", 1, weights, {}, {}, source=learner.model_path, keep=1)
    fresh = trainer()
    before = state_of(fresh)
    with pytest.raises(TrainerError, match="is of another model: 2 of"):
        fresh.restore(upto=1)
    assert_same(state_of(fresh), before)


def test_a_step_taken_again_whose_log_probs_are_no_numbers_is_an_error(trainer):
    stopped = trainer()
    take(stopped, 1)
    stored = stored_step(stopped.run_dir, 1)
    nothing = [np.full_like(values, np.nan) for values in stored.trainer_logprobs]
    with pytest.raises(TrainerError, match="scores its rows nan nat off its own record"):
        check_same_weights(stored, nothing)
