"""Moe bench: a mixture of experts that samples with routers a little off, and a trainer with and without its routes.

    rows = sampled_elsewhere(seed=0)      rows with ids, log-probs and routes of the model with perturbed routers
    measure(rows, replay=True)            the first step's metrics, by a trainer that holds the unperturbed model

What an engine in bfloat16 and a trainer in float32 do to each other in a campaign, in seconds and without an engine:
the same token goes to other experts. Nothing is learned here; no weight is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workbench import models
from workbench.train.batch import token_logprobs
from workbench.train.rows import TrainRow
from workbench.train.trainer import Trainer

MODEL = "tiny-moe"
NOISE = 0.02
"""Standard deviation of what is added to the routers' weights, whose own is 0.1."""


def sampled_elsewhere(count: int = 4, prompt: int = 8, length: int = 24, seed: int = 0) -> list[TrainRow]:
    """`count` rollouts of `length` tokens, scored and routed by the model with perturbed routers. The ids are random:
    what a random model would sample is no more telling."""
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(np.random.default_rng(seed).integers(20, 49000, (count, length)))
    sampler: Any = AutoModelForCausalLM.from_pretrained(models.build(MODEL), dtype=torch.float32).eval()
    routers = [module for module in sampler.modules() if type(module).__name__.endswith("Router")]
    generator = torch.Generator().manual_seed(seed)
    chosen: list[torch.Tensor] = []
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt:] = True
    with torch.no_grad():
        for router in routers:
            router.weight.add_(NOISE * torch.randn(router.weight.shape, generator=generator))
            router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        logprobs = token_logprobs(sampler, ids, mask)
    routes = torch.stack(chosen, dim=1).reshape(count, length, len(routers), -1).numpy().astype(np.int8)
    routes[:, -1] = -1  # the last token was never an input
    return [
        TrainRow(
            f"bench.0.{b}.0", "g0", b, float(b % 2), True, ids[b].numpy(), mask[b].numpy(), logprobs[b].numpy(),
            routes=routes[b],
        )
        for b in range(count)
    ]  # fmt: skip


def measure(rows: Sequence[TrainRow], *, replay: bool) -> dict[str, Any]:
    """Metrics of one step on `rows` (see `Trainer.step_on`), with their routes replayed or with the trainer's own."""
    with tempfile.TemporaryDirectory(prefix="workbench-moe-") as folder:
        config = {"model_path": MODEL, "run_dir": folder, "router_replay": "direct" if replay else "none"}
        return Trainer(config).step_on(1, rows)[0]
