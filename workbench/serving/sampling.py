"""Sampling: the recipe's settings, with which every call of a campaign is sampled, captured or not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from workbench.recipe_schema import Sampling


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

    @classmethod
    def of(cls, sampling: Sampling, seed: int) -> SamplingPins:
        """From a recipe's section `sampling` and its seed."""
        settings = sampling.model_dump(exclude={"seed_each_call"})
        return cls.model_validate(settings | {"seed": seed if sampling.seed_each_call else None})

    def seed_of(self, rollout_id: str, said: bytes) -> int | None:
        """The seed of a call, 63 bits: of this seed, the rollout's place (group, index, attempt; not the run) and what
        was `said` so far. The same request sent again in a rollout samples the same; None without a seed."""
        if self.seed is None:
            return None
        place = ".".join(rollout_id.rsplit(".", 3)[1:])
        digest = hashlib.sha256(f"{self.seed}/{place}/".encode() + said).digest()
        return int.from_bytes(digest[:8], "big") >> 1

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


_SAID = ("messages", "input", "system", "instructions", "tools")


def said_in(request: Mapping[str, Any]) -> bytes:
    """32 bytes that stand for the conversation in a request's body, whatever the dialect: its history and its tools.

    It is text on purpose and not token ids: an arm that renders the same history to other tokens has the same seed.
    """
    said = {name: request[name] for name in _SAID if request.get(name)}
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).digest()
