"""Agreement: whether trainer and sampler talk about the same tokens and the same distribution.

Their log-probs of one token differ by rounding and by the weights being newer. Three mistakes leave a shape of their
own in the two arrays, and each has a detector here that gives a verdict with its evidence:

    shift_by_one        one array is moved by a position: every ratio would be about the wrong token
    temperature         the sampler divided its logits by T and the trainer did not, or the other way round
    truncated_support   the sampler renormalised over a part of the vocabulary (top-p, top-k, min-p), the trainer not

In: one (T,) array a row of trainer log-probs, sampler log-probs, mask. Invariant: a verdict needs `MIN_TOKENS` tokens
and more than number formats explain; noise, a constant and newer weights give none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.errors import TrainerError

MIN_TOKENS = 32
"""Fewer tokens than this prove nothing."""
MIN_DELTA = 0.05
"""Mean |delta| in nat below which nothing is suspected: a bfloat16 engine against a float32 trainer shows 0.03."""

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """What one detector says: its name, whether it found its mistake, a sentence, and the numbers behind it."""

    name: str
    found: bool
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


def examine(trainer: Arrays, sampler: Arrays, masks: Arrays) -> list[Verdict]:
    """The verdicts of all detectors on one step's rows; values in nat."""
    return [detector(trainer, sampler, masks) for detector in (shift_by_one, temperature, truncated_support)]


def shift_by_one(trainer: Arrays, sampler: Arrays, masks: Arrays) -> Verdict:
    """Found where moving one array by a position makes them agree beyond doubt (see `logprob_shift`).

    Evidence: `aligned`, `trainer_late`, `trainer_early`: mean |delta| as they stand, and with the trainer's value for
    token t taken from t + 1 and from t - 1; `shift` is +1, -1 or 0.
    """
    shift = logprob_shift(trainer, sampler, masks)
    places = {"aligned": 0, "trainer_late": 1, "trainer_early": -1}
    means = {name: _mean_abs(trainer, sampler, masks, by) for name, by in places.items()}
    where = {1: "late: its value for token t stands at t + 1", -1: "early: its value for token t stands at t - 1"}
    sentence = f"trainer log-probs are one position {where[shift]}" if shift else "positions agree"
    evidence = {name: value for name, value in means.items() if value is not None}
    return Verdict("shift_by_one", bool(shift), sentence, evidence | {"shift": float(shift)})


def temperature(trainer: Arrays, sampler: Arrays, masks: Arrays) -> Verdict:
    """Found where the difference follows from how likely a token is, for some tokens up and for others down.

    Dividing logits by T < 1 makes likely tokens likelier and unlikely ones unlikelier (T > 1: the other way round), so
    that trainer - sampler falls (rises) with the log-prob itself. Evidence: `correlation` of the difference with the
    mean of both log-probs, `slope` (spread of the sampler's / of the trainer's), `mean_abs` of the difference,
    `upward`, the part of its size that is trainer above sampler.
    """
    ours_K, theirs_K = _sampled(trainer, sampler, masks)
    delta_K, middle_K = ours_K - theirs_K, (ours_K + theirs_K) / 2
    if delta_K.size < MIN_TOKENS or min(delta_K.std(), middle_K.std(), ours_K.std()) < 1e-9:
        return Verdict("temperature", False, "too few tokens, or all alike", {"tokens": float(delta_K.size)})
    # Not against either array alone: its own noise is in the difference too, and would correlate with it.
    correlation = float(np.corrcoef(middle_K, delta_K)[0, 1])
    mean_abs, upward = float(np.abs(delta_K).mean()), _upward(delta_K)
    beyond_chance = abs(correlation) > max(0.35, 4 / np.sqrt(delta_K.size))
    found = mean_abs > MIN_DELTA and beyond_chance and 0.05 < upward < 0.95
    sentence = (
        f"the sampler is {'sharper' if correlation < 0 else 'flatter'} than the trainer (correlation "
        f"{correlation:+.2f}): one of them scaled its logits, the other not"
        if found
        else "both scale their logits alike"
    )
    slope = float(theirs_K.std() / ours_K.std())
    evidence = {"correlation": correlation, "slope": slope, "mean_abs": mean_abs, "upward": upward}
    return Verdict("temperature", found, sentence, evidence)


def truncated_support(trainer: Arrays, sampler: Arrays, masks: Arrays) -> Verdict:
    """Found where tokens are less likely to the trainer than to the sampler, and hardly any is likelier.

    Renormalising over the kept tokens adds -log(kept mass) to each of them and takes from none. Evidence: `upward` (as
    for `temperature`), `share_below`, the tokens less likely to the trainer by more than 0.01 nat, `mean` difference.
    """
    ours_K, theirs_K = _sampled(trainer, sampler, masks)
    delta_K = ours_K - theirs_K
    if delta_K.size < MIN_TOKENS:
        return Verdict("truncated_support", False, "too few tokens", {"tokens": float(delta_K.size)})
    upward, below, mean = _upward(delta_K), float((delta_K < -0.01).mean()), float(delta_K.mean())
    found = upward < 0.1 and below > 0.5 and mean < -MIN_DELTA / 2
    sentence = (
        f"{below:.0%} of the tokens are less likely to the trainer, by {-mean:.2f} nat on average, and hardly any is "
        f"likelier: the sampler left out a part of the vocabulary"
        if found
        else "both speak of the whole vocabulary"
    )
    return Verdict("truncated_support", found, sentence, {"upward": upward, "share_below": below, "mean": mean})


def _upward(delta_K: np.ndarray) -> float:
    """Part of the total |difference| in which the trainer is above the sampler, 0 to 1; 0.5 for no difference."""
    total = float(np.abs(delta_K).sum())
    return float(delta_K[delta_K > 0].sum()) / total if total > 0 else 0.5


def row_errors(trainer: Arrays, sampler: Arrays, masks: Arrays) -> np.ndarray:
    """(N,) float64: mean exp(|trainer - sampler log-prob|) over each row's masked-in tokens; 1 without any."""
    errors = [
        np.exp(np.abs(ours[mask].astype(np.float64) - theirs[mask])).mean() if mask.any() else 1.0
        for ours, theirs, mask in zip(trainer, sampler, masks, strict=True)
    ]
    return np.array(errors, dtype=np.float64)


def logprob_shift(trainer: Arrays, sampler: Arrays, masks: Arrays) -> int:
    """0 when aligned; +1 when the trainer's value for token t stands at t + 1, -1 when it stands at t - 1.

    Each argument holds one (T,) array a row. A shift is only reported where it is beyond doubt: unshifted the mean
    difference is above 0.25 nat, shifted it is less than a quarter of that.
    """
    aligned = _mean_abs(trainer, sampler, masks, 0)
    if aligned is None or aligned < 0.25:
        return 0
    for shift in (1, -1):
        shifted = _mean_abs(trainer, sampler, masks, shift)
        if shifted is not None and shifted < aligned / 4:
            return shift
    return 0


def check_alignment(step: int, trainer: Arrays, sampler: Arrays, masks: Arrays) -> None:
    """Raise TrainerError when the log-probs are shifted by one position."""
    shift = logprob_shift(trainer, sampler, masks)
    if shift:
        raise TrainerError(
            f"Step {step}: trainer log-probs are shifted by one position against the sampler's (the trainer's value "
            f"for token t matches the sampler's for t {'-' if shift > 0 else '+'} 1). Nothing was trained; "
            f"look at LogprobDelta in the run's notebook."
        )


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
