"""Trainer: one batch of verified rows becomes one optimiser step and, published, new weights.

    rows (partition train) -> advantages -> micro-batches -> clipped loss -> AdamW -> train/step-<n>.parquet -> clear

Weights, gradients and optimiser state are float32. With `dtype: bfloat16` the forward and backward pass runs on a
bfloat16 copy (on a CPU with AVX-512 BF16 about twice as fast), gradients are summed and applied in float32, so that
updates smaller than a bfloat16 step are not lost.
Invariants: a step trains exactly the rows asked for; rows are cleared only after the step's Parquet part is on disk;
a batch of placeholders changes no weight. With one seed and thread count two runs are bit-identical.
Not here: which rows (buffer), loading weights into the engine (capture/weights), the schedule (campaign/controller).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from workbench.errors import TrainerError
from workbench.models import resolve
from workbench.runs.writer import write_part
from workbench.train.agreement import check_alignment
from workbench.train.batch import check_head, micro_batches, score, token_logprobs
from workbench.train.estimators import advantages, estimator
from workbench.train.loss import grpo_loss, loss_metrics
from workbench.train.publish import publish
from workbench.train.rows import RowSource, TrainPartition, TrainRow, match_rows

_LOG = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    model_path: str
    """Folder or name of the model to start from (`workbench.models`)."""
    run_dir: str
    """Run directory: `train/` and `weights/` go below it."""
    learning_rate: float = 1e-5
    """AdamW's, constant."""
    weight_decay: float = 0.0
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 1024
    """Padded tokens in one forward pass; bounds memory."""
    threads: int = 0
    """Torch threads; 0 means all processors this process may use. Ray would otherwise leave one."""
    dtype: str = "float32"
    """Of the forward and backward pass: float32 or bfloat16. The weights that are updated are float32 either way."""
    publish_dtype: str = "bfloat16"
    """Of the published weights: the engine's."""
    temperature: float = 1.0
    """What the sampler divided its logits by; the trainer's are divided by the same."""
    advantage: dict[str, Any] = field(default_factory=lambda: {"name": "grpo", "options": {}})
    """Estimator: `name` and `options`."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - this."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + this."""
    tis_cap: float | None = None
    """Cap of the truncated importance-sampling correction; None measures the ratio against the sampler instead."""
    seed: int = 0
    """Of torch's generator."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> TrainerConfig:
        """From a dict; TrainerError names unknown keys, missing ones and values outside their range."""
        known = {item.name for item in fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted({"model_path", "run_dir"} - set(values))
        if unknown or missing:
            raise TrainerError(f"Trainer settings: unknown {unknown}, missing {missing}; known are {sorted(known)}.")
        config = cls(**values)
        for name in ("dtype", "publish_dtype"):
            if getattr(config, name) not in DTYPES:
                raise TrainerError(
                    f"Trainer setting {name} is one of {', '.join(DTYPES)}, got {getattr(config, name)!r}."
                )
        if not (config.temperature > 0 and config.micro_batch_tokens > 0):
            raise TrainerError("Trainer settings temperature and micro_batch_tokens must be above 0.")
        estimator(config.advantage["name"], **config.advantage.get("options", {}))
        return config


class Trainer:
    """Holds the weights and the optimiser. Every method blocks; use one thread."""

    def __init__(self, config: dict[str, Any], source: RowSource | None = None) -> None:
        """`config`: the fields of `TrainerConfig`. `source`: where rows are fetched; None: the running data plane."""
        from transformers import AutoModelForCausalLM

        self.config = TrainerConfig.of(config)
        torch.set_num_threads(self.config.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(self.config.seed)
        self.run_dir = Path(self.config.run_dir)
        self.model_path = resolve(self.config.model_path)
        self.source: RowSource = source or TrainPartition()
        self.model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        check_head(self.model)
        # No dropout: the ratio must be about the distribution that was sampled from.
        self.model.eval()
        self._weights: Sequence[torch.Tensor] = (
            self._split_precision() if self.config.dtype == "bfloat16" else list(self.model.parameters())
        )
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )

    def _split_precision(self) -> list[torch.Tensor]:
        """Make the model a bfloat16 copy of the float32 weights returned; its gradients move to them as they appear."""
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        torch.nn.Module.to(self.model, torch.bfloat16)
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):

            def move(parameter: torch.Tensor, weight: torch.Tensor = weight) -> None:
                gradient = parameter.grad
                if gradient is not None:
                    weight.grad = gradient.float() if weight.grad is None else weight.grad.add_(gradient)
                    parameter.grad = None

            parameter.register_post_accumulate_grad_hook(move)
        return weights

    def ready(self) -> dict[str, Any]:
        """What was loaded; returns once the model is in memory."""
        return {
            "model_path": str(self.model_path),
            "parameters": sum(weight.numel() for weight in self._weights),
            "threads": torch.get_num_threads(),
        }

    def train_step(self, step: int, train_keys: Sequence[str]) -> dict[str, Any]:
        """Fetch the rows of `train_keys`, take one step, write `train/step-<step>.parquet`, clear the keys.

        Returns the step's metrics (see `step_on`) with `fetch_s`, `store_s` and `clear_s`. Raises TrainerError, before
        anything is changed, when a row is missing or unusable; the keys are then still there.
        """
        clock = time.monotonic()
        rows = match_rows(train_keys, self.source.fetch(train_keys))
        fetched = time.monotonic()
        metrics, part = self.step_on(step, rows)
        trained = time.monotonic()
        write_part(self.run_dir / "train" / f"step-{step}.parquet", "train", part)
        stored = time.monotonic()
        self._clear(train_keys)
        return metrics | {
            "fetch_s": fetched - clock,
            "store_s": stored - trained,
            "clear_s": time.monotonic() - stored,
        }

    def _clear(self, train_keys: Sequence[str]) -> None:
        # The step is taken and stored: rows that stay behind are the sweeper's, not a reason to end the campaign.
        try:
            self.source.clear(train_keys)
        except Exception as error:
            _LOG.warning("%d trained rows are not cleared, left to the sweeper: %s", len(train_keys), error)

    def step_on(self, step: int, rows: Sequence[TrainRow]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """One step on `rows`: metrics, and the columns of the run store's table `train`.

        Metrics: those of `loss_metrics`, and loss, reward_mean, valid_row_rate, grad_norm, rows, tokens, micro_batches,
        padding_rate, optimizer_stepped (0 for a batch without a vote), seconds. None: there was nothing to measure.
        """
        config, began = self.config, time.monotonic()
        valid_N = np.array([row.sample_mask for row in rows])
        rewards_N = np.array([row.reward for row in rows])
        chosen = config.advantage
        advantage_N = advantages(
            chosen["name"], rewards_N, [row.group_id for row in rows], valid_N, **chosen.get("options", {})
        )
        self._check_ids(rows)
        batches = micro_batches(rows, config.micro_batch_tokens)
        total = sum(int(batch.loss_mask.sum()) for batch in batches)
        trainer_NT = [np.zeros(len(row.token_ids), dtype=np.float32) for row in rows]
        self._zero_grad()
        loss_sum = 0.0
        for batch in batches:
            advantage_B = torch.from_numpy(advantage_N[batch.positions])
            logprobs = token_logprobs(self.model, batch.ids, batch.loss_mask, config.temperature)
            loss, _ = grpo_loss(
                logprobs, batch.old_logprobs, advantage_B, batch.loss_mask, config.clip_low, config.clip_high,
                tis_cap=config.tis_cap, normalizer=float(total),
            )  # fmt: skip
            loss.backward()
            loss_sum += float(loss.detach())
            for place, length, values_T in zip(batch.positions, batch.lengths, logprobs.detach().numpy(), strict=True):
                trainer_NT[place][:length] = values_T[:length]
        masks_NT, sampler_NT = [row.loss_mask for row in rows], [row.logprobs for row in rows]
        check_alignment(step, trainer_NT, sampler_NT, masks_NT)
        grad_norm = self._apply(step) if total else 0.0

        delta_NT = [
            np.where(mask, ours - theirs, np.float32(0.0)).astype(np.float32)
            for ours, theirs, mask in zip(trainer_NT, sampler_NT, masks_NT, strict=True)
        ]
        padded = sum(batch.ids.numel() for batch in batches)
        metrics = self._metrics(trainer_NT, sampler_NT, masks_NT, advantage_N) | {
            "loss": loss_sum,
            "reward_mean": float(rewards_N[valid_N].mean()) if valid_N.any() else None,
            "valid_row_rate": float(valid_N.mean()),
            "grad_norm": grad_norm,
            "rows": len(rows),
            "tokens": sum(len(row.token_ids) for row in rows),
            "micro_batches": len(batches),
            "padding_rate": sum(batch.padding for batch in batches) / padded if padded else 0.0,
            "optimizer_stepped": int(total > 0),
            "seconds": time.monotonic() - began,
        }
        part = {
            "step": [step] * len(rows),
            "group_id": [row.group_id for row in rows],
            "rollout_id": [row.rollout_id for row in rows],
            "index": [row.index for row in rows],
            "advantage": advantage_N.tolist(),
            "sample_mask": [int(row.sample_mask) for row in rows],
            "trainer_logprobs": trainer_NT,
            "delta": delta_NT,
        }
        return metrics, part

    def _metrics(
        self, trainer: list[np.ndarray], sampler: list[np.ndarray], masks: list[np.ndarray], advantage_N: np.ndarray
    ) -> dict[str, Any]:
        """`loss_metrics` over the whole batch at once, rows laid end to end; how it was split must not show."""
        ours, theirs, mask = (torch.from_numpy(np.concatenate(arrays)) for arrays in (trainer, sampler, masks))
        advantage = torch.from_numpy(np.repeat(advantage_N, [len(row) for row in masks]))
        # Under TIS the ratio is against this very pass, so it is 1 throughout and says nothing; the delta still does.
        base = ours if self.config.tis_cap is not None else None
        return loss_metrics(ours, theirs, advantage, mask, self.config.clip_low, self.config.clip_high, base=base)

    def _check_ids(self, rows: Sequence[TrainRow]) -> None:
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        for row in rows:
            if not 0 <= (largest := int(row.token_ids.max())) < vocabulary or row.token_ids.min() < 0:
                raise TrainerError(
                    f"Training row {row.rollout_id} has token id {largest}, the model knows {vocabulary}: it was "
                    f"sampled from another model than {self.model_path}."
                )

    def _zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None
        self.model.zero_grad(set_to_none=True)

    def _apply(self, step: int) -> float:
        """Clip, AdamW step, refresh the bfloat16 copy. Returns the gradient norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights, self.config.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainerError(
                f"Step {step}: the gradient norm is {norm}; no weight was changed. Look at the largest |delta| of the "
                f"step's rows, or lower train.learning_rate."
            )
        self._optimizer.step()
        self._zero_grad()
        if self.config.dtype == "bfloat16":
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](self.model.parameters()), list(self._weights))
        return norm

    def publish(self, version: int) -> str:
        """Write `weights/v<version>` below the run directory for the engine; the last two stay. Returns the folder."""
        dtype = DTYPES[self.config.publish_dtype]
        return str(publish(self.float32_weights(), self.model_path, self.run_dir / "weights", version, dtype))

    def float32_weights(self) -> dict[str, torch.Tensor]:
        """The weights being trained by their names in a Hugging Face file, a tied one once; not copies."""
        names = [name for name, _ in self.model.named_parameters()]
        return {name: weight.detach() for name, weight in zip(names, self._weights, strict=True)}

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token after the first at temperature 1, one list a row; what the engine must agree with."""
        return score(self.model, token_ids)


TrainerActor = ray.remote(Trainer)
"""The same as a Ray actor: `TrainerActor.options(num_cpus=1).remote(config)`; one call at a time."""
