"""Ranks: two processes, each with half of every weight, take the steps that one takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train.samples import MemoryRows, row
from train.two_ranks import RANKS, run_on_two

from workbench.errors import TrainerError
from workbench.train import Trainer, checkpoint

SETTINGS = {"learning_rate": 1e-3, "micro_batch_tokens": 50, "threads": 2, "kl_coef": 0.05, "max_mult_prob_error": 1e6}


def batch(step):
    """Nine rows in three groups, one of them longer than a micro-batch, one a placeholder: unequal shares for two."""
    rows = [row(10 * step + i, 12 + 3 * i, sampled=slice(4, 12 + 2 * i), reward=float(i % 3), valid=i != 4, size=3)
            for i in range(8)]  # fmt: skip
    return [*rows, row(10 * step + 8, 90, sampled=slice(30, 90), reward=1.0, size=3)]


def one_rank(rank, address, model, folder):
    from workbench.train.ranks import RankTrainer

    rows = {step: batch(step) for step in (1, 2)}
    source = MemoryRows([item for part in rows.values() for item in part])
    config = SETTINGS | {"model_path": model, "run_dir": folder, "publish_dtype": "float32"}
    trainer = RankTrainer(config, rank, RANKS, address, source)
    metrics = []
    for step in (1, 2):
        metrics.append(trainer.train_step(step, [item.rollout_id for item in rows[step]]))
        if step == 1:
            trainer.save_checkpoint(1, keep=1)
    trainer.publish(2)
    scored = trainer.score([[5, 6, 7, 8]])
    assert trainer.restore(upto=1) == {"step": 1, "unusable": []}
    again, _ = trainer.step_on(2, rows[2])
    if rank == 0:
        assert not source.rows
        rescored = trainer.score([[5, 6, 7, 8]])
        answer = {"metrics": metrics, "scored": scored, "again": again, "rescored": rescored}
        torch.save(answer, f"{folder}/answer.pt")
    else:
        trainer.score([[5, 6, 7, 8]])
    trainer.leave()


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes that import torch and transformers, on whatever machine
def test_two_ranks_take_the_step_that_one_takes(tiny_model, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (tmp_path / "two").mkdir()
    run_on_two(one_rank, str(tiny_model), str(tmp_path / "two"))
    two = torch.load(tmp_path / "two" / "answer.pt", weights_only=True)

    alone = Trainer(SETTINGS | {"model_path": str(tiny_model), "run_dir": str(tmp_path / "one")}, MemoryRows([]))
    before = {name: weight.clone() for name, weight in alone.float32_weights().items()}
    for step, theirs in zip((1, 2), two["metrics"], strict=True):
        ours, part = alone.step_on(step, batch(step))
        for name in ("loss", "grad_norm", "kl_penalty", "token_mult_prob_error", "reward_mean"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-7), name
        assert (theirs["loss_tokens"], theirs["micro_batches"]) == (ours["loss_tokens"], ours["micro_batches"])
        assert ours["micro_batches"] % 2 == 1, "an even number would leave no rank without a share"
    import polars as pl

    stored = pl.read_parquet(tmp_path / "two" / "train" / "step-2.parquet")
    for recorded, own in zip(stored["trainer_logprobs"], part["trainer_logprobs"], strict=True):
        np.testing.assert_allclose(np.array(recorded), own, atol=2e-4)
    published = load_file(tmp_path / "two" / "weights" / "v2" / "model.safetensors")
    for name, weight in alone.float32_weights().items():
        moved, difference = (weight - before[name]).norm(), (published[name] - weight).norm()
        assert moved > 0 and difference < 1e-2 * moved, name
    assert two["scored"][0] == pytest.approx(alone.score([[5, 6, 7, 8]])[0], abs=1e-3)

    # The checkpoint of step 1: the two ranks went back to it, one rank goes on from it, and so does transformers.
    assert two["again"]["loss"] == pytest.approx(two["metrics"][1]["loss"], rel=1e-5)
    assert two["rescored"][0] == pytest.approx(two["scored"][0], abs=1e-5)
    taken_over = Trainer(SETTINGS | {"model_path": str(tiny_model), "run_dir": str(tmp_path / "two")}, MemoryRows([]))
    assert taken_over.restore(upto=1) == {"step": 1, "unusable": []}
    assert taken_over.step_on(2, batch(2))[0]["loss"] == pytest.approx(two["metrics"][1]["loss"], rel=1e-4)
    assert taken_over.score([[5, 6, 7, 8]])[0] == pytest.approx(two["scored"][0], abs=1e-3)
    folder = tmp_path / "two" / "checkpoints" / "step-1" / "model"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == alone.model.num_parameters()
    assert set(load_file(folder / "model.safetensors")) == set(published)


def one_rank_in_bfloat16(rank, address, model, folder):
    from workbench.train.ranks import RankTrainer

    config = SETTINGS | {"model_path": model, "run_dir": folder, "dtype": "bfloat16"}
    trainer = RankTrainer(config, rank, RANKS, address, MemoryRows([]))
    before = trainer.score([[5, 6, 7, 8]])
    metrics, part = trainer.step_on(1, batch(1))
    after = trainer.score([[5, 6, 7, 8]])
    if rank == 0:
        logprobs = [[float(value) for value in values] for values in part["trainer_logprobs"]]
        torch.save({"metrics": metrics, "scored": [before, after], "logprobs": logprobs}, f"{folder}/answer.pt")
    trainer.leave()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_in_bfloat16_score_and_step_as_one_does(tiny_model, tmp_path):
    run_on_two(one_rank_in_bfloat16, str(tiny_model), str(tmp_path))
    two = torch.load(tmp_path / "answer.pt", weights_only=True)

    settings = SETTINGS | {"model_path": str(tiny_model), "run_dir": str(tmp_path), "dtype": "bfloat16"}
    alone = Trainer(settings, MemoryRows([]))
    before = alone.score([[5, 6, 7, 8]])
    metrics, part = alone.step_on(1, batch(1))
    # What is rounded is the same on both: the weights, not the rotary frequencies, which would part them by 0.1 nat.
    assert two["scored"][0][0] == pytest.approx(before[0], abs=1e-3)
    for theirs, own in zip(two["logprobs"], part["trainer_logprobs"], strict=True):
        np.testing.assert_allclose(np.array(theirs), own, atol=1e-3)
    assert two["metrics"]["loss"] == pytest.approx(metrics["loss"], rel=1e-3)
    # Gradients are summed in another order and in bfloat16 before they are float32: the step is close, not the same.
    assert two["metrics"]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=0.02)
    assert two["scored"][1][0] == pytest.approx(alone.score([[5, 6, 7, 8]])[0], abs=0.05)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_ranks_are_actors_that_answer_as_one_trainer(tq, ray_cluster, tiny_model, tmp_path):
    import asyncio

    from train.test_train_rows import group_row

    from workbench.finalizer.rows import publish_rows
    from workbench.train.ranks import TrainerRanksActor

    keys = asyncio.run(publish_rows([group_row(i, 12 + i, reward=float(i)) for i in range(4)], 0))
    settings = {"model_path": str(tiny_model), "run_dir": str(tmp_path), "threads": 2, "micro_batch_tokens": 20}
    actor = TrainerRanksActor.options(num_cpus=1).remote(settings, 2)
    try:
        assert ray_cluster.get(actor.ready.remote(), timeout=200)["ranks"] == 2
        metrics = ray_cluster.get(actor.train_step.remote(1, keys), timeout=60)
        assert (metrics["rows"], metrics["optimizer_stepped"]) == (4, 1)
        assert (tmp_path / "train" / "step-1.parquet").is_file()
        assert ray_cluster.get(actor.publish.remote(1), timeout=60) == str(tmp_path / "weights" / "v1")
        saved = ray_cluster.get(actor.save_checkpoint.remote(1, 1), timeout=60)["path"]
        assert checkpoint.load(tmp_path / "checkpoints", 1).optimizer and saved.endswith("checkpoints/step-1")
        assert not set(keys) & set(asyncio.run(tq.tags("train", deadline_s=20.0)))
    finally:
        ray_cluster.kill(actor)


def test_memory_that_runs_out_in_rank_0_is_not_called_a_lost_rank():
    from workbench.train.ranks import TrainerRanks

    class Full:
        def train_step(self, step, keys):
            raise torch.OutOfMemoryError("no room for 2 GiB\nmore words")

    trainer = object.__new__(TrainerRanks)
    trainer._others, trainer._own = [], Full()
    with pytest.raises(TrainerError, match=r"^Rank 0 failed in train_step: OutOfMemoryError: no room for 2 GiB "):
        trainer.train_step(1, [])
