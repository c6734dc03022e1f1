"""Proof: after every weight sync, sampler and trainer must give one fixed prompt the same log-probabilities.

Invariant: calls are admitted under a new version only after this has passed. The trap it closes: an engine that loads
new weights but keeps a packed copy of a tied `lm_head` samples from a mixed model without any warning, and then
mean |delta| is several times that of a correct load.
Not here: loading weights (capture.weights), publishing them (train.publish).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.campaign.fleet import within
from workbench.errors import WeightSyncError

# Ids below 256 and well inside every vocabulary that is served here; any fixed ids do, they only have to be the same.
PROOF_IDS: list[list[int]] = [[(37 * i * i + 11 * i + 5) % 4093 + 17 for i in range(48)]]


@dataclass(frozen=True)
class SyncProof:
    version: int
    mean_abs_delta: float
    max_abs_delta: float


def compare(sampler: list[list[float]], trainer: list[list[float]], *, version: int, max_mean_abs_delta: float) -> SyncProof:
    """Compare log-probs (natural log) of the proof prompt, one per token after the first; raises WeightSyncError."""
    ours, theirs = np.concatenate([np.asarray(x) for x in sampler]), np.concatenate([np.asarray(x) for x in trainer])
    if ours.shape != theirs.shape:
        raise WeightSyncError(
            f"weight version {version}: the sampler scored {ours.size} positions of the proof prompt, the trainer "
            f"{theirs.size}; both must score every token after the first."
        )
    delta = np.abs(ours - theirs)
    proof = SyncProof(version, float(delta.mean()), float(delta.max()))
    # `not <=` so that a NaN on either side fails too.
    if not proof.mean_abs_delta <= max_mean_abs_delta:
        raise WeightSyncError(
            f"weight version {version}: sampler and trainer disagree on the proof prompt, mean |delta| "
            f"{proof.mean_abs_delta:.4f} (allowed proof.max_mean_abs_delta={max_mean_abs_delta:g}), max "
            f"{proof.max_abs_delta:.4f}. The engine runs other weights than the trainer: see capture/weights.py on "
            "packed tied embeddings."
        )
    return proof


async def prove_weights(
    worker: Any, trainer: Any, *, version: int, timeout_s: float, max_mean_abs_delta: float
) -> SyncProof:
    """Score the proof prompt on both sides (Ray actor handles) and compare."""
    sampler = await within(worker.score.remote(PROOF_IDS), timeout_s, "the policy worker", f"the proof of version {version}")
    scored = await within(trainer.score.remote(PROOF_IDS), timeout_s, "the trainer", f"the proof of version {version}")
    return compare(sampler, scored, version=version, max_mean_abs_delta=max_mean_abs_delta)
