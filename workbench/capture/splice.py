"""Splice: a child's prompt is its parent's exact ids plus the tail that the chat template renders after that turn.

    messages ─ plain rendering ───────────────────────────────────────────────▶ what an uncaptured call would run
             └ sentinel in the last assistant turn ─ rendering ─ text after it ─ ids of that tail alone
    parent's cumulative ids (prefix) + tail ids ────────────────────────────────▶ what this call runs

Invariant: prompt_ids[:prev_len] equals the parent's cumulative ids; ids are never rebuilt from the text of a sampled
turn. The end of a turn stands once: if the model sampled it, the tail starts after it; if the turn was cut (length,
stop string), the template's own end of turn belongs to the tail. Where the template shows no unique boundary the call
is not captured (`splice_boundary`) and the agent gets the plain rendering: never a guess.
Not here: finding the parent (ledger), its ids (prefix), collecting what was sampled (engine).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import orjson

from workbench.capture.prefix import PrefixStore
from workbench.capture.transport import TaggedCall, current_call
from workbench.errors import SpliceError, StagingError, WorkbenchError
from workbench.wire import Cause

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Any], Awaitable[tuple[Any, dict[str, Any]]]]
LONG_TAIL_CHARS = 8_192
"""Tails longer than this (a big tool result) are tokenised off the event loop."""


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that splicing uses."""

    added_tokens_decoder: dict[int, Any]

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...


@dataclasses.dataclass(frozen=True)
class MarkedTurn:
    """A copy of a conversation whose last assistant turn carries sentinels in place of what it said."""

    messages: Messages
    index: int
    """Position of that turn in `messages`."""
    content_sentinel: str | None
    """Stands for the turn's text; None when it has none."""
    call_sentinel: str | None
    """Stands for the arguments of the turn's last tool call; None when it has none."""


def mark_last_assistant_turn(messages: Messages, *, with_text: bool = False) -> MarkedTurn:
    """Copy `messages` with sentinels in the last assistant turn, `with_text` also in the text of one that has none.

    Raises `SpliceError` when there is no such turn.
    """
    index = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant"), None)
    if index is None:
        raise SpliceError("A child call needs an assistant turn in its messages; none came.")
    marked = list(messages)
    turn = marked[index] = copy.deepcopy(messages[index])
    nonce = secrets.token_hex(8)
    content_sentinel = call_sentinel = None
    calls = turn.get("tool_calls") or []
    if turn.get("content") or not calls or with_text:
        content_sentinel = f"WBTEXT{nonce}"
        as_parts = isinstance(turn.get("content"), list)
        turn["content"] = [{"type": "text", "text": content_sentinel}] if as_parts else content_sentinel
    if calls:
        call_sentinel = f"WBCALL{nonce}"
        # Copied alone: two calls that were one object would still be one after the copy of the turn.
        calls[-1] = copy.deepcopy(calls[-1])
        function = calls[-1].get("function") or calls[-1]
        arguments = {"value": call_sentinel}
        as_text = isinstance(function.get("arguments"), str)
        function["arguments"] = orjson.dumps(arguments).decode() if as_text else arguments
    return MarkedTurn(marked, index, content_sentinel, call_sentinel)


class Tail(NamedTuple):
    """What a prompt goes on with behind the parent's ids: `text` to be tokenised, without the id at its front that the
    model has sampled already (the end of its turn), where it begins with one."""

    text: str
    sampled_id: int | None = None


class TurnBoundary:
    """Cuts a rendering at the end of the last assistant turn, for one tokenizer.

    `stop_token_ids` are the ids that end a turn when the model samples them (its end-of-sequence ids). Below, `after`
    is the rendering behind the sentinel, `closing` the same where nothing follows the turn, and `last_id` the last id
    that the parent call ran: the end of the turn, unless the turn was cut. In ChatML:

        after a text  <|im_end|>⏎<|im_start|>user…   the tail; its first id was sampled, or the turn was cut before
        after a call  "}}⏎</tool_call><|im_end|>⏎…   what stands before <|im_end|> was sampled; the tail begins there
        closing       the same up to the first ⏎ behind <|im_end|>
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._stop_texts = [self._added[i] for i in stop_token_ids if i in self._added]
        self._anchor = next(
            (
                int(i)
                for i, token in tokenizer.added_tokens_decoder.items()
                if not (getattr(token, "rstrip", False) or getattr(token, "single_word", False))
            ),
            None,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands in the middle of a prompt, without the tokenizer's own begin or end tokens.

        Behind a control token, which is cut off again: tokenizers in SentencePiece's manner put a space before text
        that begins a string, and a tail begins none.
        """
        if self._anchor is not None:
            first, *ids = self._tokenizer(self._added[self._anchor] + text, add_special_tokens=False)["input_ids"]
            if first == self._anchor:
                return ids
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def tail_after_text(self, after: str, last_id: int) -> Tail:
        """The tail of a turn that ends in its content."""
        end = self._added.get(last_id)
        rest = after.lstrip()
        return Tail(rest, last_id) if end is not None and rest.startswith(end) else Tail(after)

    def writes_more(self, after: str, last_id: int) -> bool:
        """Whether the model ended the turn by `last_id`, and other text than that or another token comes first."""
        ended = self._added.get(last_id) in self._stop_texts
        return ended and not after.lstrip().startswith(tuple(self._added.values()))

    def check_text_closing(self, closing: str, last_id: int) -> None:
        """Refuse a turn that the model ended where its template writes more before that end.

        Raises `SpliceError`: with the tail after the content the end would stand twice, with the tail after the end the
        template's own words would be missing.
        """
        end = self._added[last_id]
        if end in closing:
            raise SpliceError(
                f"The template writes {closing[: closing.index(end)][:40]!r} between a turn's text and its end."
            )

    def tail_after_call(self, after: str, closing: str, last_id: int) -> Tail:
        """The tail of a turn that ends in a tool call.

        The rest of the call (quotes, braces) was sampled by the model, so the tail begins at the end of turn: the one
        in `closing`, or the delimiter of the next message where that is what ends a turn. Raises `SpliceError` when
        there is neither.
        """
        end = self._added.get(last_id)
        ends = [end] if end is not None and end in closing else [text for text in self._stop_texts if text in closing]
        if not ends:
            return self._tail_after_open_call(after, closing, last_id)
        marker = min(ends, key=closing.index)
        start = closing.index(marker)
        upto = start + len(marker)
        if after[:upto] != closing[:upto]:
            raise SpliceError("The template closes the tool-call turn differently once other messages follow it.")
        return Tail(after[start:], last_id if marker == end else None)

    def _tail_after_open_call(self, after: str, closing: str, last_id: int) -> Tail:
        """A template that ends no turn by itself: the next message's delimiter does."""
        tail = after[len(closing) :].lstrip() if after.startswith(closing) else ""
        if not tail.startswith(tuple(self._stop_texts)):
            raise SpliceError(
                f"The template ends a tool-call turn with {closing[-40:]!r}, without an end-of-turn token."
            )
        end = self._added.get(last_id)
        return Tail(tail, last_id if end is not None and tail.startswith(end) else None)

    def tail_ids(self, tail: Tail) -> list[int]:
        """The ids that follow the parent's."""
        ids = self.encode(tail.text)
        if tail.sampled_id is None:
            return ids
        if not ids or ids[0] != tail.sampled_id:
            raise SpliceError(
                f"The tail {tail.text[:40]!r} does not begin with the sampled end of turn, id {tail.sampled_id}."
            )
        return ids[1:]


def text_after(rendered: str, sentinel: str) -> str | None:
    """The rendering after `sentinel`; None when it is not there. Raises `SpliceError` when it is there repeatedly."""
    parts = rendered.split(sentinel)
    if len(parts) > 2:
        raise SpliceError(f"The template renders the last assistant turn {len(parts) - 1} times; expected once.")
    return parts[1] if len(parts) == 2 else None


class Splicer:
    """Turns the rendering of a child call into parent's ids + tail. One a worker.

    `prefixes` resolves the parent's cumulative ids. The tokenizer must be the splicer's own: it is used from a thread.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int], prefixes: PrefixStore) -> None:
        self._boundary = TurnBoundary(tokenizer, stop_token_ids)
        self._prefixes = prefixes
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="splice")

    def install(self, renderer: Any) -> None:
        """Hook a renderer's `render_messages_async`.

        The hook sits on the instance because the renderer's own `render_chat_async`, which every chat-like dialect
        goes through, looks that method up on itself.
        """
        inner: Render = renderer.render_messages_async

        async def render_messages_async(messages: Messages, params: Any) -> tuple[Any, dict[str, Any]]:
            call = current_call.get()
            if call is None or call.admission.mode != "token_in":
                return await inner(messages, params)
            return await self.render_child(call, messages, params, inner)

        renderer.render_messages_async = render_messages_async

    async def render_child(
        self, call: TaggedCall, messages: Messages, params: Any, render: Render
    ) -> tuple[Any, dict[str, Any]]:
        """Render a child call: the conversation and its prompt as ids, or the plain prompt with `call.failure` set."""
        _materialise(messages)
        # Copied before the plain rendering: renderers parse tool-call arguments in place.
        originals = copy.deepcopy(messages)
        conversation, plain = await render(messages, params)
        try:
            prefix = call.prefix_token_ids = await self._prefixes.resolve(call.admission)
            if plain.get("multi_modal_data") is not None:
                raise SpliceError("The prompt carries images or audio; only text conversations can be spliced.")
            tail = await self._tail(originals, params, render, int(prefix[-1]))
        except SpliceError as error:
            call.failure = (Cause.SPLICE_BOUNDARY, str(error))
        except StagingError as error:
            call.failure = (Cause(error.cause), str(error))
        except WorkbenchError as error:
            # The staging store as a whole is away; the agent is served all the same.
            call.failure = (Cause.MISSING_STAGING_ROW, str(error))
        else:
            return conversation, {"prompt_token_ids": [*prefix.tolist(), *tail]}
        return conversation, plain

    async def _tail(self, messages: Messages, params: Any, render: Render, last_id: int) -> list[int]:
        marked = mark_last_assistant_turn(messages)
        rendered = await self._text(marked.messages, params, render)
        after_call = text_after(rendered, marked.call_sentinel) if marked.call_sentinel else None
        if after_call is None and marked.content_sentinel is None:
            # A template that knows no tool calls renders such a turn empty; its text shows where it ends all the same.
            marked = mark_last_assistant_turn(messages, with_text=True)
            rendered = await self._text(marked.messages, params, render)
        after_content = text_after(rendered, marked.content_sentinel) if marked.content_sentinel else None
        if after_call is not None and (after_content is None or len(after_call) < len(after_content)):
            closing = await self._closing(marked, marked.call_sentinel or "", params, render)
            if closing is None:
                raise SpliceError("The template leaves out a final tool-call turn, so its end cannot be found.")
            tail = self._boundary.tail_after_call(after_call, closing, last_id)
        elif after_content is not None:
            tail = self._boundary.tail_after_text(after_content, last_id)
            if tail.sampled_id is None and self._boundary.writes_more(after_content, last_id):
                closing = await self._closing(marked, marked.content_sentinel or "", params, render)
                self._boundary.check_text_closing(closing or "", last_id)
        else:
            raise SpliceError("The template does not render the last assistant turn, so its end cannot be found.")
        if len(tail.text) <= LONG_TAIL_CHARS:
            return self._boundary.tail_ids(tail)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._boundary.tail_ids, tail)

    async def _closing(self, marked: MarkedTurn, sentinel: str, params: Any, render: Render) -> str | None:
        """What closes the marked turn when nothing follows it; None when the template then leaves the turn out."""
        alone = _without_generation_prompt(params)
        return text_after(await self._text(marked.messages[: marked.index + 1], alone, render), sentinel)

    async def _text(self, messages: Messages, params: Any, render: Render) -> str:
        try:
            # Rendering may write into what it is given, and these messages are rendered more than once.
            _, prompt = await render(copy.deepcopy(messages), params)
        except Exception as error:
            raise SpliceError(f"The template refuses the marked conversation: {error}") from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise SpliceError("The renderer gives ids instead of text, so no boundary can be found in it.")
        return text

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _without_generation_prompt(params: Any) -> Any:
    kwargs = {**params.chat_template_kwargs, "add_generation_prompt": False, "continue_final_message": False}
    return dataclasses.replace(params, chat_template_kwargs=kwargs)


def _materialise(messages: Messages) -> None:
    """Turn one-shot iterators (a validated request's lazy lists) into lists, in place: they are read more than once."""
    for message in messages:
        for name in ("tool_calls", "content"):
            value = message.get(name)
            if value is not None and not isinstance(value, (str, list, dict)):
                message[name] = list(value)
