"""Splice over random conversations and templates of seven families: nothing sampled changes, nothing rendered is lost.

The model of each conversation writes what it likes (text, thinking, tool calls in its own spelling), in canonical ids
or in odd ones, and ends its turn or is cut. What the template renders after a turn is taken from a twin conversation in
which that turn says something plain.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from capture.splicing import Chat, parsed
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from workbench.wire import Cause

KINDS = ("chatml", "llama3", "qwen", "mistral", "headings", "deepseek", "glm")
WITH_TOOLS = {"qwen", "mistral", "deepseek", "glm", "llama3"}
WITH_PARTS = {"mistral", "headings", "deepseek", "glm"}
CLOSING = {"headings": "", "glm": "", "mistral": "</s>", "deepseek": "<|end|>", "llama3": "<|eot_id|>"}
"""What a template writes at the end of a turn, as far as its last control token; the others: ChatML's."""
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]

Turn = dict[str, Any]

# Control tokens of every family, halves of them, thinking, emoji, line breaks, what looks like a sentinel.
odd = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "<|eot_id|>", "<|user|>", "<|end|>", "[INST]", "<|", "|>", "### "]
    + [
        "<think>",
        "</think>",
        "</tool_call>",
        "WBTEXT0",
        "\n",
        "\n\n",
        " ",
        "\t",
        "\U0001f30d",
        "\u00e9",
        "\u6771",
        '"}',
        "hello",
    ]
)
words = st.lists(
    odd | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6), max_size=5
)
texts = words.map("".join)
arguments = st.dictionaries(st.sampled_from(["query", "n", "value"]), texts | st.integers(0, 9) | st.none(), max_size=2)


@st.composite
def model_turns(draw: st.DrawFn) -> Turn:
    """How the model's turn goes: `calls` (one or several at once), its text, whether its ids are canonical, `ended`."""
    return {
        "text": draw(st.just("") | texts | st.tuples(texts, texts).map("<think>{0[0]}</think>{0[1]}".format)),
        "calls": draw(st.just([]) | st.lists(arguments, min_size=1, max_size=3)),
        "canonical": draw(st.booleans()),
        "ended": draw(st.booleans()),
        "cut": draw(st.integers(0, 3)),
        "parts": draw(st.booleans()),
        "next": draw(texts),
        "results": draw(st.lists(texts, min_size=3, max_size=3)),
    }


class Conversation:
    """One rollout of a template: the messages as a client sends them, and the ids that the engine ran so far."""

    def __init__(self, kind: str, system: str | None, question: str) -> None:
        self.kind = kind
        self.chat = Chat(kind)
        self.kwargs: dict[str, Any] = {"tools": TOOLS} if kind in WITH_TOOLS else {}
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if system is not None:
            self.messages.insert(0, {"role": "system", "content": system})
        self.ids: list[int] = self.chat.encode(self.chat.text(parsed(self.messages), **self.kwargs))

    def speak(self, turn: Turn) -> bool:
        """Sample one turn onto the ids and append it and what follows to the messages. Whether the model ended it."""
        calls = turn["calls"][: 1 if self.kind == "llama3" else 3] if self.kind in WITH_TOOLS else []
        if turn["canonical"]:
            # The ids of an end of turn end the turn, and no server hands them on as text.
            turn = {**turn, "text": _without(turn["text"], [self.chat.decode([stop]) for stop in self.chat.stops])}
        said = turn["text"] + "".join(f'<tool_call>{{"name":"search","arguments":{call}}}' for call in calls)
        sampled = self.chat.encode(said)
        if not turn["canonical"]:
            sampled = [token for character in said for token in self.chat.encode(character)]
        # A model that samples the end of a turn has ended it; it says nothing after that.
        sampled = [token for token in sampled if token not in self.chat.stops]
        ended = turn["ended"]
        if not ended and not calls:
            # Cut by length, perhaps in the middle of a character.
            sampled = sampled[: len(sampled) - turn["cut"]] if turn["cut"] else sampled
            turn = {**turn, "text": self.chat.tokenizer.decode(sampled, skip_special_tokens=True)}
        if ended:
            by_next = self.kind == "glm" and calls
            sampled = [
                *sampled,
                self.chat.stops[2] if by_next else self.chat.stops[1] if self.kind == "glm" else self.chat.end,
            ]
        self.ids = [*self.ids, *sampled]
        content: Any = turn["text"]
        if turn["parts"] and self.kind in WITH_PARTS:
            content = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": f"c{n}", "type": "function", "function": {"name": "search", "arguments": dumps(call)}}
                for n, call in enumerate(calls)
            ]
        self.messages = [*self.messages, message]
        if calls:
            results = turn["results"][: len(calls)]
            self.messages += [{"role": "tool", "tool_call_id": f"c{n}", "content": r} for n, r in enumerate(results)]
        else:
            self.messages.append({"role": "user", "content": turn["next"]})
        return ended

    def rendered_after_the_turn(self, ended: bool) -> str:
        """What the template writes after the model's last turn, the end of that turn left out where it was sampled."""
        twin = parsed(copy.deepcopy(self.messages))
        at = max(i for i, message in enumerate(twin) if message["role"] == "assistant")
        calls = twin[at].get("tool_calls")
        twin[at] = {"role": "assistant", "content": "x" if not calls or twin[at]["content"] else None}
        if calls:
            twin[at]["tool_calls"] = calls
        whole = self.chat.text(twin, **self.kwargs)
        alone = self.chat.text(twin[: at + 1], **{**self.kwargs, "add_generation_prompt": False})
        end = CLOSING.get(self.kind, "<|im_end|>")
        if self.kind == "mistral":
            # The instructions move on to the newest question, so the head of the two differs.
            if _holds([*twin[:1], *twin[at + 1 :]], end):
                return ""
            after = whole[whole.rindex(end) + len(end) :]
        else:
            assert whole.startswith(alone)
            after = alone[alone.rindex(end) + len(end) if end else len(alone) :] + whole[len(alone) :]
        if self.kind == "glm" and ended:
            return after[len("<|observation|>" if calls else "<|user|>") :]
        return after if ended else end + after


def dumps(value: Any) -> str:
    import orjson

    return orjson.dumps(value).decode()


def _without(text: str, ends: list[str]) -> str:
    while any(end in text for end in ends):
        for end in ends:
            text = text.replace(end, "")
    return text


def _holds(messages: list[dict[str, Any]], text: str) -> bool:
    return any(text in str(message["content"]) for message in messages)


TURN: Turn = {
    "text": "Paris", "calls": [], "canonical": True, "ended": False, "cut": 0, "parts": False, "next": "and?",
    "results": ["rain", "sun", "wind"],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@example(system=None, question="where?", turns=[TURN])  # a tail that begins with plain text, cut by length
@example(system=None, question="where?", turns=[{**TURN, "calls": [{"query": "Rome"}], "ended": True}])
@example(system="s", question="\U0001f30d?", turns=[{**TURN, "text": "\U0001f30d", "canonical": False, "cut": 2}, TURN])
@example(system=None, question="", turns=[{**TURN, "text": "<|im_end|>", "ended": True}])  # it ends, and says nothing
@settings(max_examples=20, deadline=None)
@given(
    system=st.none() | texts,
    question=texts,
    turns=st.lists(model_turns(), min_size=1, max_size=3),
)
async def test_child_prompt_begins_with_parents_cumulative_ids(
    kind: str, system: str | None, question: str, turns: list[Turn]
) -> None:
    """Odd ids (tinker-cookbook #938), characters cut in two (Megatron-LM #4126, dynamo #8630), stop tokens that begin
    the next message (miles #784): sampled ids stay, and the tail is what the template renders.
    """
    held = Conversation(kind, system, question)
    for turn in turns:
        ended = held.speak(turn)
        parent = held.ids
        prompt = await held.chat.child(parent, copy.deepcopy(held.messages), **held.kwargs)
        assert isinstance(prompt, list), prompt
        assert prompt[: len(parent)] == parent
        expected = held.rendered_after_the_turn(ended)
        tail = prompt[len(parent) :]
        if expected:
            assert held.chat.decode(tail) == expected
            assert tail == held.chat.encode_after_token(expected)
        plain = held.chat.encode(held.chat.text(parsed(held.messages), **held.kwargs))
        stable = ended and plain[: len(parent)] == parent
        event(f"{kind}: prefix-stable" if stable else f"{kind}: not prefix-stable")
        if stable:
            assert prompt == plain
        held.ids = prompt


@pytest.mark.parametrize("kind", ["twice", "forgets", "signed"])
@settings(max_examples=20, deadline=None)
@given(question=texts, said=texts, follow=texts)
async def test_no_unique_boundary_is_a_typed_failure_and_never_a_guess(
    kind: str, question: str, said: str, follow: str
) -> None:
    chat = Chat(kind)
    user = {"role": "user", "content": question}
    parent = [*chat.after_turn([user], chat.encode(said)), chat.end]
    messages = [user, {"role": "assistant", "content": said}, {"role": "user", "content": follow}]
    failure = await chat.child(parent, messages)
    assert isinstance(failure, tuple) and failure[0] is Cause.SPLICE_BOUNDARY
