"""Precision: passes in bfloat16 over weights that stay in float32.

    float32 weights -> refresh -> bfloat16 copy -> forward, backward -> each gradient, as float32, to its weight

The copy is the model itself: on a CPU with AVX-512 BF16 its passes are about twice as fast. Gradients are summed and
applied in float32, so that updates smaller than a bfloat16 step are not lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def split(model: torch.nn.Module) -> list[torch.Tensor]:
    """Make `model` a bfloat16 copy of the float32 weights returned, which are in the order of its parameters.

    Its gradients move to them as they appear, and are added to what is there.
    """
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        # Not the whole module: its buffers, such as the frequencies of positions, stay in float32 as the engine's.
        parameter.data = parameter.data.to(torch.bfloat16)

        def move(parameter: torch.Tensor, weight: torch.Tensor = weight) -> None:
            gradient = parameter.grad
            if gradient is not None:
                weight.grad = gradient.float() if weight.grad is None else weight.grad.add_(gradient)
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
    return weights


def refresh(model: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """Bring the copy that `split` made of `weights` up to date with them."""
    with torch.no_grad():
        torch._foreach_copy_(list[torch.Tensor](model.parameters()), list(weights))
