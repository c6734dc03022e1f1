"""Batch: rows of unequal length become padded micro-batches, and a model's log-probs of exactly the sampled tokens.

    micro_batches(rows, max_tokens) -> MicroBatch(ids (B, T), loss_mask (B, T), ...)
    token_logprobs(model, micro, temperature) -> (B, T) float32, 0 where the mask is 0

Rows are sorted by length so that padding is small, and rows without a sampled token are never run. A micro-batch is
bounded by tokens, not rows; one row that is longer runs alone with `recomputed_layers`, so that it needs the memory of
one layer's activations and not of all. Log-probs belong to
the token they are about: position t is log p(token t | tokens before t), from the hidden state at t - 1; position 0 has
none. Only hidden states that some sampled token needs reach the `lm_head`: logits are (K, V), never (B, T, V).
Padding is on the right, where causal attention cannot see it from any real token; so no attention mask is passed.
Shape legend: B rows, T tokens, K sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from workbench.errors import TrainerError
from workbench.train.rows import TrainRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_CHUNK = 1024
"""Tokens whose logits exist at once: 1024 x 49152 float32 are 200 MB. More are recomputed in the backward pass."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward pass. `positions` (B,): where each stands in the whole batch; `lengths` (B,)."""

    positions: list[int]
    lengths: list[int]
    ids: torch.Tensor  # (B, T) int64, 0 where padded
    scored: torch.Tensor  # (B, T) bool: sampled tokens, whose log-probs are computed
    loss_mask: torch.Tensor  # (B, T) bool: those of them that enter the loss
    old_logprobs: torch.Tensor  # (B, T) float32, the sampler's; 0 where not scored
    temperatures: torch.Tensor  # (B, T) float32, what each token's logits are divided by
    routes: torch.Tensor | None = None  # (B, T, L, K) int32, -1 where unknown or padded; None: no row has any

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        return MicroBatch(**moved)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the passes of a step say of its N rows, each laid in where its row stands in the whole batch."""

    logprobs: list[np.ndarray]
    """N x (T,) float32, the trainer's; 0 where nothing was sampled."""
    agreement: list[np.ndarray | None]
    """N x (T', layers with experts), T' what of a row was run: see `RouterReplay.agreement`. None: nothing forced."""

    @classmethod
    def nothing_of(cls, rows: Sequence[TrainRow]) -> Scores:
        """Those of rows that were not run yet, and of what never is."""
        return cls([np.zeros(len(row.token_ids), dtype=np.float32) for row in rows], [None] * len(rows))

    def lay_in(self, batch: MicroBatch, logprobs_BT: np.ndarray, agreement_BTL: np.ndarray | None) -> None:
        """Take what one micro-batch gave."""
        for b, (place, length) in enumerate(zip(batch.positions, batch.lengths, strict=True)):
            self.logprobs[place][:length] = logprobs_BT[b, :length]
            if agreement_BTL is not None:
                self.agreement[place] = agreement_BTL[b, :length]


def micro_batches(
    rows: Sequence[TrainRow],
    max_tokens: int,
    loss_masks: Sequence[np.ndarray] | None = None,
    temperature: float = 1.0,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Rows that have a sampled token, longest first, in micro-batches of at most `max_tokens` padded tokens.

    A row longer than `max_tokens` gets a micro-batch of its own. What comes after a row's last sampled token is cut.
    `loss_masks`: (T,) a row; None: every sampled token of a row that votes. `temperature`: for rows that do not say.
    `device`: where the tensors are put; None: the CPU.
    """
    masks = [row.loss_mask for row in rows] if loss_masks is None else loss_masks
    batches = (_pad(rows, masks, list(cut), list(cut.values()), temperature) for cut in _cuts(rows, max_tokens))
    return [batch if device is None else batch.to(device) for batch in batches]


def padding_metrics(rows: Sequence[TrainRow], max_tokens: int) -> dict[str, Any]:
    """What `micro_batches` of these makes: how many, the longest of them (padded tokens), and what of it is padding."""
    cuts = _cuts(rows, max_tokens)
    padded = [len(cut) * max(cut.values()) for cut in cuts]
    padding = sum(padded) - sum(sum(cut.values()) for cut in cuts)
    return {
        "micro_batches": len(cuts),
        "padding_tokens": padding,
        "padding_rate": padding / sum(padded) if padded else 0.0,
        "longest_micro_batch": max(padded, default=0),
    }


def _cuts(rows: Sequence[TrainRow], max_tokens: int) -> list[dict[int, int]]:
    """Of each micro-batch the places of its rows in the batch, and how much of them is run."""
    lengths = {place: int(row.loss_mask.nonzero()[0][-1]) + 1 for place, row in enumerate(rows) if row.loss_mask.any()}
    queue = sorted(lengths, key=lambda place: (-lengths[place], place))
    cuts: list[dict[int, int]] = []
    while queue:
        size = max(1, max_tokens // lengths[queue[0]])
        cuts.append({place: lengths[place] for place in queue[:size]})
        queue = queue[size:]
    return cuts


def _pad(
    rows: Sequence[TrainRow], masks: Sequence[np.ndarray], positions: list[int], lengths: list[int], temperature: float
) -> MicroBatch:
    shape = (len(positions), max(lengths))
    ids, old, divisors = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.ones(shape)
    scored, loss = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for b, (place, T) in enumerate(zip(positions, lengths, strict=True)):
        row = rows[place]
        ids[b, :T] = torch.from_numpy(row.token_ids[:T].copy())
        scored[b, :T] = torch.from_numpy(row.loss_mask[:T].copy())
        loss[b, :T] = torch.from_numpy(masks[place][:T].copy())
        old[b, :T] = torch.from_numpy(row.logprobs[:T].copy())
        divisors[b, :T] = torch.from_numpy(row.temperatures(temperature)[:T])
    return MicroBatch(
        positions, lengths, ids, scored, loss & scored, old.masked_fill(~scored, 0.0), divisors,
        _pad_routes([rows[place].routes for place in positions], lengths),
    )  # fmt: skip


def _pad_routes(routes: Sequence[np.ndarray | None], lengths: list[int]) -> torch.Tensor | None:
    shape = next((values.shape[1:] for values in routes if values is not None), None)
    if shape is None:
        return None
    out = torch.full((len(routes), max(lengths), *shape), -1, dtype=torch.int32)
    for b, (values, T) in enumerate(zip(routes, lengths, strict=True)):
        if values is not None:
            out[b, :T] = torch.from_numpy(values[:T].astype(np.int32))
    return out


def token_logprobs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Log-probs (B, T) float32 of the tokens where `mask` (B, T) is true; exactly 0 elsewhere.

    `model` is a causal language model of transformers; `temperature`, a number or (B, T), divides the logits as the
    sampler's did. The head runs in float32 whatever the model's dtype: a bfloat16 logit of 20 is only good to 0.06.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
    needed = mask[:, 1:]  # (B, T-1): the state at t is about token t + 1
    hidden_K, target_K = hidden[:, :-1][needed], ids[:, 1:][needed]  # (K, D), (K,)
    weight = model.get_output_embeddings().weight.float()  # (V, D)

    divisors_K = torch.as_tensor(temperature, dtype=torch.float32, device=ids.device).expand(ids.shape)[:, 1:][
        needed
    ]  # (K,)

    def head(states: torch.Tensor, targets: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
        logits = states.float() @ weight.t() / divisors.unsqueeze(-1)  # (K, V)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    parts = list(zip(*(values.split(HEAD_CHUNK) for values in (hidden_K, target_K, divisors_K)), strict=True))
    if len(parts) > 1 and torch.is_grad_enabled():
        values_K = torch.cat([checkpoint(head, *part, use_reentrant=False) for part in parts])
    else:
        values_K = torch.cat([head(*part) for part in parts]) if parts else hidden_K.new_zeros(0).float()
    out = torch.zeros(mask.shape, device=mask.device)
    return out.masked_scatter(mask & _not_first(mask), values_K)  # row-major on both sides, so in the same order


@contextlib.contextmanager
def recomputed_layers(model: PreTrainedModel, wanted: bool = True) -> Iterator[None]:
    """Inside, the layers keep no activations and compute them again in the backward pass; nothing else changes.

    Layers are transformers' `GradientCheckpointingLayer`s; a model without any runs as it is.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] if wanted else []
    for layer in layers:
        # The layer's own flag only: what is below it stays in evaluation mode, so that no dropout comes on.
        layer.training = layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _recompute  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.training = layer.gradient_checkpointing = False


def _recompute(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def check_head(model: PreTrainedModel) -> None:
    """Raise TrainerError for a model whose logits are more than `lm_head` times the last hidden state."""
    head, config = model.get_output_embeddings(), model.config
    extra = [
        name for name in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(config, name, None)
    ]
    if getattr(head, "bias", None) is not None:
        extra.append("lm_head.bias")
    if extra:
        raise TrainerError(
            f"{type(model).__name__} changes its logits after lm_head ({', '.join(extra)}), which the trainer does not "
            f"do; its log-probs would silently differ from the sampler's."
        )


def _not_first(mask: torch.Tensor) -> torch.Tensor:
    keep = torch.ones_like(mask)
    keep[:, 0] = False
    return keep


@torch.no_grad()
def score(
    logprobs_of: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | None = None,
) -> list[list[float]]:
    """Log-prob of every token after the first, at temperature 1, one list a row. `logprobs_of` is `token_logprobs` of
    a model on `device` (None: the CPU): (ids, mask, temperature) to log-probs."""
    out = []
    for row in token_ids:
        ids = torch.tensor([list(row)], dtype=torch.int64, device=device)
        out.append(logprobs_of(ids, torch.ones_like(ids, dtype=torch.bool), 1.0)[0, 1:].tolist())
    return out
