"""Agreement: whether trainer and sampler talk about the same tokens and the same distribution.

Their log-probs of one token differ by rounding and by the weights being newer. Three mistakes leave a shape of their
own in the two arrays, and each has a detector here that gives a verdict with its evidence:

    shift_by_one        one array is moved by a position: every ratio would be about the wrong token
    temperature         the sampler divided its logits by T and the trainer did not, or the other way round
    truncated_support   the sampler renormalised over a part of the vocabulary (top-p, a grammar, …), the trainer not

In: one (T,) array a row of trainer log-probs, sampler log-probs, mask. Invariant: a verdict needs `MIN_TOKENS` tokens
and more than number formats explain; noise, a constant and newer weights give none. The trainer asks at every step, the
inspectors of any stored run: both here, with the same thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

MIN_TOKENS = 32
"""Fewer tokens than this prove nothing."""
MIN_DELTA = 0.05
"""Mean |delta| in nat below which nothing is suspected: a bfloat16 engine against a float32 trainer shows 0.03."""
MIN_SHIFT_DELTA = 0.25
"""Mean |delta| in nat from which a shift is looked for; it must fall to less than a quarter when shifted back."""
MIN_CORRELATION = 0.35
"""Of difference and log-prob, from which a temperature is suspected; more where few tokens make chance ones larger."""

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """What one detector says: its name, whether it found its mistake (or could not tell), a sentence, and the numbers
    behind it."""

    name: str
    state: Literal["clear", "found", "unknown"]
    words: str
    evidence: dict[str, float] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        """Whether the mistake was found."""
        return self.state == "found"


def examine(trainer: Arrays, sampler: Arrays, masks: Arrays, *, reach: int = 1) -> list[Verdict]:
    """The verdicts of all detectors on some rows; values in nat, shifts looked for up to `reach` positions."""
    return [
        shift_by_one(trainer, sampler, masks, reach=reach),
        temperature(trainer, sampler, masks),
        truncated_support(trainer, sampler, masks),
    ]


def shift_by_one(trainer: Arrays, sampler: Arrays, masks: Arrays, *, reach: int = 1) -> Verdict:
    """Found where moving one array makes them agree beyond doubt (see `logprob_shift`).

    Evidence: `aligned`, `trainer_late`, `trainer_early`: mean |delta| as they stand, and with the trainer's value for
    token t taken from t + 1 and from t - 1; `shift` as `logprob_shift` gives it.
    """
    shift = logprob_shift(trainer, sampler, masks, reach=reach)
    places = {"aligned": 0, "trainer_late": 1, "trainer_early": -1}
    means = {name: _mean_abs(trainer, sampler, masks, by) for name, by in places.items()}
    evidence = {name: value for name, value in means.items() if value is not None} | {"shift": float(shift)}
    if means["aligned"] is None:
        return _too_few("shift_by_one", sum(int(mask.sum()) for mask in masks))
    if not shift:
        return Verdict("shift_by_one", "clear", "positions are in place", evidence)
    by, where = abs(shift), "late" if shift > 0 else "early"
    far = "one position" if by == 1 else f"{by} positions"
    place = f"t {'+' if shift > 0 else '-'} {by}"
    words = (
        f"the trainer's log-probs stand {far} {where}: its value for token t is at {place}, so every ratio is about "
        f"the wrong token"
    )
    return Verdict("shift_by_one", "found", words, evidence)


def temperature(trainer: Arrays, sampler: Arrays, masks: Arrays) -> Verdict:
    """Found where the difference follows from how likely a token is, for some tokens up and for others down.

    Dividing logits by T < 1 makes likely tokens likelier and unlikely ones unlikelier (T > 1: the other way round), so
    that trainer - sampler falls (rises) with the log-prob itself. Evidence: `correlation` of the difference with the
    mean of both log-probs, `slope` (spread of the sampler's / of the trainer's), `mean_abs` of the difference,
    `upward`, the part of its size that is trainer above sampler.
    """
    ours_K, theirs_K = _sampled(trainer, sampler, masks)
    delta_K, middle_K = ours_K - theirs_K, (ours_K + theirs_K) / 2
    if delta_K.size < MIN_TOKENS:
        return _too_few("temperature", delta_K.size)
    if min(delta_K.std(), middle_K.std(), ours_K.std()) < 1e-9:
        return Verdict("temperature", "clear", "the log-probs are all alike", {"tokens": float(delta_K.size)})
    # Not against either array alone: its own noise is in the difference too, and would correlate with it.
    correlation = float(np.corrcoef(middle_K, delta_K)[0, 1])
    mean_abs, upward = float(np.abs(delta_K).mean()), _upward(delta_K)
    slope = float(theirs_K.std() / ours_K.std())
    evidence = {"correlation": correlation, "slope": slope, "mean_abs": mean_abs, "upward": upward}
    beyond_chance = abs(correlation) > max(MIN_CORRELATION, 4 / np.sqrt(delta_K.size))
    if not (mean_abs > MIN_DELTA and beyond_chance and 0.05 < upward < 0.95):
        return Verdict("temperature", "clear", "both scale their logits alike", evidence)
    words = (
        f"the sampler is {'sharper' if correlation < 0 else 'flatter'} than the trainer (correlation "
        f"{correlation:+.2f}): one of them has divided its logits by a temperature and the other has not"
    )
    return Verdict("temperature", "found", words, evidence)


def truncated_support(trainer: Arrays, sampler: Arrays, masks: Arrays) -> Verdict:
    """Found where tokens are less likely to the trainer than to the sampler, and hardly any is likelier.

    Renormalising over the kept tokens adds -log(kept mass) to each of them and takes from none. Evidence: `upward` (as
    for `temperature`), `share_below`, the tokens less likely to the trainer by more than 0.01 nat, `mean` difference.
    """
    ours_K, theirs_K = _sampled(trainer, sampler, masks)
    delta_K = ours_K - theirs_K
    if delta_K.size < MIN_TOKENS:
        return _too_few("truncated_support", delta_K.size)
    upward, below, mean = _upward(delta_K), float((delta_K < -0.01).mean()), float(delta_K.mean())
    evidence = {"upward": upward, "share_below": below, "mean": mean}
    if not (upward < 0.1 and below > 0.5 and mean < -MIN_DELTA / 2):
        return Verdict("truncated_support", "clear", "both speak of the whole vocabulary", evidence)
    words = (
        f"{below:.0%} of the tokens are less likely to the trainer, by {-mean:.2f} nat on average, and hardly any is "
        f"likelier: top-p, top-k, min-p or a grammar has cut the sampler's distribution and not the trainer's"
    )
    return Verdict("truncated_support", "found", words, evidence)


def logprob_shift(trainer: Arrays, sampler: Arrays, masks: Arrays, *, reach: int = 1) -> int:
    """0 when aligned; k when the trainer's value for token t stands at t + k, -reach <= k <= reach.

    Each argument holds one (T,) array a row. A shift is only reported where it is beyond doubt: unshifted the mean
    difference is at least `MIN_SHIFT_DELTA`, shifted it is less than a quarter of that.
    """
    aligned = _mean_abs(trainer, sampler, masks, 0)
    if aligned is None or aligned < MIN_SHIFT_DELTA:
        return 0
    means = {by: _mean_abs(trainer, sampler, masks, by) for by in range(-reach, reach + 1) if by}
    known = {by: mean for by, mean in means.items() if mean is not None}
    if not known:
        return 0
    best = min(known, key=lambda by: (known[by], abs(by)))
    return best if known[best] < aligned / 4 else 0


def _too_few(name: str, count: int) -> Verdict:
    words = f"cannot be told from {count:,} tokens; at least {MIN_TOKENS} are needed"
    return Verdict(name, "unknown", words, {"tokens": float(count)})


def _upward(delta_K: np.ndarray) -> float:
    """Part of the total |difference| in which the trainer is above the sampler, 0 to 1; 0.5 for no difference."""
    total = float(np.abs(delta_K).sum())
    return float(delta_K[delta_K > 0].sum()) / total if total > 0 else 0.5


def _sampled(trainer: Arrays, sampler: Arrays, masks: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays' values of the masked-in tokens, rows end to end: 2 x (K,) float64."""
    ours = [values[mask] for values, mask in zip(trainer, masks, strict=True)]
    theirs = [values[mask] for values, mask in zip(sampler, masks, strict=True)]
    empty = [np.zeros(0)]
    return np.concatenate([*ours, *empty]).astype(np.float64), np.concatenate([*theirs, *empty]).astype(np.float64)


def _mean_abs(trainer: Arrays, sampler: Arrays, masks: Arrays, shift: int) -> float | None:
    total, count = 0.0, 0
    for ours, theirs, mask in zip(trainer, sampler, masks, strict=True):
        T = len(mask)
        here, there = slice(max(0, -shift), T - max(0, shift)), slice(max(0, shift), T - max(0, -shift))
        both = mask[here] & mask[there]
        total += float(np.abs(ours[there] - theirs[here])[both].sum())
        count += int(both.sum())
    return total / count if count >= MIN_TOKENS else None
