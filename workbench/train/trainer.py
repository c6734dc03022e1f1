"""Trainer: one batch of verified rows becomes one optimiser step and, published, new weights.

    rows (partition train) -> votes -> micro-batches -> clipped loss -> AdamW -> train/step-<n>.parquet -> clear

Weights, gradients and optimiser state are float32; with `dtype: bfloat16` the passes run on a copy (precision).
With router replay the rows' experts are forced upon the model in both passes (replay).
Invariants: a step trains exactly the rows asked for; rows are cleared only after the step's Parquet part is on disk;
a batch of placeholders changes no weight. With one seed and thread count two runs are bit-identical; a mixture of
experts needs one thread for that, because several add up its gradients in any order.
With a KL penalty a second, frozen copy of the starting model is held: its parameters in `dtype` (SmolLM2-135M: 0.54 GB
in float32, 0.27 in bfloat16), and one more forward pass without activations.
Not here: which rows (buffer), who votes (votes), what is recorded (record), loading weights into the engine
(serving/weights), the schedule (campaign/controller).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed.tensor import DTensor

from workbench.errors import TrainerError
from workbench.models import resolve
from workbench.runs.writer import write_part
from workbench.train import checkpoint
from workbench.train.agreement import check_alignment, row_errors
from workbench.train.batch import (
    MicroBatch,
    Scores,
    check_head,
    micro_batches,
    padding_metrics,
    recomputed_layers,
    score,
    token_logprobs,
)
from workbench.train.loss import grpo_loss
from workbench.train.precision import refresh, split
from workbench.train.publish import names_in_file, publish
from workbench.train.record import replay_metrics, step_metrics, train_part
from workbench.train.replay import RouterReplay
from workbench.train.restore import check_same_weights, newest_checkpoint, stored_step
from workbench.train.route_rows import check_coverage, fetch_routes
from workbench.train.rows import RowSource, TrainPartition, TrainRow, match_rows
from workbench.train.settings import DTYPES, TrainerConfig
from workbench.train.votes import DISAGREES, Ballot, cast_votes

_LOG = logging.getLogger(__name__)


class Trainer:
    """Holds the weights and the optimiser. Every method blocks; use one thread."""

    def __init__(self, config: dict[str, Any], source: RowSource | None = None) -> None:
        """`config`: the fields of `TrainerConfig`. `source`: where rows are fetched; None: the running data plane."""
        from transformers import AutoModelForCausalLM

        self.config = TrainerConfig.of(config)
        self.device = torch.device("cuda" if self.config.device == "gpu" else "cpu")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise TrainerError(
                f"The trainer is to run on a GPU and torch {torch.__version__} sees none. Next: workbench doctor, "
                "or set ray.device=cpu."
            )
        torch.set_num_threads(self.config.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(self.config.seed)
        self.run_dir = Path(self.config.run_dir)
        self.model_path = resolve(self.config.model_path)
        self.source: RowSource = source or self._partition()
        self.model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        check_head(self.model)
        # No dropout: the ratio must be about the distribution that was sampled from.
        self.model.eval()
        # Before the weights are split up: its check needs whole ones. The reference below keeps its own routers.
        self._replay = RouterReplay(self.model) if self.config.router_replay != "none" else None
        self._reference = None
        if self.config.kl_coef:
            self._reference = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=DTYPES[self.config.dtype])
            self._reference.eval().requires_grad_(False).to(self.device)
        self._loss_scale = 1.0
        self._weights: Sequence[torch.Tensor] = self._hold()
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )

    def _partition(self) -> TrainPartition:
        return TrainPartition(routes=self.config.router_replay == "direct")

    def _hold(self) -> list[torch.Tensor]:
        """The float32 weights that are updated, in the order of the model's parameters."""
        torch.nn.Module.to(self.model, self.device)
        return split(self.model) if self.config.dtype == "bfloat16" else list(self.model.parameters())

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
        if self._keeps_records():
            write_part(self.run_dir / "train" / f"step-{step}.parquet", "train", part)
        stored = time.monotonic()
        if self._keeps_records():
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

        Metrics: those of `record.step_metrics`, and loss, kl_penalty, grad_norm, micro_batches, padding_tokens,
        padding_rate, longest_micro_batch (tokens), optimizer_stepped (0 for a batch without a vote), seconds. None:
        there was nothing to measure.
        """
        config, began = self.config, time.monotonic()
        self._check_ids(rows)
        rows = self._with_routes(rows)
        # Step n is computed with the weights of version n - 1.
        ballot = cast_votes(
            rows, version=step - 1, advantage=config.advantage, off_policy=config.off_policy, max_lag=config.max_lag,
            shuffle_seed=config.seed,
        )  # fmt: skip
        if self._replay is not None:
            check_coverage(step, rows, ballot.masks, self._replay.layers)
        scores, passed = self.backward(rows, ballot)
        check_alignment(step, scores.logprobs, [row.logprobs for row in rows], [row.loss_mask for row in rows])
        voted = any(mask.any() for mask in ballot.masks)
        grad_norm = self._apply(step) if voted else 0.0
        metrics = (
            step_metrics(config, rows, ballot, scores.logprobs)
            | passed
            | (
                replay_metrics(rows, ballot.masks, scores.agreement, sorted(self._replay.layers))
                if self._replay is not None
                else {}
            )
            | {"grad_norm": grad_norm, "optimizer_stepped": int(voted), "seconds": time.monotonic() - began}
        )
        return metrics, train_part(step, rows, ballot, scores.logprobs, scores.agreement if self._replay else None)

    def _with_routes(self, rows: Sequence[TrainRow]) -> Sequence[TrainRow]:
        """The rows with their routes, of the model's own shape; as they are without router replay."""
        if self._replay is None:
            return rows
        if self.config.router_replay == "deferred":
            rows = fetch_routes(self.run_dir, rows)
        for row in rows:
            if row.routes is not None:
                self._replay.check(row.rollout_id, row.routes)
        return rows

    def backward(self, rows: Sequence[TrainRow], ballot: Ballot) -> tuple[Scores, dict[str, Any]]:
        """Leave the loss's gradient in the weights; no weight changes. Returns the rows' scores and the pass's metrics.

        Rows that disagree by more than `max_mult_prob_error` leave the loss here, and the ballot says so.
        """
        config = self.config
        batches = micro_batches(rows, config.micro_batch_tokens, ballot.masks, config.temperature, self.device)
        planned = self._count(ballot)
        scores = Scores.nothing_of(rows)
        self._zero_grad()
        loss_sum = kl_sum = 0.0
        for batch in self._mine(batches):
            loss, kl = self._backward_one(batch, ballot, max(planned, 1), scores)
            loss_sum += loss
            kl_sum += kl * int(batch.loss_mask.sum())
        loss_sum, kl_sum = self._pool(batches, scores, ballot, (loss_sum, kl_sum))
        # Known only now: what is averaged over. Sums were divided by what was planned.
        kept = self._count(ballot)
        if 0 < kept < planned:
            loss_sum *= planned / kept
            for weight in self._weights:
                if weight.grad is not None:
                    weight.grad.mul_(planned / kept)
        loss_tokens = sum(int(mask.sum()) for mask in ballot.masks)
        return scores, {
            "loss": loss_sum,
            "kl_penalty": kl_sum / loss_tokens if config.kl_coef and loss_tokens else None,
        } | padding_metrics(rows, config.micro_batch_tokens)

    def _count(self, ballot: Ballot) -> int:
        """What the loss is averaged over: tokens, or rows with a token in the loss."""
        if self.config.reduction == "token":
            return sum(int(mask.sum()) for mask in ballot.masks)
        return sum(bool(mask.any()) for mask in ballot.masks)

    def _backward_one(self, batch: MicroBatch, ballot: Ballot, normalizer: int, scores: Scores) -> tuple[float, float]:
        """Forward and backward pass of one micro-batch, laid into `scores`: its share of the loss, and the mean KL of
        its loss tokens."""
        # Layers that are recomputed in the backward pass choose their experts again.
        with self._replay.forced(batch.routes) if self._replay is not None else contextlib.nullcontext():
            return self._passes(batch, ballot, normalizer, scores)

    def _passes(self, batch: MicroBatch, ballot: Ballot, normalizer: int, scores: Scores) -> tuple[float, float]:
        config = self.config
        # One row alone that is longer than the bound: without its layers' activations it does not exhaust memory.
        with recomputed_layers(self.model, batch.ids.numel() > config.micro_batch_tokens):
            logprobs = self._token_logprobs(batch.ids, batch.scored, batch.temperatures)
        own = logprobs.detach().cpu().numpy()
        scores.lay_in(batch, own, self._agreement(batch))
        self._leave_out_disagreeing(batch, ballot, own)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(self._reference, batch.ids, batch.scored, batch.temperatures)
        advantages_B = torch.from_numpy(ballot.advantages[batch.positions]).to(self.device)
        loss, metrics = grpo_loss(
            logprobs, batch.old_logprobs, advantages_B, batch.loss_mask,
            config.clip_low, config.clip_high, tis_cap=config.tis_cap, ref_logprobs=reference, kl_coef=config.kl_coef,
            reduction=config.reduction, kl_estimator=config.kl_estimator, constant_tokens=config.constant_tokens,
            normalizer=float(normalizer),
        )  # fmt: skip
        (loss * self._loss_scale).backward()
        return float(loss.detach()), metrics.get("kl_penalty") or 0.0

    def _agreement(self, batch: MicroBatch) -> np.ndarray | None:
        """(B, T, layers with experts) of the pass over `batch` that was just made; None: nothing was forced in it."""
        agreement = self._replay.agreement() if self._replay is not None else None
        return None if agreement is None else agreement.reshape(*batch.ids.shape, -1).cpu().numpy()

    def _leave_out_disagreeing(self, batch: MicroBatch, ballot: Ballot, own: np.ndarray) -> None:
        limit = self.config.max_mult_prob_error
        if limit is None:
            return
        errors_B = row_errors(list(own), list(batch.old_logprobs.cpu().numpy()), list(batch.scored.cpu().numpy()))
        for b, place in enumerate(batch.positions):
            if errors_B[b] > limit and ballot.masks[place].any():
                batch.loss_mask[b] = False
                ballot.masks[place] = np.zeros_like(ballot.masks[place])
                ballot.left_out[place] = DISAGREES

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
        total = torch.nn.utils.clip_grad_norm_(self._weights, self.config.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            raise TrainerError(
                f"Step {step}: the gradient norm is {norm}; no weight was changed. Look at the largest |delta| of the "
                f"step's rows, or lower train.learning_rate."
            )
        self._optimizer.step()
        self._zero_grad()
        self._refresh()
        return norm

    def _refresh(self) -> None:
        if self.config.dtype == "bfloat16":
            refresh(self.model, self._weights)

    def publish(self, version: int) -> str:
        """Write `weights/v<version>` below the run directory for the engine; the last two stay. Returns the folder."""
        weights, directory = self.float32_weights(), self.run_dir / "weights"
        if self._keeps_records():
            named = names_in_file(self.model, weights)
            publish(named, self.model_path, directory, version, DTYPES[self.config.publish_dtype])
        return str(directory / f"v{version}")

    def save_checkpoint(self, step: int, keep: int) -> dict[str, Any]:
        """Write `checkpoints/step-<step>`; the last `keep` stay. Returns its `path` and the `seconds` it took."""
        began = time.monotonic()
        weights, directory = self.float32_weights(), self.run_dir / "checkpoints"
        state = checkpoint.optimizer_state(self._optimizer, list(weights))
        state = {name: {key: self._whole(value) for key, value in held.items()} for name, held in state.items()}
        if self._keeps_records():
            generators = checkpoint.generator_states()
            checkpoint.save(directory, step, weights, state, generators, source=self.model_path, keep=keep)
        return {"path": str(directory / f"step-{step}"), "seconds": time.monotonic() - began}

    def restore(self, upto: int) -> dict[str, Any]:
        """Load the newest whole checkpoint of a step ≤ `upto`.

        Returns its `step` (0: there is none, the weights are the model's) and in `unusable` what is wrong with newer
        ones. Raises TrainerError when it is of another model.
        """
        directory = self.run_dir / "checkpoints"
        held, unusable = newest_checkpoint(directory, upto)
        if held is not None:
            own = self._named_weights()
            shares = {name: self._share(value, own.get(name)) for name, value in held.weights.items()}
            checkpoint.load_weights(own, shares, directory / f"step-{held.step}")
            state = {
                name: {key: self._share(value, own.get(name)) for key, value in values.items()}
                for name, values in held.optimizer.items()
            }
            checkpoint.load_optimizer(self._optimizer, list(own), state)
            checkpoint.load_generators(held.generators)
            self._refresh()
        return {"step": held.step if held is not None else 0, "unusable": unusable}

    def retake(self, step: int) -> dict[str, Any]:
        """Take `step` again as its part in `train/` records it; returns its metrics and `retaken_mean_abs_delta`.

        Raises RunStoreError when a part is missing or damaged, TrainerError when the log-probs are not those recorded.
        """
        stored = stored_step(self.run_dir, step)
        metrics, part = self.step_on(step, stored.rows)
        return metrics | {"retaken_mean_abs_delta": check_same_weights(stored, part["trainer_logprobs"])}

    def float32_weights(self) -> dict[str, torch.Tensor]:
        """The weights being trained by their names in a Hugging Face file, a tied one once; whole, not copies."""
        return {name: self._whole(weight) for name, weight in self._named_weights().items()}

    def _named_weights(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: weight.detach() for name, weight in zip(names, self._weights, strict=True)}

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token after the first at temperature 1, one list a row; what the engine must agree with."""
        return score(self._token_logprobs, token_ids, self.device)

    # What a rank of several does otherwise (ranks).

    def _token_logprobs(self, ids: torch.Tensor, mask: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
        return token_logprobs(self.model, ids, mask, temperature)

    def _mine(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches that are run here."""
        return batches

    def _pool(
        self, batches: Sequence[MicroBatch], scores: Scores, ballot: Ballot, sums: tuple[float, float]
    ) -> tuple[float, float]:
        """Put together what was computed elsewhere: scores and ballot in place, sums of loss and KL returned."""
        return sums

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is held here of `tensor`, put together with what others hold."""
        return tensor

    def _share(self, whole: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        """What is to be held here of `whole`, which belongs to the weight `held` (None: to none that is known)."""
        return whole

    def _keeps_records(self) -> bool:
        return True


TrainerActor = ray.remote(Trainer)
"""The same as a Ray actor: `TrainerActor.options(num_cpus=1).remote(config)`; one call at a time."""
