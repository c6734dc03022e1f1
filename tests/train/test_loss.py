"""Loss: against a plain float64 loop, at the clip's edges, and on batches without a vote."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.train import grpo_loss
from workbench.train.kl import kl_estimate
from workbench.train.loss import loss_metrics

LOW, HIGH = 0.2, 0.28


def batch(seed: int = 0, rows: int = 5, width: int = 9, spread: float = 0.4):
    """Log-probs (B, T), old (B, T), advantages (B,), mask (B, T): random, the last row a placeholder."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    new = old + spread * torch.randn(rows, width, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=g) > 0.4
    mask[-1] = False
    return new, old, torch.randn(rows, generator=g, dtype=torch.float64), mask


def reference(new, old, advantages, mask, *, cap=None, ref=None, kl=0.0, reduction="token"):
    """Loss and gradient by formula, one token at a time, without autograd."""
    grad = torch.zeros_like(new)
    rows = [b for b in range(len(mask)) if mask[b].any()]
    loss = 0.0
    for b in rows:
        share = mask.sum().item() if reduction == "token" else mask[b].sum().item() * len(rows)
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            delta, A = (new[b, t] - old[b, t]).item(), advantages[b].item()
            ratio, weight = (math.exp(delta), 1.0) if cap is None else (1.0, min(math.exp(delta), cap))
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            loss -= weight * min(ratio * A, clipped * A) / share
            if ratio * A <= clipped * A:  # the unclipped branch is the smaller one: it has the gradient
                grad[b, t] -= weight * ratio * A / share
            if ref is not None:
                d = (ref[b, t] - new[b, t]).item()
                loss += kl * (math.exp(d) - 1 - d) / share
                grad[b, t] += kl * (1 - math.exp(d)) / share
    return loss, grad


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_loss_and_gradient_equal_the_formula(reduction, cap, kl):
    new, old, advantages, mask = batch()
    ref = old - 0.1 if kl else None
    expected_loss, expected_grad = reference(new, old, advantages, mask, cap=cap, ref=ref, kl=kl, reduction=reduction)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        leaf = new.detach().clone().to(dtype).requires_grad_()
        loss, metrics = grpo_loss(
            leaf, old.to(dtype), advantages.to(dtype), mask, LOW, HIGH, cap,
            None if ref is None else ref.to(dtype), kl, reduction,
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(expected_loss, abs=tolerance) == pytest.approx(metrics["loss"])
        torch.testing.assert_close(leaf.grad, expected_grad.to(dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.27, 1.0, True), (1.3, 1.0, False)],
)
def test_the_clip_is_asymmetric_and_bites_only_what_goes_too_far(ratio, advantage, moves):
    leaf = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = grpo_loss(leaf, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), LOW, HIGH)
    loss.backward()
    assert bool(leaf.grad.any()) == moves
    assert metrics["clip_fraction"] == float(not moves)


def test_a_batch_of_placeholders_has_loss_and_gradient_exactly_zero():
    leaf = torch.full((2, 3), float("nan"), requires_grad=True)
    garbage = torch.full((2, 3), float("-inf"))
    for cap, reduction in ((None, "token"), (2.0, "token"), (None, "sequence")):
        leaf.grad = None
        loss, metrics = grpo_loss(
            leaf,
            garbage,
            torch.tensor([math.inf, math.nan]),
            torch.zeros(2, 3),
            LOW,
            HIGH,
            cap,
            garbage,
            0.1,
            reduction,
        )
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(leaf.grad, torch.zeros(2, 3))
        assert metrics["sampled_tokens"] == 0 and metrics["valid_row_rate"] == 0.0
        assert metrics["mean_abs_logprob_delta"] is None and metrics["token_mult_prob_error"] is None
        assert not any(isinstance(value, float) and math.isnan(value) for value in metrics.values())


def test_what_stands_where_the_mask_is_zero_changes_nothing():
    new, old, advantages, mask = batch()
    dirty = [torch.where(mask, values, value) for values, value in ((new, math.nan), (old, -math.inf))]
    results = []
    for logprobs, sampler in ((new, old), dirty):
        leaf = logprobs.clone().requires_grad_()
        loss, metrics = grpo_loss(leaf, sampler, advantages, mask, LOW, HIGH)
        loss.backward()
        results.append((loss.item(), leaf.grad, metrics))
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]
    assert torch.equal(results[0][1], results[1][1])


def test_micro_batches_with_one_normalizer_add_up_to_the_batch():
    new, old, advantages, mask = batch(rows=6)
    whole = new.clone().requires_grad_()
    grpo_loss(whole, old, advantages, mask, LOW, HIGH)[0].backward()
    parts = new.clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        loss, _ = grpo_loss(
            parts[rows], old[rows], advantages[rows], mask[rows], LOW, HIGH, normalizer=float(mask.sum())
        )
        loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_metrics_are_the_formulas_over_masked_in_tokens():
    new, old, advantages, mask = batch()
    _, metrics = grpo_loss(new, old, advantages, mask, LOW, HIGH)
    d = (new - old)[mask]
    expected = {
        "token_mult_prob_error": d.abs().exp().mean(),
        "gen_kl_error": (d.exp() - 1 - d).mean(),
        "policy_kl_error": ((-d).exp() - 1 + d).mean(),
        "mean_abs_logprob_delta": d.abs().mean(),
        "max_abs_logprob_delta": d.abs().max(),
        "probs_ratio": d.exp().mean(),
        "probs_ratio_min": d.exp().min(),
        "probs_ratio_max": d.exp().max(),
        "probs_ratio_p50": d.exp().sort().values[len(d) // 2],
        "approx_entropy": -new[mask].mean(),
        "sampled_tokens": mask.sum(),
        "valid_row_rate": 4 / 5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()})


def test_equal_log_probs_mean_no_error_at_all():
    new, _, advantages, mask = batch()
    metrics = loss_metrics(new, new, advantages, mask, LOW, HIGH)
    assert metrics["token_mult_prob_error"] == metrics["probs_ratio"] == 1.0
    assert metrics["gen_kl_error"] == metrics["mean_abs_logprob_delta"] == metrics["clip_fraction"] == 0.0


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 4\)"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2), torch.ones(2, 3), LOW, HIGH)
    with pytest.raises(ValueError, match="token, sequence or constant"):
        grpo_loss(*[torch.zeros(2, 3)] * 2, torch.zeros(2), torch.ones(2, 3), LOW, HIGH, reduction="mean")


def test_settings_that_name_no_formula_are_refused():
    values = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="reduction constant needs constant_tokens"):
        grpo_loss(values, values, torch.ones(1), torch.ones(1, 3), LOW, HIGH, reduction="constant")
    with pytest.raises(ValueError, match="the KL estimator is k1, k2 or k3, got 'k4'"):
        kl_estimate(values, values, "k4")
