"""Collect: one call's exact ids and log-probs out of an engine's outputs, streamed as deltas or whole.

In: outputs shaped like vLLM's `RequestOutput` (prompt_token_ids, finished, outputs[0] with token_ids, logprobs,
finish_reason, stop_reason, weight_versions). Out: prompt ids and sampled ids (uint64[T]), log-probs (float64[T], nats)
and the extras.
Invariant: nothing is filled in. What the engine leaves out becomes a named problem; counts and finiteness are checked
by the core.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

import numpy as np

from workbench.wire import Cause
from workbench.wire.encoding import token_array
from workbench.wire.extras import FINISH_REASON, SAMPLING, STOP_REASON, TRUNCATED, WEIGHT_SPANS


class CollectedCall:
    """Accumulates the outputs of one generation with one completion."""

    def __init__(self, params: Any, logprobs_mode: str) -> None:
        self._params = params
        self._logprobs_mode = logprobs_mode
        self._is_delta = getattr(getattr(params, "output_kind", None), "name", "DELTA") == "DELTA"
        self._prompt_token_ids: Any = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._missing: str | None = None
        self.routed_experts: np.ndarray | None = None
        """Of the whole sequence, [tokens, layers, topk], where the engine's last output carries them."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._weight_spans: list[list[int]] = []

    def add(self, output: Any) -> None:
        """Take one output in; cumulative ones replace what came before."""
        if output.prompt_token_ids is not None:
            self._prompt_token_ids = output.prompt_token_ids
        for completion in output.outputs:
            if not self._is_delta:
                self._ids, self._logprobs = [], []
            ids = completion.token_ids
            if ids is None:
                self._missing = "token_ids"
                ids = ()
            self._ids.extend(ids)
            if completion.logprobs is not None:
                self._logprobs.extend(_sampled_logprobs(ids, completion.logprobs))
            elif ids:
                self._missing = "logprobs"
            if getattr(completion, "routed_experts", None) is not None:
                self.routed_experts = completion.routed_experts
            if completion.finish_reason is not None:
                self.finish_reason = str(completion.finish_reason)
                self.stop_reason = completion.stop_reason
                # The engine labels what each of its steps samples; the worker gave it the version as the label.
                spans = getattr(completion, "weight_versions", None) or ()
                self._weight_spans = [[span.start, span.end, int(span.version)] for span in spans]

    def problem(self) -> tuple[Cause, str] | None:
        """What the engine left out, as a cause and a sentence; None when everything is there."""
        if self._prompt_token_ids is None:
            return Cause.INVALID_STAGING_ROW, "The engine returned no prompt_token_ids: the prompt it ran is unknown."
        if self._missing == "token_ids":
            return Cause.INVALID_STAGING_ROW, "The engine returned no token_ids for its completion."
        if self._missing == "logprobs":
            return Cause.LOGPROB_COUNT_MISMATCH, f"The engine returned {len(self._ids)} ids and no logprobs."
        return None

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """uint64[P], read once: a list of 50,000 ids takes longer to read than to hash."""
        return token_array(self._prompt_token_ids, "prompt ids")

    @cached_property
    def sampled_ids(self) -> np.ndarray:
        """uint64[G], read once, so only after the last output."""
        return token_array(self._ids, "sampled ids")

    @property
    def logprobs(self) -> np.ndarray:
        return np.asarray(self._logprobs, dtype=np.float64)

    def extras(self, weight_version: int) -> dict[str, Any]:
        """Facts that ride under the call's digest: how it ended, how it was sampled, and with which weights where that
        was not `weight_version`, the one at its admission, throughout."""
        params = self._params
        spans = [span for span in self._weight_spans if span[1] > span[0]]
        straddled = any(version != weight_version for _, _, version in spans)
        return ({WEIGHT_SPANS: spans} if straddled else {}) | {
            FINISH_REASON: self.finish_reason,
            STOP_REASON: self.stop_reason,
            TRUNCATED: self.finish_reason == "length",
            SAMPLING: {
                "temperature": float(params.temperature),
                "top_p": float(params.top_p),
                "top_k": int(params.top_k),
                "min_p": float(params.min_p),
                "presence_penalty": float(params.presence_penalty),
                "frequency_penalty": float(params.frequency_penalty),
                "repetition_penalty": float(params.repetition_penalty),
                "max_tokens": params.max_tokens,
                "seed": params.seed,
                "structured": getattr(params, "structured_outputs", None) is not None,
                "logprobs_mode": self._logprobs_mode,
            },
        }


def _sampled_logprobs(ids: Any, steps: Any) -> list[float]:
    """One log-prob per step that has its sampled token; a step without it ends the list, so that the counts differ."""
    found: list[float] = []
    for token_id, step in itertools.zip_longest(ids, steps):
        if step is None or token_id not in step:
            break
        found.append(step[token_id].logprob)
    return found
