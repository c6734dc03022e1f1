"""KL: three estimates of KL(policy || reference) from the log-prob of one sampled token.

With d = log p_reference - log p_policy of a token that the policy sampled (Schulman 2020,
http://joschu.net/blog/kl-approx.html):

    k1 = -d              unbiased, large variance, may be negative
    k2 = d² / 2          biased, small variance; its gradient is the KL's own, on average
    k3 = exp(d) - 1 - d  unbiased, small variance, never negative

The gradient of k1 is grad log p_policy, which averages to 0 on the policy's own tokens: as a penalty in the loss it
only adds noise, and is there for measuring. Not here: how the reference's log-probs are made (trainer).
"""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KlEstimator = "k3") -> torch.Tensor:
    """The estimate for every token, of the shape of `logprobs`; the gradient flows through `logprobs` only."""
    d = ref_logprobs.detach() - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return d.exp() - 1.0 - d
    raise ValueError(f"the KL estimator is k1, k2 or k3, got {kind!r}")
