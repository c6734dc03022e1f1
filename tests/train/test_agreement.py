"""Agreement: each detector finds its own mistake in samples of a known distribution, and nothing in honest ones."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from workbench import demo
from workbench.runs.agreement import examine
from workbench.train.agreement import row_errors

ROWS, TOKENS, VOCABULARY = 6, 50, 400


def sampled(*, temperature=1.0, top_p=1.0, top_k=0, noise=0.0, seed=0):
    """(trainer, sampler): log-probs of tokens sampled from random distributions, sharp and flat ones, truncated and
    scaled as asked; the trainer's are of the plain distribution, off by `noise` nat."""
    g = np.random.default_rng(seed)
    logits = g.standard_normal((ROWS * TOKENS, VOCABULARY)) * g.uniform(0.5, 5, (ROWS * TOKENS, 1))
    plain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(logits / temperature)
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, -1)
    kept = np.cumsum(ranked, -1) - ranked < top_p
    if top_k:
        kept[:, top_k:] = False
    np.put_along_axis(p, order, np.where(kept, ranked, 0.0), -1)
    p /= p.sum(-1, keepdims=True)
    token = np.array([g.choice(VOCABULARY, p=row) for row in p])
    at = np.arange(len(token))
    ours = plain[at, token] + noise * g.standard_normal(len(token))
    return np.split(ours.astype(np.float32), ROWS), np.split(np.log(p[at, token]).astype(np.float32), ROWS)


def found(trainer, sampler):
    masks = [np.ones(len(values), dtype=bool) for values in sampler]
    return {verdict.name for verdict in examine(trainer, sampler, masks) if verdict.found}


@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, set()),
        ({"temperature": 0.6}, {"temperature"}),
        ({"temperature": 0.8}, {"temperature"}),
        ({"temperature": 1.4}, {"temperature"}),
        ({"top_p": 0.9}, {"truncated_support"}),
        ({"top_k": 20}, {"truncated_support"}),
    ],
)
def test_each_mistake_is_found_by_its_own_detector(settings, expected, noise):
    assert found(*sampled(**settings, noise=noise)) == expected


def test_a_shift_is_found_and_no_other_mistake_is_named_for_noise():
    trainer, sampler = sampled(noise=0.04)
    assert "shift_by_one" in found([np.roll(values, 1) for values in trainer], sampler)
    assert found([values - 0.02 for values in trainer], sampler) == set()
    noisy, sampler = sampled(noise=0.3)
    assert found(noisy, sampler) == set()


def test_few_tokens_prove_nothing():
    trainer, sampler = sampled(temperature=0.5)
    assert found([trainer[0][:20]], [sampler[0][:20]]) == set()
    assert found([], []) == set()


def test_nothing_is_found_in_a_recorded_run_with_a_bfloat16_engine():
    train = pl.concat([pl.read_parquet(path) for path in (demo.recorded_run() / "train").glob("*.parquet")])
    trainer = [np.array(values, dtype=np.float32) for values in train["trainer_logprobs"]]
    delta = [np.array(values, dtype=np.float32) for values in train["delta"]]
    masks = [np.array(values, dtype=bool) for values in train["loss_mask"]]
    sampler = [ours - difference for ours, difference in zip(trainer, delta, strict=True)]
    verdicts = examine(trainer, sampler, masks)
    assert not any(verdict.found for verdict in verdicts), verdicts
    assert [set(verdict.evidence) > set() for verdict in verdicts] == [True] * 3


def test_row_errors_are_the_mean_ratio_of_a_rows_own_tokens():
    trainer = [np.array([0.0, -1.0, -2.0]), np.array([-1.0, -1.0])]
    sampler = [np.array([0.0, -1.5, -2.0]), np.array([-3.0, -1.0])]
    masks = [np.array([False, True, True]), np.array([False, False])]
    np.testing.assert_allclose(row_errors(trainer, sampler, masks), [(np.exp(0.5) + 1) / 2, 1.0])
