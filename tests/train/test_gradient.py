"""Gradient: the trainer's, through its own batches and loss, against a float64 model and the formulas written out."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from train.samples import MemoryRows
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.train import Trainer
from workbench.train.batch import recomputed_layers, token_logprobs
from workbench.train.rows import TrainRow
from workbench.train.votes import cast_votes

LOW, HIGH, VOCABULARY = 0.2, 0.28, 97


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A folder with a two-layer model of 97 tokens, random, tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.3, dtype=torch.float32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder)
    return folder


def rows_of(model, temperature=1.0):
    """Eight rows of two groups, multi-turn masks, unequal lengths, one placeholder; sampler a little off the model."""
    g = np.random.default_rng(7)
    rows = []
    for place in range(8):
        T = int(g.integers(9, 30))
        ids, mask = g.integers(0, VOCABULARY, T), np.arange(T) % 7 > 2
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double() / temperature
        own = np.r_[0.0, logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()]
        sampler = np.where(mask, own + 0.3 * g.standard_normal(T), 0.0).astype(np.float32)
        group = place // 4
        meta = {"weight_version_spans": [["c", 0, 6, 0], ["c", 6, T, 1]]}
        rows.append(
            TrainRow(
                f"r.{group}.{place % 4}.0",
                f"r.{group}",
                place % 4,
                float(g.random()),
                place != 2,
                ids,
                mask,
                sampler,
                meta,
            )
        )
    return rows


def reference(model, start, rows, advantage, settings):
    """Loss, gradient and mean KL penalty in float64: full logits, token by token, the definitions, nothing of ours."""
    model, start = copy.deepcopy(model).double(), copy.deepcopy(start).double()
    temperature, reduction = settings.get("temperature", 1.0), settings.get("reduction", "token")
    terms: list[tuple[int, torch.Tensor]] = []
    penalties: list[float] = []
    for place, row in enumerate(rows):
        if not row.sample_mask:
            continue
        ids = torch.from_numpy(row.token_ids)[None]
        logp = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        with torch.no_grad():
            logr = (start(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        used = [t for t in range(len(row.token_ids)) if row.token_mask[t]]
        deltas = [abs(logp[t - 1, ids[0, t]].item() - float(row.logprobs[t])) for t in used]
        limit = settings.get("max_mult_prob_error")
        if limit is not None and np.exp(deltas).mean() > limit:
            continue
        if settings.get("off_policy") == "mask_old":
            used = [t for t in used if t >= 6]
        for t in used:
            p, old, A = logp[t - 1, ids[0, t]], float(row.logprobs[t]), float(advantage[place])
            if (cap := settings.get("tis_cap")) is None:
                ratio, weight = (p - old).exp(), 1.0
            else:
                ratio, weight = (p - p.detach()).exp(), min((p.detach() - old).exp().item(), cap)
            term = -weight * torch.minimum(ratio * A, ratio.clamp(1 - LOW, 1 + HIGH) * A)
            if coefficient := settings.get("kl_coef", 0.0):
                d = logr[t - 1, ids[0, t]] - p
                penalty = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[settings.get("kl_estimator", "k3")]
                penalties.append(penalty.item())
                term = term + coefficient * penalty
            terms.append((place, term))
    places = [place for place, _ in terms]
    share = {
        "token": lambda place: len(terms),
        "sequence": lambda place: places.count(place) * len(set(places)),
        "constant": lambda place: settings.get("constant_tokens", 1) * len(set(places)),
    }[reduction]
    loss = torch.stack([term / share(place) for place, term in terms]).sum()
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return loss.item(), gradient, float(np.mean(penalties)) if penalties else None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sequence", "temperature": 0.7},
        {"reduction": "constant", "constant_tokens": 40},
        {"tis_cap": 1.1},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"kl_coef": 0.1, "kl_estimator": "k2", "tis_cap": 2.0},
        {"kl_coef": 0.1, "reduction": "sequence"},
        {"max_mult_prob_error": 1.28},
        {"max_mult_prob_error": 1.28, "reduction": "sequence"},
        {"off_policy": "mask_old"},
    ],
    ids=str,
)
@pytest.mark.parametrize("micro_batch_tokens", [20, 1000])
def test_loss_and_gradient_equal_a_float64_reference(small_model, tmp_path, settings, micro_batch_tokens):
    config = {
        "model_path": str(small_model),
        "run_dir": str(tmp_path),
        "threads": 1,
        "clip_low": LOW,
        "clip_high": HIGH,
    }
    learner = Trainer(config | {"micro_batch_tokens": micro_batch_tokens} | settings, source=MemoryRows([]))
    rows = rows_of(learner.model, settings.get("temperature", 1.0))
    start = copy.deepcopy(learner.model)
    # Away from the reference model, or there would be no penalty to differentiate.
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel()).reshape(parameter.shape).float()))
    ballot = cast_votes(
        rows, version=1, advantage=learner.config.advantage, off_policy=learner.config.off_policy, max_lag=0
    )
    expected_loss, expected, penalty = reference(learner.model, start, rows, ballot.advantages, settings)
    _, passed = learner.backward(rows, ballot)
    got = torch.cat([weight.grad.flatten() for weight in learner.model.parameters()]).double()
    assert passed["loss"] == pytest.approx(expected_loss, rel=2e-5, abs=2e-6)
    assert (got - expected).norm() < 2e-5 * expected.norm()
    assert passed["kl_penalty"] == (penalty if penalty is None else pytest.approx(penalty, rel=2e-5, abs=2e-6))
    if "max_mult_prob_error" in settings:
        left = ballot.left_out.count("mult_prob_error")
        assert 0 < left < 7, "the limit must take some rows and leave some"


def test_a_row_longer_than_the_bound_runs_alone_with_the_same_gradient_and_less_memory(small_model, tmp_path):
    model = LlamaForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, 200)))
    mask = torch.ones_like(ids, dtype=torch.bool)
    results = []
    for recompute in (False, True):
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        model.zero_grad()
        runs = []
        handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), recomputed_layers(model, recompute):
            values = token_logprobs(model, ids, mask)
        saved = sum(kept)
        values.sum().backward()
        handle.remove()
        results.append((values.detach(), [p.grad.clone() for p in model.parameters()], saved, len(runs)))
    (plain, plain_grads, plain_saved, once), (again, again_grads, again_saved, twice) = results
    assert torch.equal(plain, again) and (once, twice) == (1, 2)
    for one, two in zip(plain_grads, again_grads, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    assert again_saved < plain_saved / 2
    assert not any(module.training for module in model.modules())


def test_long_rows_do_not_share_a_micro_batch_and_padding_is_recorded(small_model, tmp_path):
    config = {"model_path": str(small_model), "run_dir": str(tmp_path), "threads": 1, "micro_batch_tokens": 20}
    learner = Trainer(config, source=MemoryRows([]))
    metrics, part = learner.step_on(1, rows_of(learner.model))
    lengths = [int(np.flatnonzero(mask)[-1]) + 1 for mask in part["loss_mask"] if np.any(mask)]
    assert metrics["longest_micro_batch"] == max(lengths) > 20
    assert metrics["padding_tokens"] == 0 and metrics["micro_batches"] == len(lengths)
    assert learner.step_on(2, rows_of(learner.model))[0]["padding_rate"] == 0.0
