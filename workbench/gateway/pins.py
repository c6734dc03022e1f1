"""Pins: what a tagged request may say about sampling, and what it may not.

    refused    what cannot be captured exactly (several completions, beams, echo, a continued message), and
               log-probs of the prompt                                                                    → 400
    stripped   what would put token ids or log-probs into the response, or name the engine's request       → counted
    pinned     the distribution: temperature, top_p, top_k, min_p, and no penalty or bias                  → counted
    kept       the rest (stop strings, tools, streaming, a smaller max_tokens, …)

The same fields go by the same names in every dialect that vLLM serves, so one list holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.gateway.refusals import Refused
from workbench.gateway.settings import Sampling

_ONE_COMPLETION = ("n", "best_of")
_REFUSED = {
    "use_beam_search": "beams have no single sampled sequence",
    "echo": "the prompt would come back as if it had been sampled",
    "continue_final_message": "the prompt would end inside a turn that the agent wrote",
    "truncate_prompt_tokens": "the prompt would lose its captured prefix",
    "background": "the response would be fetched past the gateway",
    "conversation": "conversations are not kept here, so what it holds would be unknown to the ledger",
    "prompt": "a stored prompt is unknown to the ledger",
    "previous_input_messages": "a history beside the input is unknown to the ledger",
}
_STRIPPED = (
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "enable_response_messages",
    "request_id",
    "kv_transfer_params",
    "prompt_embeds",
)
# Any of these makes the sampled distribution another one than the trainer computes.
_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
    "bad_words": None,
    "allowed_token_ids": None,
    "logits_processors": None,
    "vllm_xargs": None,
    "thinking_token_budget": None,
    # Not a matter of sampling, but a prompt cut at its front would no longer begin with its parent's tokens.
    "truncation": "disabled",
}
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Pinned:
    """The body to forward, the names of what was changed in it, and what had come as these."""

    body: dict[str, Any]
    stripped: tuple[str, ...]
    overridden: tuple[str, ...]
    came: dict[str, Any]


def pin(body: Mapping[str, Any], sampling: Sampling, max_tokens_field: str = "max_tokens") -> Pinned:
    """Make a tagged request sample what the recipe says. Raises `Refused` (400) for what cannot be captured."""
    for name in _ONE_COMPLETION:
        if body.get(name) not in (None, 1):
            raise _refusal(name, body[name], "a captured call has one completion")
    for name, why in _REFUSED.items():
        if body.get(name):
            raise _refusal(name, body[name], why)
    if body.get("prompt_logprobs") is not None:  # 0 asks for them too
        raise _refusal("prompt_logprobs", body["prompt_logprobs"], "log-probs don't pass the gateway")
    if body.get("add_generation_prompt") is False:
        raise _refusal("add_generation_prompt", False, "the model would continue a turn that the agent wrote")
    pinned = dict(body)
    stripped = [name for name in _STRIPPED if pinned.pop(name, None) not in (None, False)]
    include = pinned.get("include")
    if isinstance(include, list) and any("logprobs" in str(entry) for entry in include):
        pinned["include"] = [entry for entry in include if "logprobs" not in str(entry)]
        stripped.append("include")
    overridden = []
    for name, neutral in _NEUTRAL.items():
        value = pinned.pop(name, None)
        if value not in (None, neutral) and value not in ({}, []):
            overridden.append(name)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value, pinned_to = pinned.get(name), getattr(sampling, name)
        if (
            value is not None
            and value != pinned_to
            and not (name == "top_k" and value in (-1, 0) and pinned_to in (-1, 0))
        ):
            overridden.append(name)
        pinned[name] = pinned_to
    overridden += _cap_max_tokens(pinned, sampling.max_tokens, max_tokens_field)
    return Pinned(pinned, tuple(stripped), tuple(overridden), {n: body.get(n) for n in (*stripped, *overridden)})


def _cap_max_tokens(body: dict[str, Any], ceiling: int | None, field: str) -> list[str]:
    if ceiling is None:
        return []
    over = [name for name in _MAX_TOKENS if isinstance(body.get(name), int) and body[name] > ceiling]
    for name in over:
        body[name] = ceiling
    if not any(body.get(name) is not None for name in _MAX_TOKENS):
        body[field] = ceiling
    return over


def _refusal(name: str, value: Any, why: str) -> Refused:
    return Refused(
        400, f"{name}={value!r} is not possible on a captured route: {why}. Next: leave it out.", "not_capturable", name
    )
