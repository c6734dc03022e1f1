"""Sampling: the recipe's settings, with which every call of a campaign is sampled, captured or not."""

from __future__ import annotations

from typing import Any

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
