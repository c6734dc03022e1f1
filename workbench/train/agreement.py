"""Agreement: what the trainer does where its log-probs and the sampler's part.

In: one (T,) array a row of trainer log-probs, sampler log-probs, mask. Out: an error for a shift, which must not be
trained on, and each row's mean error, by which single rows are left out. Not here: how a mistake is recognised, and the
thresholds (workbench.runs.agreement).
"""

from __future__ import annotations

import numpy as np

from workbench.errors import TrainerError
from workbench.runs.agreement import Arrays, logprob_shift


def row_errors(trainer: Arrays, sampler: Arrays, masks: Arrays) -> np.ndarray:
    """(N,) float64: mean exp(|trainer - sampler log-prob|) over each row's masked-in tokens; 1 without any."""
    errors = [
        np.exp(np.abs(ours[mask].astype(np.float64) - theirs[mask])).mean() if mask.any() else 1.0
        for ours, theirs, mask in zip(trainer, sampler, masks, strict=True)
    ]
    return np.array(errors, dtype=np.float64)


def check_alignment(step: int, trainer: Arrays, sampler: Arrays, masks: Arrays) -> None:
    """Raise TrainerError when the log-probs are shifted by one position."""
    shift = logprob_shift(trainer, sampler, masks)
    if shift:
        raise TrainerError(
            f"Step {step}: trainer log-probs are shifted by one position against the sampler's (the trainer's value "
            f"for token t matches the sampler's for t {'-' if shift > 0 else '+'} 1). Nothing was trained; "
            f"look at LogprobDelta in the run's notebook."
        )
