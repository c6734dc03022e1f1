"""Detectors: known ways in which trainer and sampler log-probs part, recognised from the numbers alone.

In: the log-prob frame of a run (logprob = sampler, trainer_logprob, nat). Out: one finding a detector, found or not, or
unknown with the reason. With s, t the two log-probs of a token:
- shift: t moved by whole tokens fits s better than half as far off;
- temperature: a sampler at temperature T has log-probs spread about 1/T times as wide as a trainer at 1 (noise and
  truncation leave the ratio of the standard deviations at 1; what it says of T is damped towards 1);
- truncated support: top-p or top-k renormalises the sampler only, so t ≤ s wherever they differ at all, by no more than
  the log of the mass that was kept.
Not here: deciding whether a difference is too large (the campaign's proof does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

FEWEST = 50
_NOTABLE = 0.02
_SUSPICIOUS = 0.05
"""Mean |difference| in nat below which number formats explain it (bfloat16 against float32: 0.03)."""


@dataclass(frozen=True)
class Finding:
    """What one detector says; `words` is a sentence for people."""

    name: str
    state: Literal["clear", "found", "unknown"]
    words: str


def findings(tokens: pl.DataFrame, shift: int) -> list[Finding]:
    """All findings about a log-prob frame; `shift` is what `shift_of_best_fit` said."""
    s = tokens["logprob"].to_numpy().astype(np.float64)
    t = tokens["trainer_logprob"].to_numpy().astype(np.float64)
    return [_shift(shift, s.size), _temperature(s, t), _truncated(s, t)]


def spread_ratio(s: np.ndarray, t: np.ndarray) -> float | None:
    """Standard deviation of s over that of t, over tokens that were not certain; None where too few can tell."""
    uncertain = s < -1e-3
    if uncertain.sum() < FEWEST or t[uncertain].std() == 0:
        return None
    return float(s[uncertain].std() / t[uncertain].std())


def _shift(shift: int, count: int) -> Finding:
    if count < FEWEST:
        return _too_few("shift", count)
    if shift:
        words = (
            f"the trainer's log-probs fit the sampler's best when moved by {shift:+d} tokens: the loss is about the "
            "wrong tokens"
        )
        return Finding("shift", "found", words)
    return Finding("shift", "clear", "positions are in place")


def _temperature(s: np.ndarray, t: np.ndarray) -> Finding:
    ratio = spread_ratio(s, t)
    if ratio is None:
        return _too_few("temperature", s.size)
    if abs(ratio - 1) > 0.1 and np.abs(t - s).mean() > _SUSPICIOUS:
        words = (
            f"the sampler's log-probs are spread {ratio:.2f} times as wide as the trainer's, as a temperature of "
            f"{1 / ratio:.2f} or further from 1 would do: the trainer has not applied the sampler's temperature"
        )
        return Finding("temperature", "found", words)
    return Finding("temperature", "clear", f"sampler and trainer are at one temperature (spread ratio {ratio:.2f})")


def _truncated(s: np.ndarray, t: np.ndarray) -> Finding:
    if s.size < FEWEST:
        return _too_few("truncated support", s.size)
    delta = t - s
    notable = np.abs(delta) > _NOTABLE
    below = float((delta[notable] < 0).mean()) if notable.any() else 0.0
    ratio = spread_ratio(s, t)
    cut = notable.mean() > 0.05 and below > 0.93 and delta.mean() < -_SUSPICIOUS / 2
    if cut and (ratio is None or abs(ratio - 1) <= 0.1):
        words = (
            f"where they differ the trainer is lower in {below:.0%} of the tokens, by {-delta[notable].mean():.3f} nat "
            "on average: top-p or top-k has cut the sampler's distribution and not the trainer's"
        )
        return Finding("truncated support", "found", words)
    return Finding("truncated support", "clear", f"trainer lower in {below:.0%} of the tokens that differ: no cut seen")


def _too_few(name: str, count: int) -> Finding:
    return Finding(name, "unknown", f"cannot be told from {count:,} tokens (at least {FEWEST} that are not certain)")
