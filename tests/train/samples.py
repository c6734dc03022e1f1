"""Samples: training rows for tests, made by hand or sampled from a model; and a source that holds them in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from workbench.finalizer.group import Assembly, assemble
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.parts import write_group
from workbench.finalizer.rows import GroupRow
from workbench.train.batch import token_logprobs
from workbench.train.rows import TrainRow
from workbench.wire import Cause


def row(place: int, length: int, *, sampled: slice, reward: float = 0.0, valid: bool = True, size: int = 4) -> TrainRow:
    """Row `place` of a run with groups of `size`: random ids, `sampled` has mask 1 and log-probs of about -11."""
    g = np.random.default_rng(place)
    mask = np.zeros(length, dtype=bool)
    mask[sampled] = True
    logprobs = np.where(mask, -11 + 0.1 * g.standard_normal(length), 0).astype(np.float32)
    rollout_id, group_id = f"run.{place // size}.{place % size}.0", f"run.{place // size}"
    return TrainRow(
        rollout_id, group_id, place % size, reward, valid, g.integers(20, 49000, length), mask & valid, logprobs
    )


class MemoryRows:
    """A row source: `rows` by key; what was cleared is gone."""

    def __init__(self, rows: Sequence[TrainRow]) -> None:
        self.rows = {item.rollout_id: item for item in rows}

    def fetch(self, keys: Sequence[str]) -> list[TrainRow]:
        return [self.rows[key] for key in keys if key in self.rows]

    def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)


def store_group(run_dir: Path, rows: Sequence[TrainRow]) -> None:
    """What a finalizer leaves of the group of these rows: its parts in `run_dir`, without any call."""
    group_id = rows[0].group_id
    outcomes = [
        RolloutOutcome(rollout_id=r.rollout_id, index=r.index, failure=Cause.MISSING_RECEIPT, reward=r.reward)
        for r in rows
    ]
    group_rows = [
        GroupRow(
            rollout_id=r.rollout_id, group_id=group_id, index=r.index, reward=r.reward, reward_components={},
            sample_mask=int(r.sample_mask), prompt_len=1, model_call_ids=[], weight_versions=[],
            weight_version_spans=[], link_spans=[], sampling=[], cause=None, token_ids=r.token_ids.astype(np.uint64),
            token_mask=r.token_mask.astype(np.uint8), logprobs=r.logprobs,
        )
        for r in rows
    ]  # fmt: skip
    request = FinalizationRequest(group_id=group_id, weight_version=0, rollouts=outcomes)
    placeholders = assemble(request, {}, bos_token_id=1)
    summaries = [
        summary.model_copy(update={"sample_mask": row.sample_mask, "reward": row.reward})
        for summary, row in zip(placeholders.summaries, group_rows, strict=True)
    ]
    write_group(run_dir, request, {}, Assembly(group_rows, summaries, placeholders.metrics))


@torch.no_grad()
def sample_rows(
    model: torch.nn.Module, prompt: list[int], count: int, length: int, reward: Callable[[list[int]], float], seed: int
) -> list[TrainRow]:
    """`count` rollouts of one prompt with the model's own log-probs, one group of all of them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.tensor([prompt] * count)
    for _ in range(length):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=g)], dim=1)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, len(prompt) :] = True
    logprobs = token_logprobs(model, ids, mask)
    return [
        TrainRow(
            f"run.{seed}.{b}.0", f"run.{seed}", b, reward(ids[b, len(prompt) :].tolist()), True,
            ids[b].numpy(), mask[b].numpy(), logprobs[b].numpy(),
        )
        for b in range(count)
    ]  # fmt: skip
