"""Loss: the clipped policy-gradient loss of GRPO, a token at a time, on the log-probs that were captured.

In: trainer log-probs (B, T) with a graph, the sampler's log-probs (B, T), advantages (B,) or (B, T), mask (B, T).
Out: a scalar and its metrics. ratio = exp(trainer - sampler); loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A),
averaged over the tokens of the whole batch, so that a long answer weighs as much a token as a short one (or as
`reduction` says).
Invariants: what stands where the mask is 0 (NaN included) changes nothing; a batch without a masked-in token has loss
and gradient exactly 0; splitting a batch into micro-batches with one `normalizer` changes nothing but rounding.
Metric names and formulas are NeMo RL's (`ClippedPGLossFn`), so curves of both can be laid over each other.
Not here: log-probs (batch), advantages (estimators), which rows and tokens are masked in (votes).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from workbench.train.kl import KlEstimator, kl_estimate

Reduction = Literal["token", "sequence", "constant"]
AGREEMENT_METRICS = (
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "mean_abs_logprob_delta",
    "max_abs_logprob_delta",
    "approx_entropy",
)
"""What `loss_metrics` says about trainer and sampler; the others are about the ratio and its clip."""
RATIO_QUANTILES = {"p01": 0.01, "p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    tis_cap: float | None = None,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    reduction: Reduction = "token",
    *,
    kl_estimator: KlEstimator = "k3",
    constant_tokens: int | None = None,
    normalizer: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of one (micro-)batch and its metrics.

    logprobs (B, T): log p of each token under the weights being trained. old_logprobs (B, T): the sampler's, captured.
    advantages (B,) or (B, T). mask (B, T): 1 or true on sampled tokens that vote.
    tis_cap: None measures the ratio against the sampler's log-probs. A number measures it against those of this very
        pass, which is right for one step a batch, and multiplies by the sampler correction
        min(exp(trainer - sampler), tis_cap), which carries no gradient.
    ref_logprobs, kl_coef, kl_estimator: adds kl_coef times an estimate of KL(policy || reference), see `kl`.
    reduction: "token" averages over tokens; "sequence" averages over each row's tokens, then over rows; "constant"
        divides each row's sum by `constant_tokens`, the same for all rows, and averages over rows: Dr. GRPO's, under
        which a row's length changes neither its own weight nor that of the others.
    normalizer: what the sum is divided by; None: this batch's tokens (rows, for the other two). A trainer that splits a
        batch passes the whole batch's count.
    Returns (scalar with a graph, metrics as `loss_metrics`). Raises ValueError for shapes that do not match.
    """
    mask = mask.bool()
    if not (logprobs.shape == old_logprobs.shape == mask.shape):
        raise ValueError(
            f"logprobs, old_logprobs and mask must have one shape (B, T), got {tuple(logprobs.shape)}, "
            f"{tuple(old_logprobs.shape)} and {tuple(mask.shape)}"
        )
    advantage = (advantages.unsqueeze(-1) if advantages.dim() < mask.dim() else advantages).to(logprobs.dtype)
    # Chosen before any arithmetic: exp of a placeholder's garbage would otherwise come back as 0 * inf in the gradient.
    current = torch.where(mask, logprobs, 0.0)
    sampler = torch.where(mask, old_logprobs, 0.0).to(current.dtype)
    advantage = torch.where(mask, advantage, 0.0)

    if tis_cap is None:
        base, correction = sampler, None
    else:
        base = current.detach()
        correction = (base - sampler).exp().clamp(max=tis_cap)
    ratio = (current - base).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if correction is not None:
        token_loss = token_loss * correction
    kl = None
    if ref_logprobs is not None and kl_coef != 0.0:
        kl = kl_estimate(current, torch.where(mask, ref_logprobs, 0.0), kl_estimator)
        token_loss = token_loss + kl_coef * kl

    # A masked-out token has current = sampler = advantage = 0, so its loss is 0 and so is its gradient.
    if reduction == "token":
        count, total = float(mask.sum()), token_loss.sum()
    elif reduction in ("sequence", "constant"):
        per_row = mask.sum(-1)
        count = float((per_row > 0).sum())
        if reduction == "constant" and not constant_tokens:
            raise ValueError("reduction constant needs constant_tokens, what every row's sum is divided by")
        divisor = per_row.clamp(min=1) if reduction == "sequence" else float(constant_tokens or 1)
        total = (token_loss.sum(-1) / divisor).sum()
    else:
        raise ValueError(f"reduction is token, sequence or constant, got {reduction!r}")
    loss = total / max(normalizer if normalizer is not None else count, 1.0)

    metrics = loss_metrics(current, sampler, advantage, mask, clip_low, clip_high, base=base)
    metrics["loss"] = float(loss.detach())
    if kl is not None:
        metrics["kl_penalty"] = float(kl.detach()[mask].mean()) if mask.any() else 0.0
    return loss, metrics


@torch.no_grad()
def loss_metrics(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    base: torch.Tensor | None = None,
) -> dict[str, Any]:
    """What trainer and sampler say about the same tokens; every shape as in `grpo_loss`. `base`: the ratio's.

    With d = trainer - sampler over masked-in tokens: token_mult_prob_error = mean exp|d|, gen_kl_error = mean
    (exp(d) - 1 - d), policy_kl_error the same of -d, mean/max_abs_logprob_delta of |d|; probs_ratio* of exp(trainer -
    base); clip_fraction: tokens whose ratio was clipped *and* whose gradient that removed; approx_entropy = -mean of
    the trainer's log-probs. A value is None where there is no token to speak of; counts and rates are then 0.
    """
    mask = mask.bool()
    rows = mask.reshape(mask.shape[0], -1).any(-1) if mask.dim() > 1 else mask
    out: dict[str, Any] = {
        "sampled_tokens": int(mask.sum()),
        "valid_row_rate": float(rows.float().mean()) if rows.numel() else 0.0,
    }
    advantage = advantages.unsqueeze(-1) if advantages.dim() < mask.dim() else advantages
    trainer_K, sampler_K = logprobs.detach()[mask].double(), old_logprobs[mask].double()
    base_K = sampler_K if base is None else base.detach()[mask].double()
    advantage_K = advantage.expand_as(mask)[mask].double()
    delta_K, ratio_K = trainer_K - sampler_K, (trainer_K - base_K).exp()
    # Where the clip bites: pushing up what is already above, or down what is already below.
    clipped_K = ((ratio_K > 1.0 + clip_high) & (advantage_K > 0)) | ((ratio_K < 1.0 - clip_low) & (advantage_K < 0))
    values = {
        "token_mult_prob_error": delta_K.abs().exp(),
        "gen_kl_error": delta_K.exp() - 1.0 - delta_K,
        "policy_kl_error": (-delta_K).exp() - 1.0 + delta_K,
        "mean_abs_logprob_delta": delta_K.abs(),
        "probs_ratio": ratio_K,
        "probs_ratio_clamped": ratio_K.clamp(1.0 - clip_low, 1.0 + clip_high),
        "clip_fraction": clipped_K.double(),
        "approx_entropy": -trainer_K,
    }
    some = delta_K.numel() > 0
    out |= {name: float(value_K.mean()) if some else None for name, value_K in values.items()}
    out["max_abs_logprob_delta"] = float(delta_K.abs().max()) if some else None
    out["probs_ratio_min"] = float(ratio_K.min()) if some else None
    out["probs_ratio_max"] = float(ratio_K.max()) if some else None
    for name, quantile in RATIO_QUANTILES.items():
        out[f"probs_ratio_{name}"] = _quantile(ratio_K, quantile) if some else None
    return out


def _quantile(values_K: torch.Tensor, quantile: float) -> float:
    """Nearest-rank quantile; torch.quantile refuses more than 16 M values."""
    rank = min(values_K.numel() - 1, int(quantile * values_K.numel()))
    return float(values_K.kthvalue(rank + 1).values)
