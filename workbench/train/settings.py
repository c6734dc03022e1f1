"""Settings: what a trainer is told, each field with its meaning; the recipe's section `train` fills it.

Invariant: `TrainerConfig.of` refuses what no step could be taken with, in words, before a model is loaded.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from workbench.errors import TrainerError
from workbench.train.estimators import estimator
from workbench.train.kl import KlEstimator
from workbench.train.loss import Reduction
from workbench.train.votes import OffPolicy

RouterReplayMode = Literal["none", "direct", "deferred"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    model_path: str
    """Folder or name of the model to start from (`workbench.models`); also the reference of the KL penalty."""
    run_dir: str
    """Run directory: `train/` and `weights/` go below it."""
    learning_rate: float = 1e-5
    """AdamW's, constant."""
    weight_decay: float = 0.0
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 1024
    """Padded tokens in one forward pass; bounds memory. A longer row runs alone, its layers recomputed in the backward
    pass."""
    device: str = "cpu"
    """What the passes run on: cpu, or gpu, the first one that this process sees."""
    threads: int = 0
    """Torch threads; 0 means all processors this process may use. Ray would otherwise leave one."""
    dtype: str = "float32"
    """Of the forward and backward pass: float32 or bfloat16. The weights that are updated are float32 either way."""
    publish_dtype: str = "bfloat16"
    """Of the published weights: the engine's."""
    temperature: float = 1.0
    """What the sampler divided its logits by, for rows that do not say; the trainer's are divided by the same."""
    advantage: dict[str, Any] = field(default_factory=lambda: {"name": "grpo", "options": {}})
    """Estimator: `name`, `options`, and `shuffle` for a control that cannot learn."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - this."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + this."""
    reduction: Reduction = "token"
    """What the loss is averaged over: see `grpo_loss`."""
    constant_tokens: int | None = None
    """Divisor of every row's sum where the reduction is constant."""
    tis_cap: float | None = None
    """Cap of the truncated importance-sampling correction; None measures the ratio against the sampler instead."""
    max_mult_prob_error: float | None = None
    """Rows whose mean exp(|trainer - sampler log-prob|) is above this leave the loss; None keeps all."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the model the run started from; 0 keeps no copy of it."""
    kl_estimator: KlEstimator = "k3"
    """How the KL of a token is estimated: see `workbench.train.kl`."""
    off_policy: OffPolicy = "allow"
    """What happens to tokens sampled from weights more than `max_lag` versions old: see `workbench.train.votes`."""
    max_lag: int = 0
    """Versions that a token may lag behind the weights being trained before `off_policy` applies."""
    router_replay: RouterReplayMode = "none"
    """Where the routes come from that a mixture of experts replays: none, `direct` (they ride in the rows) or
    `deferred` (they are read from the run store when a row is trained)."""
    seed: int = 0
    """Of torch's generator and of the shuffled control."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> TrainerConfig:
        """From a dict; TrainerError names unknown keys, missing ones and values outside their range."""
        known = {item.name for item in fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted({"model_path", "run_dir"} - set(values))
        if unknown or missing:
            raise TrainerError(f"Trainer settings: unknown {unknown}, missing {missing}; known are {sorted(known)}.")
        config = cls(**values)
        choices = {
            "dtype": tuple(DTYPES),
            "device": ("cpu", "gpu"),
            "publish_dtype": tuple(DTYPES),
            "reduction": typing.get_args(Reduction),
            "kl_estimator": typing.get_args(KlEstimator),
            "off_policy": typing.get_args(OffPolicy),
            "router_replay": typing.get_args(RouterReplayMode),
        }
        for name, allowed in choices.items():
            if getattr(config, name) not in allowed:
                raise TrainerError(
                    f"Trainer setting {name} is one of {', '.join(allowed)}, got {getattr(config, name)!r}."
                )
        if not (config.temperature > 0 and config.micro_batch_tokens > 0):
            raise TrainerError("Trainer settings temperature and micro_batch_tokens must be above 0.")
        if config.reduction == "constant" and not config.constant_tokens:
            raise TrainerError("Trainer setting reduction=constant needs constant_tokens, a divisor above 0.")
        estimator(config.advantage["name"], **config.advantage.get("options", {}))
        return config
