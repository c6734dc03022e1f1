"""Proof: after every weight sync, sampler and trainer must give one fixed prompt the same log-probabilities.

Invariant: calls are admitted under a new version only after this has passed. What it finds: another model, another
tokenizer, another meaning of log-prob or a coarser number type on one side.
What it cannot find: one step's update. At a learning rate of 1e-5 that moves this prompt by 0.0004 nat, a bfloat16
engine's rounding by 0.05; whether an engine took exactly these weights is proved on the weights (serving.weights).
Not here: loading weights (serving.weights), publishing them (train.publish).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.actors import within
from workbench.campaign.handles import TrainerActor
from workbench.campaign.policy import PolicyWorkers
from workbench.errors import WeightSyncError

# Ordinary prose, digits and code: random ids would have log-probs near the floor, where bf16 noise hides a stale layer.
PROOF_TEXT = (
    "A sampler draws each token from the distribution it computes, and a trainer must score that same token with the "
    "same weights. If 17 + 25 = 42 then the check is simple: def agree(a, b): return abs(a - b) < 0.1\n"
    "The capital of France is Paris, and the opposite of cold is hot."
)


def proof_ids(model_path: Path) -> list[list[int]]:
    """The proof prompt as one row of token ids, tokenised by the model's own `tokenizer.json`."""
    from tokenizers import Tokenizer

    return [Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(PROOF_TEXT, add_special_tokens=False).ids]


@dataclass(frozen=True)
class SyncProof:
    version: int
    mean_abs_delta: float
    max_abs_delta: float


def compare(
    sampler: list[list[float]],
    trainer: list[list[float]],
    *,
    version: int,
    max_mean_abs_delta: float,
    who: str = "the policy worker",
) -> SyncProof:
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
            f"weight version {version}: sampler ({who}) and trainer disagree on the proof prompt, mean |delta| "
            f"{proof.mean_abs_delta:.4f} (allowed proof.max_mean_abs_delta={max_mean_abs_delta:g}), max "
            f"{proof.max_abs_delta:.4f}. The engine runs other weights than the trainer: see serving/weights.py on "
            "packed tied embeddings."
        )
    return proof


async def prove_weights(
    policy: PolicyWorkers,
    trainer: TrainerActor,
    ids: list[list[int]],
    *,
    version: int,
    timeout_s: float,
    max_mean_abs_delta: float,
) -> SyncProof:
    """Score the proof prompt on both sides and compare; of several workers each, and the furthest off is returned."""
    samplers = await policy.scores(ids, version, timeout_s)
    scored = await within(trainer.score.remote(ids), timeout_s, "the trainer", f"the proof of version {version}")
    proofs = [
        compare(sampler, scored, version=version, max_mean_abs_delta=max_mean_abs_delta, who=who)
        for who, sampler in zip(policy.names, samplers, strict=True)
    ]
    return max(proofs, key=lambda proof: proof.mean_abs_delta)
