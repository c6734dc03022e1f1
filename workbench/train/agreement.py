"""Agreement: whether trainer and sampler talk about the same tokens.

Their log-probs of one token differ by rounding and by the weights being newer. If they agree much better after one of
them is moved by a position, the arrays are misaligned, and every ratio of the step would be about the wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.errors import TrainerError

MIN_TOKENS = 32
"""Fewer tokens than this prove nothing."""


def logprob_shift(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> int:
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


def check_alignment(
    step: int, trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> None:
    """Raise TrainerError when the log-probs are shifted by one position."""
    shift = logprob_shift(trainer, sampler, masks)
    if shift:
        raise TrainerError(
            f"Step {step}: trainer log-probs are shifted by one position against the sampler's (the trainer's value "
            f"for token t matches the sampler's for t {'-' if shift > 0 else '+'} 1). Nothing was trained; "
            f"look at LogprobDelta in the run's notebook."
        )


def _mean_abs(
    trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray], masks: Sequence[np.ndarray], shift: int
) -> float | None:
    total, count = 0.0, 0
    for ours, theirs, mask in zip(trainer, sampler, masks, strict=True):
        T = len(mask)
        here, there = slice(max(0, -shift), T - max(0, shift)), slice(max(0, shift), T - max(0, -shift))
        both = mask[here] & mask[there]
        total += float(np.abs(ours[there] - theirs[here])[both].sum())
        count += int(both.sum())
    return total / count if count >= MIN_TOKENS else None
