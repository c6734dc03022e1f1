"""Splicing: one chat template with a splicer on its renderer, and what an engine would have run for the parent."""

from __future__ import annotations

import copy
import json
from typing import Any

from capture.templates import tokenizer

from workbench.capture.prefix import PrefixStore
from workbench.capture.splice import Splicer
from workbench.capture.transport import TaggedCall, current_call
from workbench.serving.scripted import ChatParams, ScriptedRenderer
from workbench.wire import CaptureAdmission


class Chat:
    """One template: renders, splices, and knows what an engine would have run for the first turn."""

    def __init__(self, kind: str) -> None:
        self.tokenizer = tokenizer(kind)
        self.renderer = ScriptedRenderer(self.tokenizer)
        self.end = self.tokenizer.eos_token_id
        self.stops = [self.end]
        if kind == "glm":  # every delimiter that another speaker's message begins with
            self.stops = self.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def encode_after_token(self, text: str) -> list[int]:
        """Ids of text that stands behind a control token."""
        return self.tokenizer(self.tokenizer.eos_token + text, add_special_tokens=False)["input_ids"][1:]

    def text(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **kwargs})

    def after_turn(self, messages: list[dict[str, Any]], sampled: list[int], **kwargs: Any) -> list[int]:
        """The parent's cumulative ids: the prompt of `messages`, and what was sampled."""
        return self.encode(self.text(messages, **kwargs)) + sampled

    async def child(self, parent: list[int], messages: list[dict[str, Any]], **kwargs: Any) -> list[int] | tuple:
        """Ids of the child's prompt, or the failure."""
        call = TaggedCall(child_of(parent))
        renderer = ScriptedRenderer(self.tokenizer)
        splicer = Splicer(self.tokenizer, self.stops, PrefixStore(None, 1 << 20))
        splicer.install(renderer)
        token = current_call.set(call)
        try:
            _, prompt = await renderer.render_messages_async(messages, ChatParams(kwargs))
        finally:
            current_call.reset(token)
            splicer.close()
        if call.failure is not None:
            assert prompt == {"prompt": self.text(parsed(messages), **kwargs)}, "the agent gets the plain rendering"
            return call.failure
        return prompt["prompt_token_ids"]


def child_of(parent: list[int], rollout_id: str = "r.0.0.0") -> CaptureAdmission:
    """A call that goes on from those ids."""
    return CaptureAdmission(
        rollout_id=rollout_id,
        model_call_id="child",
        parent_call_id="parent",
        prev_len=len(parent),
        mode="token_in",
        required_prefix_token_ids=parent,
        parent_chain_hash="0" * 64,
    )


def parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as renderers hand them to templates: arguments are objects."""
    out = copy.deepcopy(messages)
    for call in (call for message in out for call in message.get("tool_calls") or ()):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return out
