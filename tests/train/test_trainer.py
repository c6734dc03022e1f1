"""Trainer: it learns, it is exact about who votes, and what it publishes is what it trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from train.samples import MemoryRows, row, sample_rows

from workbench.errors import ComponentDied, ModelMissing, TrainerError
from workbench.runs import schema
from workbench.train import Trainer
from workbench.train.publish import published


@pytest.fixture
def trainer(tiny_model, tmp_path):
    """A factory of trainers on the tiny model; `rows` are what they can fetch."""

    def make(rows=(), **settings):
        config = {"model_path": str(tiny_model), "run_dir": str(tmp_path), "learning_rate": 1e-3, "threads": 2}
        return Trainer(config | settings, source=MemoryRows(rows))

    return make


def eight_rows(**changes):
    """Two groups of four, the second row of each a placeholder; rewards differ within a group."""
    return [
        row(i, 20 + i, sampled=slice(8, 18), reward=float(i % 4 == 0), valid=i % 4 != 1, **changes) for i in range(8)
    ]


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def keys_of(rows):
    return [item.rollout_id for item in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewarded_answers_become_likely_and_the_others_less_so(trainer, dtype):
    # The clip is opened wide, so that a few steps on one batch may go as far as they like.
    learner = trainer(learning_rate=3e-3, dtype=dtype, clip_low=0.999, clip_high=1e6)
    rows = sample_rows(learner.model, [1, 4093, 198], 8, 3, lambda ids: float(ids[0] % 2), seed=0)
    assert 0 < sum(item.reward for item in rows) < 8
    for step in range(1, 9):
        metrics, part = learner.step_on(step, rows)
        if step == 1:
            assert metrics["mean_abs_logprob_delta"] < 0.1
    change = np.array([delta.sum() for delta in part["delta"]])
    rewarded = np.array([item.reward for item in rows]) == 1
    assert (change[rewarded] > np.log(10)).all() and (change[~rewarded] < 0).all(), change


def test_rows_of_the_trainers_own_weights_have_ratio_one(trainer):
    learner = trainer()
    rows = sample_rows(learner.model, [1, 4093, 198], 8, 6, lambda ids: float(ids[0] % 2), seed=0)
    metrics, _ = learner.step_on(1, rows)
    assert metrics["mean_abs_logprob_delta"] < 1e-4 and metrics["clip_fraction"] == 0
    assert metrics["probs_ratio"] == pytest.approx(1.0, abs=1e-4)


def test_two_runs_are_bit_identical(trainer):
    finals = []
    for _ in range(2):
        learner = trainer()
        metrics = [learner.step_on(step, eight_rows())[0]["loss"] for step in (1, 2)]
        finals.append((metrics, weights_of(learner)))
    assert finals[0][0] == finals[1][0] and torch.equal(finals[0][1], finals[1][1])


def test_how_a_batch_is_split_changes_only_rounding(trainer):
    results = []
    for tokens in (25, 10_000):
        learner = trainer(micro_batch_tokens=tokens)
        metrics, part = learner.step_on(1, eight_rows())
        results.append((metrics, np.concatenate(part["trainer_logprobs"])))
    (split, split_T), (whole, whole_T) = results
    assert split["micro_batches"] == 6 and whole["micro_batches"] == 1
    np.testing.assert_allclose(split_T, whole_T, atol=2e-5)
    for name in ("loss", "grad_norm", "token_mult_prob_error", "probs_ratio_p95"):
        assert split[name] == pytest.approx(whole[name], rel=1e-4), name


@pytest.mark.parametrize("reward", [1000.0, float("nan")])
def test_a_placeholders_reward_changes_nothing(trainer, reward):
    finals = []
    for value in (0.0, reward):
        learner = trainer()
        rows = eight_rows()
        for place in (1, 5):
            object.__setattr__(rows[place], "reward", value)
        metrics, part = learner.step_on(1, rows)
        assert part["advantage"][1] == part["advantage"][5] == 0.0
        finals.append(({k: v for k, v in metrics.items() if k != "seconds"}, weights_of(learner)))
    assert finals[0][0] == finals[1][0] and torch.equal(finals[0][1], finals[1][1])


def test_a_batch_of_placeholders_changes_no_weight(trainer):
    learner = trainer(weight_decay=0.1)
    learner.step_on(1, eight_rows())  # so that the optimiser has momentum that could move something
    before = weights_of(learner).clone()
    metrics, part = learner.step_on(2, [row(i, 9, sampled=slice(4, 9), valid=False) for i in range(8)])
    assert torch.equal(weights_of(learner), before)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["valid_row_rate"] == metrics["optimizer_stepped"] == 0
    assert metrics["reward_mean"] is None and not any(values.any() for values in part["trainer_logprobs"])


def test_a_step_writes_its_part_and_clears_its_rows(trainer, tmp_path):
    rows = eight_rows()
    learner = trainer(rows)
    metrics = learner.train_step(3, keys_of(rows)[::-1])
    frame = pl.read_parquet(tmp_path / "train" / "step-3.parquet")
    assert dict(frame.schema) == schema.polars_schema("train")
    assert frame["rollout_id"].to_list() == keys_of(rows)[::-1] and set(frame["step"]) == {3}
    for record, item in zip(frame.iter_rows(named=True), rows[::-1], strict=True):
        ours, delta = np.array(record["trainer_logprobs"]), np.array(record["delta"])
        assert len(ours) == len(item.token_ids) and not ours[~item.loss_mask].any()
        np.testing.assert_allclose(delta, np.where(item.loss_mask, ours - item.logprobs, 0), atol=1e-5)
    deltas = np.concatenate([np.array(d)[item.loss_mask] for d, item in zip(frame["delta"], rows[::-1], strict=True)])
    assert metrics["mean_abs_logprob_delta"] == pytest.approx(np.abs(deltas).mean(), rel=1e-5)
    assert (metrics["rows"], metrics["valid_row_rate"], metrics["sampled_tokens"]) == (8, 0.75, 60)
    assert not learner.source.rows


def test_a_missing_row_stops_the_step_before_anything_changes(trainer, tmp_path):
    rows = eight_rows()
    learner = trainer(rows[:-1])
    before = weights_of(learner).clone()
    with pytest.raises(TrainerError, match=rows[-1].rollout_id):
        learner.train_step(1, keys_of(rows))
    assert torch.equal(weights_of(learner), before)
    assert len(learner.source.rows) == 7 and not (tmp_path / "train").exists()


def test_rows_are_cleared_only_after_their_part_is_on_disk(trainer, tmp_path):
    rows = eight_rows()
    learner = trainer(rows)
    (tmp_path / "train").write_text("in the way")
    with pytest.raises(OSError):
        learner.train_step(1, keys_of(rows))
    assert len(learner.source.rows) == 8


def test_rows_that_cannot_be_cleared_do_not_undo_a_step_that_is_stored(trainer, tmp_path, caplog):
    rows = eight_rows()
    learner = trainer(rows)

    def refuse(keys):
        raise ComponentDied("the data plane is gone")

    learner.source.clear = refuse
    assert learner.train_step(1, keys_of(rows))["optimizer_stepped"] == 1
    assert (tmp_path / "train" / "step-1.parquet").exists()
    assert "8 trained rows are not cleared, left to the sweeper: the data plane is gone" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_no_number_stops_the_step_before_anything_changes(trainer, dtype):
    learner = trainer(dtype=dtype)
    next(learner.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    before = weights_of(learner).clone()
    with pytest.raises(TrainerError, match=r"Step 1: the gradient norm is (nan|inf); no weight was changed"):
        learner.step_on(1, eight_rows())
    assert torch.equal(weights_of(learner), before)


def test_shifted_log_probs_stop_the_step_before_anything_changes(trainer):
    # Cold, so that one token's log-prob says little about its neighbour's.
    learner = trainer(temperature=0.02)
    rows = sample_rows(learner.model, [1, 4093, 198], 8, 10, lambda ids: float(ids[0] % 2), seed=0)
    _, part = trainer(temperature=0.02).step_on(1, rows)
    shifted = [
        replace(item, logprobs=np.roll(own, 1)) for item, own in zip(rows, part["trainer_logprobs"], strict=True)
    ]
    before = weights_of(learner).clone()
    with pytest.raises(TrainerError, match="shifted by one position"):
        learner.step_on(2, shifted)
    assert torch.equal(weights_of(learner), before)


def test_ids_outside_the_vocabulary_are_named(trainer):
    rows = eight_rows()
    rows[3].token_ids[5] = 60_000
    with pytest.raises(TrainerError, match=rf"{rows[3].rollout_id}.*60000.*49152"):
        trainer().step_on(1, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("published_as", ["float32", "bfloat16"])
def test_published_weights_are_the_trained_ones(trainer, tiny_model, dtype, published_as):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = trainer(dtype=dtype, publish_dtype=published_as)
    learner.step_on(1, eight_rows())
    folder = learner.publish(1)
    with safe_open(f"{folder}/model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118  (not a dict)
        assert {str(stored.get_tensor(name).dtype) for name in stored.keys()} == {f"torch.{published_as}"}  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, published_as)
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    for (name, ours), theirs in zip(learner.float32_weights().items(), loaded.parameters(), strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs), name
    chat = [{"role": "user", "content": "in 2024"}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat) == AutoTokenizer.from_pretrained(
        tiny_model
    ).apply_chat_template(chat)


def test_the_last_two_versions_stay_and_nothing_half_written(trainer, tmp_path):
    learner = trainer()
    for version in (1, 2, 10, 10):
        folder = learner.publish(version)
    assert folder == str(tmp_path / "weights" / "v10")
    assert published(tmp_path / "weights") == [2, 10]
    assert sorted(item.name for item in (tmp_path / "weights").iterdir()) == ["v10", "v2"]


def test_a_bfloat16_pass_has_positions_as_the_engine_has_them(trainer, tiny_model):
    """A frequency rounded to bfloat16 is off by up to 0.2 %, which far into a long row is a radian and more."""
    from transformers import AutoModelForCausalLM

    learner = trainer(dtype="bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    for (name, ours), theirs in zip(learner.model.named_buffers(), plain.buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    ids = torch.from_numpy(np.random.default_rng(1).integers(20, 49000, (1, 400)))
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids).logits for model in (learner.model, plain)))


def test_updates_smaller_than_a_bfloat16_step_are_not_lost(trainer):
    learner = trainer(dtype="bfloat16", learning_rate=1e-6)
    before = {name: weight.clone() for name, weight in learner.float32_weights().items()}
    for step in (1, 2):
        learner.step_on(step, eight_rows())
    moved = [(learner.float32_weights()[name] - weight).abs().max().item() for name, weight in before.items()]
    assert all(0 < change < 1e-5 for change in moved)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"learing_rate": 1.0}, TrainerError, "learing_rate"),
        ({"dtype": "float16"}, TrainerError, "float32, bfloat16"),
        ({"advantage": {"name": "grpo", "options": {"base": 1}}}, TrainerError, "baseline"),
        ({"temperature": 0.0}, TrainerError, "above 0"),
        ({"reduction": "constant"}, TrainerError, "reduction=constant needs constant_tokens"),
        ({"model_path": "no-such-model"}, ModelMissing, "no-such-model"),
    ],
)
def test_wrong_settings_are_refused_in_words(trainer, settings, error, says):
    with pytest.raises(error, match=says):
        trainer(**settings)


def test_a_trainer_for_a_gpu_says_that_there_is_none(trainer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainerError, match=r"is to run on a GPU and torch .* sees none"):
        trainer(device="gpu")


@pytest.mark.ray
def test_the_actor_trains_rows_that_the_finalizer_published(tq, ray_cluster, tiny_model, tmp_path):
    import asyncio

    from train.test_train_rows import group_row

    from workbench.finalizer.rows import publish_rows
    from workbench.train.trainer import TrainerActor

    written = [group_row(i, 12 + i, reward=float(i), sample_mask=int(i != 2)) for i in range(4)]
    keys = asyncio.run(publish_rows(written, 0))
    settings = {"model_path": str(tiny_model), "run_dir": str(tmp_path), "threads": 2}
    actor = TrainerActor.options(num_cpus=1).remote(settings)
    try:
        assert ray_cluster.get(actor.ready.remote(), timeout=60)["threads"] == 2
        metrics = ray_cluster.get(actor.train_step.remote(1, keys), timeout=60)
        assert (metrics["rows"], metrics["valid_row_rate"], metrics["optimizer_stepped"]) == (4, 0.75, 1)
        assert (
            ray_cluster.get(actor.ready.remote(), timeout=60)["threads"] == 2
        )  # TransferQueue must not have set it to 1
        assert (tmp_path / "train" / "step-1.parquet").is_file()
        assert not set(keys) & set(asyncio.run(tq.tags("train", deadline_s=20.0)))
        with pytest.raises(TrainerError):
            ray_cluster.get(actor.train_step.remote(2, keys), timeout=60)
    finally:
        ray_cluster.kill(actor)


def test_step_n_is_taken_with_the_weights_of_version_n_minus_1(trainer):
    """So tokens of version 1 are not old in step 2, and those of version 0 are."""
    rows = [
        replace(item, meta={"weight_version_spans": [["c", 0, len(item.token_ids), place % 2]]})
        for place, item in enumerate(eight_rows())
    ]
    metrics, part = trainer(off_policy="mask_old", max_lag=0).step_on(2, rows)
    assert part["left_out"] == [
        "off_policy" if i % 2 == 0 else ("placeholder" if i % 4 == 1 else None) for i in range(8)
    ]
    assert metrics["token_lag_max"] == 1


def test_what_left_the_loss_before_a_pass_keeps_its_reason_whatever_the_pass_says_of_it(trainer):
    rows = [
        replace(item, meta={"weight_version_spans": [["c", 0, len(item.token_ids), i // 4]]})
        for i, item in enumerate(eight_rows())
    ]
    _, part = trainer(off_policy="reject", max_lag=0, max_mult_prob_error=1.0001).step_on(2, rows)
    assert part["left_out"] == [
        *("placeholder" if i == 1 else "off_policy" for i in range(4)),
        *("placeholder" if i == 1 else "mult_prob_error" for i in range(4)),
    ]
