"""Detectors: each fault is made on purpose from one distribution, and only its own detector finds it."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from workbench.inspect import LogprobDelta
from workbench.runs.agreement import MIN_TOKENS

TOKENS, CANDIDATES = 1_500, 200


def frame(*, temperature: float = 1.0, top_p: float = 1.0, noise: float = 0.03, tokens: int = TOKENS) -> pl.DataFrame:
    """Tokens sampled with those settings, the sampler's log-probs of them, and a trainer at temperature 1, top-p 1."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 4.0, (tokens, CANDIDATES))
    trainer, sampler = _log_softmax(logits), _log_softmax(logits / temperature)
    order = np.argsort(-sampler, axis=-1)
    mass = np.cumsum(np.take_along_axis(np.exp(sampler), order, -1), -1)
    cut = np.zeros_like(sampler, dtype=bool)
    np.put_along_axis(cut, order[:, 1:], mass[:, :-1] >= top_p, -1)
    sampler = _log_softmax(np.where(cut, -np.inf, sampler))
    chosen = np.array([rng.choice(CANDIDATES, p=np.exp(row)) for row in sampler])
    at = np.arange(tokens)
    s = sampler[at, chosen]
    t = np.minimum(0.0, trainer[at, chosen] + rng.normal(0, noise, tokens))
    return pl.DataFrame(
        {
            "step": 1,
            "rollout_id": "r",
            "position": at,
            "sampled_position": at,
            "token_id": pl.Series(chosen, dtype=pl.UInt64),
            "logprob": s.astype(np.float32),
            "trainer_logprob": t.astype(np.float32),
            "delta": (t - s).astype(np.float32),
            "weight_version": 0,
        }
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"noise": 0.15}, []),
        ({"temperature": 0.6}, ["temperature"]),
        ({"temperature": 1.4}, ["temperature"]),
        ({"top_p": 0.9}, ["truncated_support"]),
    ],
)
def test_a_fault_is_found_by_its_own_detector(settings, expected):
    said = LogprobDelta(frame(**settings)).verdicts
    assert [verdict.name for verdict in said if verdict.found] == expected
    assert all(verdict.words for verdict in said)


def test_few_tokens_are_not_judged():
    assert {verdict.state for verdict in LogprobDelta(frame(tokens=MIN_TOKENS // 2)).verdicts} == {"unknown"}


def test_what_is_found_stands_in_every_form_of_the_view():
    view = LogprobDelta(frame(temperature=0.6))
    assert "the sampler is sharper than the trainer" in view.html()
    found = [finding for finding in view.live.delta.findings if finding["state"] == "found"]
    assert [finding["name"] for finding in found] == ["temperature"]


def test_a_shift_is_found_before_it_is_explained():
    moved = frame().with_columns(pl.col("logprob").shift(1, fill_value=-1.0).alias("trainer_logprob"))
    moved = moved.with_columns((pl.col("trainer_logprob") - pl.col("logprob")).alias("delta"))
    view = LogprobDelta(moved)
    assert view.shift == 1 and view.verdicts[0].found and "shift: the trainer&#x27;s log-probs stand" in view.html()


def test_every_token_stands_in_one_range_of_the_histogram_the_largest_ones_at_its_ends():
    rng = np.random.default_rng(3)
    for _ in range(50):
        view = LogprobDelta(frame(tokens=40).with_columns(delta=pl.Series(rng.normal(0, 3, 40), dtype=pl.Float32)))
        edges, counts = view.histogram(view.delta_T)
        assert counts.sum() == 40
        assert counts[0] >= (view.delta_T < edges[1]).sum() and counts[-1] >= (view.delta_T > edges[-2]).sum()
        assert [sum(part["counts"]) for part in view.live.delta.parts] == [40]
