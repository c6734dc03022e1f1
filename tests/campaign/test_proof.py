"""The proof after a weight sync: sampler and trainer score one prompt alike, or the run ends with who was off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.campaign.policy import PolicyWorkers
from workbench.campaign.proof import compare, proof_ids, prove_weights
from workbench.errors import WeightSyncError

SCORES = [[-1.0, -2.0, -3.0]]


class Scorer:
    """An actor whose `score` gives these log-probs, whatever it is asked."""

    def __init__(self, scores: list[list[float]]) -> None:
        self.score = SimpleNamespace(remote=lambda ids: asyncio.sleep(0, scores))


def off_by(delta: float) -> list[list[float]]:
    return [[value + delta for value in row] for row in SCORES]


async def prove(*workers: list[list[float]], trainer: list[list[float]] = SCORES) -> Any:
    policy = PolicyWorkers([Scorer(scores) for scores in workers])
    return await prove_weights(
        policy, Scorer(trainer), [[1, 2, 3, 4]], version=3, timeout_s=5.0, max_mean_abs_delta=0.05
    )


async def test_of_several_workers_the_one_that_is_furthest_off_is_the_proof() -> None:
    proof = await prove(off_by(0.01), off_by(0.03), SCORES)
    assert proof.version == 3
    assert (proof.mean_abs_delta, proof.max_abs_delta) == (pytest.approx(0.03), pytest.approx(0.03))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (off_by(0.5), r"sampler \(policy worker 1\) and trainer disagree on the proof prompt, mean \|delta\| 0\.5000"),
        ([[-1.0, float("nan"), -3.0]], r"mean \|delta\| nan"),
        ([[-1.0, -2.0]], "the sampler scored 2 positions of the proof prompt, the trainer 3"),
    ],
)
async def test_a_worker_with_other_weights_ends_the_run_and_is_named(wrong: list[list[float]], says: str) -> None:
    with pytest.raises(WeightSyncError, match=says):
        await prove(SCORES, wrong)


def test_equal_scores_are_no_difference() -> None:
    proof = compare(SCORES, SCORES, version=0, max_mean_abs_delta=0.0)
    assert (proof.mean_abs_delta, proof.max_abs_delta) == (0.0, 0.0)


def test_the_proof_prompt_is_the_models_own_tokens(tiny_model: Any) -> None:
    (ids,) = proof_ids(tiny_model)
    assert len(ids) > 20 and all(isinstance(token, int) for token in ids)
