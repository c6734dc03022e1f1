"""Sampling: the recipe's settings, with which every call of a campaign is sampled, captured or not."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class SamplingPins(BaseModel):
    """The recipe's sampling settings. Captured calls are sampled with these, whatever the request says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps all tokens."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound of a call's generation, in tokens; None leaves it to the request."""
    seed: int | None = None
    """None: calls share the engine's generator, so a sample depends on what else runs. A number: each call has a seed
    of its own, made of it (see `seed_of`)."""

    def seed_of(self, rollout_id: str, prompt_token_ids: Any) -> int | None:
        """The seed of a call, 63 bits: of this seed, the rollout's place (group, index, attempt; not the run) and the
        prompt. The same request sent again in a rollout samples the same; None without a seed."""
        if self.seed is None:
            return None
        place = ".".join(rollout_id.rsplit(".", 3)[1:])
        digest = hashlib.sha256(f"{self.seed}/{place}/".encode())
        digest.update(np.asarray(prompt_token_ids, dtype=">u8").tobytes())
        return int.from_bytes(digest.digest()[:8], "big") >> 1

    def pinned(self) -> dict[str, Any]:
        """What a captured call is sampled with. Penalties and bias would change the distribution: neutral."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "logit_bias": None,
            "bad_words": None,
            "allowed_token_ids": None,
        }
