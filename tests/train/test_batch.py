"""Batch: micro-batches lose nothing and stay within bounds, and log-probs are those of a plain forward pass."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.samples import row

from workbench.errors import TrainerError
from workbench.runs.agreement import logprob_shift
from workbench.train import batch as batch_module
from workbench.train.agreement import check_alignment
from workbench.train.batch import check_head, micro_batches, padding_metrics, score, token_logprobs


@pytest.fixture(scope="module")
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@settings(deadline=None)
@given(lengths=st.lists(st.integers(4, 60), min_size=1, max_size=20), max_tokens=st.integers(1, 200), data=st.data())
def test_micro_batches_hold_every_sampled_token_once_within_the_bound(lengths, max_tokens, data):
    rows = [
        row(i, T, sampled=slice(data.draw(st.integers(1, T - 1)), T), valid=data.draw(st.booleans()))
        for i, T in enumerate(lengths)
    ]
    batches = micro_batches(rows, max_tokens)
    places = [place for micro in batches for place in micro.positions]
    assert sorted(places) == [i for i, item in enumerate(rows) if item.sample_mask]
    padded = [micro.ids.numel() for micro in batches]
    metrics = padding_metrics(rows, max_tokens)
    assert (metrics["micro_batches"], metrics["longest_micro_batch"]) == (len(batches), max(padded, default=0))
    assert metrics["padding_tokens"] == sum(padded) - sum(sum(micro.lengths) for micro in batches)
    for micro in batches:
        assert micro.ids.numel() <= max_tokens or len(micro.positions) == 1
        assert micro.ids.shape[1] == max(micro.lengths)
        for b, place in enumerate(micro.positions):
            T, item = micro.lengths[b], rows[place]
            np.testing.assert_array_equal(micro.ids[b, :T].numpy(), item.token_ids[:T])
            np.testing.assert_array_equal(micro.scored[b].nonzero()[:, 0].numpy(), item.token_mask.nonzero()[0])
            np.testing.assert_array_equal(micro.old_logprobs[b, :T].numpy(), item.logprobs[:T])


def test_what_follows_the_last_sampled_token_is_not_run():
    (micro,) = micro_batches([row(0, 30, sampled=slice(5, 9))], 100)
    assert micro.ids.shape == (1, 9) and micro.lengths == [9]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_plain_forward_pass_whatever_the_padding(model, temperature):
    rows = [row(0, 40, sampled=slice(10, 40)), row(1, 23, sampled=slice(4, 20)), row(2, 9, sampled=slice(1, 9))]
    (micro,) = micro_batches(rows, 1000)
    with torch.no_grad():
        ours = token_logprobs(model, micro.ids, micro.loss_mask, temperature)
        for b, place in enumerate(micro.positions):
            ids = torch.from_numpy(rows[place].token_ids)[None]
            plain = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
            expected = plain.gather(1, ids[0, 1:, None])[:, 0] * torch.from_numpy(rows[place].loss_mask[1:])
            T = micro.lengths[b]
            torch.testing.assert_close(ours[b, 1:T], expected[: T - 1], atol=2e-5, rtol=0)
            assert not ours[b, T:].any() and ours[b, 0] == 0


def test_a_head_in_chunks_gives_the_same_values_and_gradients(model, monkeypatch):
    (micro,) = micro_batches([row(0, 30, sampled=slice(3, 30)), row(1, 20, sampled=slice(3, 20))], 100)
    results = []
    for chunk in (1024, 7):
        monkeypatch.setattr(batch_module, "HEAD_CHUNK", chunk)
        model.zero_grad()
        values = token_logprobs(model, micro.ids, micro.loss_mask)
        values.sum().backward()
        results.append((values.detach(), model.get_input_embeddings().weight.grad.clone()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


def test_score_gives_every_token_after_the_first(model):
    ids = [[5, 6, 7, 8], [9, 10]]
    scored = score(partial(token_logprobs, model), ids)
    assert [len(values) for values in scored] == [3, 1]
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids[0]])).logits[0].log_softmax(-1)
    assert scored[0] == pytest.approx([plain[t, ids[0][t + 1]].item() for t in range(3)], abs=2e-5)


def test_a_head_that_does_more_than_multiply_is_refused(model, monkeypatch):
    check_head(model)
    monkeypatch.setattr(model.config, "final_logit_softcapping", 30.0, raising=False)
    with pytest.raises(TrainerError, match="final_logit_softcapping"):
        check_head(model)
    monkeypatch.undo()
    head = model.get_output_embeddings()
    # Not by setattr: undone, it takes the bias from the module altogether, and the next test's forward pass fails.
    monkeypatch.setitem(head._parameters, "bias", torch.nn.Parameter(torch.zeros(head.out_features)))
    with pytest.raises(TrainerError, match=r"lm_head\.bias"):
        check_head(model)


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_a_shift_by_one_position_is_detected(shift):
    g = np.random.default_rng(1)
    sampler = [-3 * g.random(50).astype(np.float32) for _ in range(3)]
    trainer = [np.roll(values + 0.03 * g.standard_normal(50), shift) for values in sampler]
    masks = [np.arange(50) > 10] * 3
    assert logprob_shift(trainer, sampler, masks) == shift
    if shift:
        with pytest.raises(TrainerError, match="Step 3: trainer log-probs are shifted by one"):
            check_alignment(3, trainer, sampler, masks)


def test_log_probs_that_are_merely_different_are_no_shift():
    g = np.random.default_rng(2)
    noise = [-8 * g.random(200) for _ in range(2)]
    masks = [np.ones(200, dtype=bool)]
    assert logprob_shift(noise[:1], noise[1:], masks) == 0
    one = np.ones(1, dtype=bool)
    assert logprob_shift([np.array([-1.0])], [np.array([-5.0])], [one]) == 0  # one token has no neighbour
    assert logprob_shift([np.full(200, -10.0)], [np.full(200, -11.0)], masks) == 0  # a constant matches any shift
