"""Scripted engine: replays given tokens and log-probs behind the real capture, transport and splice.

    script line (JSONL, or a function) ─▶ ids_T, logprobs_T ─▶ outputs shaped like vLLM's ─▶ CapturingEngine
For speed, and for faults that a real engine shows rarely: it can leave out ids or log-probs, return NaN, be slow, raise
or end its process. Prompts are rendered with the model's real tokenizer and chat template, so splicing is real.
Not here: HTTP (scripted_app). There is no model, so nothing can be scored and weight updates only change the version.

A line: {"text": …} or {"token_ids": […]}, and optionally "rollout" (a pattern such as `*.0.1.*`), "logprobs" (one a
token; default −0.5), "finish_reason", "delay_s" (spread over the tokens), "fault" (see `FAULTS`), "at" (its token).
The k-th call of a rollout gets the k-th line whose pattern fits, and the last fitting line again after that; lines
without a pattern are for rollouts that no pattern fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import importlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench import own_code
from workbench.errors import SetupError, first_fault

FAULTS = ("nan_logprob", "few_logprobs", "no_logprobs", "no_ids", "no_prompt_ids", "raise", "die")
Fault = Literal["nan_logprob", "few_logprobs", "no_logprobs", "no_ids", "no_prompt_ids", "raise", "die"]
TOKENS_A_DELTA = 4


class ScriptLine(BaseModel):
    """One reply. See the module's head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout: str | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str = "stop"
    delay_s: float = Field(default=0.0, ge=0.0)
    fault: Fault | None = None
    at: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> ScriptLine:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("a line has either text or token_ids")
        return self


ReplyFunction = Callable[[str, int, list[dict[str, Any]]], dict[str, Any]]
"""(rollout id, number of this call in its rollout, messages) → a line as a mapping."""


class Script:
    """Chooses the reply of each call. `source`: a JSONL path, `module:function`, or a `ReplyFunction`."""

    def __init__(self, source: str | Path | ReplyFunction) -> None:
        self._calls: Counter[str] = Counter()
        self._lines: list[ScriptLine] = []
        self._function: ReplyFunction | None = None
        if callable(source):
            self._function = source
        elif ":" in str(source) and not Path(source).exists():
            self._function = _load(str(source))
        else:
            self._lines = _read_lines(Path(source))

    def reply(self, rollout_id: str, messages: list[dict[str, Any]]) -> ScriptLine:
        """The next reply of this rollout; untagged requests share the rollout id ''.

        Raises SetupError where the script has none, or its function raises or gives what is no line.
        """
        number = self._calls[rollout_id]
        self._calls[rollout_id] += 1
        if self._function is not None:
            return self._asked(self._function, rollout_id, number, messages)
        fitting = [line for line in self._lines if line.rollout and fnmatch.fnmatchcase(rollout_id, line.rollout)]
        fitting = fitting or [line for line in self._lines if line.rollout is None]
        if not fitting:
            raise SetupError(f"The script has no line for rollout {rollout_id!r}. Next: add one without a pattern.")
        return fitting[min(number, len(fitting) - 1)]

    @staticmethod
    def _asked(function: ReplyFunction, rollout_id: str, number: int, messages: list[dict[str, Any]]) -> ScriptLine:
        whose = (
            f"The script's function{own_code.place_of(function)}, asked for call {number} of rollout {rollout_id!r},"
        )
        try:
            line: Any = function(rollout_id, number, messages)
        except Exception as error:
            raise SetupError(f"{whose} raised {own_code.raised(error)}") from error
        if not isinstance(line, dict):
            raise SetupError(f"{whose} returned {own_code.a(line)}; expected a line as a dict, like {{'text': 'Yes.'}}")
        try:
            return ScriptLine.model_validate(line)
        except ValidationError as error:
            raise SetupError(f"{whose} returned what is no line: {first_fault(error)}") from error


def _load(source: str) -> ReplyFunction:
    module, name = source.split(":", 1)
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # somebody's module may raise anything while it is imported
        raise SetupError(f"The script {source!r} cannot be loaded: {own_code.raised(error)}") from error
    if not callable(function):
        raise SetupError(f"The script {source!r} is {own_code.a(function)}; expected a function, or a JSONL file")
    return function


def _read_lines(path: Path) -> list[ScriptLine]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SetupError(f"The scripted engine's script {path} cannot be read: {error}") from error
    lines = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            try:
                lines.append(ScriptLine.model_validate(orjson.loads(line)))
            except ValidationError as error:
                raise SetupError(f"{path}, line {number}: {first_fault(error)}") from error
            except ValueError as error:
                raise SetupError(f"{path}, line {number}: {error}") from error
    return lines


@dataclass
class ScriptedParams:
    """Sampling parameters with the names that the engine wrapper reads and pins; `line` is what will be replayed."""

    line: ScriptLine
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None

    def clone(self) -> ScriptedParams:
        return copy.copy(self)


@dataclass
class ScriptedLogprob:
    logprob: float


@dataclass
class ScriptedCompletion:
    token_ids: list[int] | None
    logprobs: list[dict[int, ScriptedLogprob]] | None
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class ScriptedOutput:
    prompt_token_ids: list[int] | None
    outputs: list[ScriptedCompletion]
    finished: bool


@dataclass(frozen=True)
class ChatParams:
    """What the template gets besides the messages; the same field that vLLM's renderer parameters have."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class ScriptedRenderer:
    """Renders messages with a Hugging Face tokenizer's chat template, like vLLM's renderer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def render_messages_async(
        self, messages: list[dict[str, Any]], params: ChatParams
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        conversation = copy.deepcopy(messages)
        for message in conversation:
            message["content"] = _as_text(message.get("content"))
            for call in message.get("tool_calls") or ():
                arguments = call["function"].get("arguments")
                if isinstance(arguments, str):
                    call["function"]["arguments"] = orjson.loads(arguments or "{}")
        kwargs = {"add_generation_prompt": True, **params.chat_template_kwargs}
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **kwargs)
        return conversation, {"prompt": text}

    async def prompt_ids(self, messages: list[dict[str, Any]], params: ChatParams) -> list[int]:
        """Ids of the prompt; a hooked renderer may give ids already."""
        _, prompt = await self.render_messages_async(messages, params)
        if "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"]
        return list(self.tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"])


class ScriptedEngine:
    """An engine client whose generations come from `ScriptedParams.line`."""

    def __init__(self, tokenizer: Any) -> None:
        self.renderer = ScriptedRenderer(tokenizer)
        self._tokenizer = tokenizer
        self._aborted: dict[str, asyncio.Event] = {}

    async def abort(self, request_id: str) -> None:
        """Stop a running generation; its last output has finish_reason `abort`."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def generate(
        self, prompt: dict[str, Any], params: ScriptedParams, request_id: str, **_: Any
    ) -> AsyncGenerator[ScriptedOutput, None]:
        """Deltas of up to `TOKENS_A_DELTA` tokens; the last one is finished."""
        line = params.line
        if line.fault == "die":
            os._exit(17)
        ids, finish_reason, stop_reason = self._sampled(params)
        logprobs = self._logprobs(line, len(ids))
        prompt_ids = None if line.fault == "no_prompt_ids" else prompt["prompt_token_ids"]
        aborted = self._aborted[request_id] = asyncio.Event()
        pause_s = line.delay_s * TOKENS_A_DELTA / max(len(ids), 1)
        text = ""
        try:
            for start in range(0, max(len(ids), 1), TOKENS_A_DELTA):
                if pause_s:
                    await _wait(aborted, pause_s)
                if aborted.is_set():
                    yield ScriptedOutput(prompt_ids, [ScriptedCompletion([], [], "", "abort")], True)
                    return
                upto = min(start + TOKENS_A_DELTA, len(ids))
                if line.fault == "raise" and upto > line.at:
                    raise RuntimeError("the scripted engine was told to raise")
                last = upto == len(ids)
                whole = self._text(ids[:upto], stop_reason if last else None, last)
                # A delta that ends inside a character adds nothing until the character is complete.
                delta, text = (whole[len(text) :], whole) if whole.startswith(text) else ("", text)
                part = ids[start:upto]
                completion = ScriptedCompletion(
                    None if line.fault == "no_ids" else part,
                    None if line.fault == "no_logprobs" else _steps(part, logprobs[start:upto]),
                    delta,
                    finish_reason if last else None,
                    stop_reason if last else None,
                )
                yield ScriptedOutput(prompt_ids, [completion], last)
        finally:
            self._aborted.pop(request_id, None)

    def _sampled(self, params: ScriptedParams) -> tuple[list[int], str, int | str | None]:
        """Ids up to a stop string or the length limit, and how the call ended."""
        line = params.line
        if line.token_ids is not None:
            ids = list(line.token_ids)
        else:
            ids = list(self._tokenizer(line.text, add_special_tokens=False)["input_ids"])
            if line.finish_reason == "stop" and self._tokenizer.eos_token_id is not None:
                ids.append(self._tokenizer.eos_token_id)
        ids_in_budget = ids[: params.max_tokens]
        for upto in range(1, len(ids_in_budget) + 1) if params.stop else ():
            text = self._tokenizer.decode(ids_in_budget[:upto], skip_special_tokens=True)
            found = next((stop for stop in params.stop if stop in text), None)
            if found is not None:
                return ids_in_budget[:upto], "stop", found
        if len(ids_in_budget) < len(ids):
            return ids_in_budget, "length", None
        return ids, line.finish_reason, None

    def _text(self, ids: list[int], stop: int | str | None, last: bool) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if isinstance(stop, str):
            text = text.split(stop, 1)[0]
        return text if last else text.rstrip("\ufffd")

    def _logprobs(self, line: ScriptLine, count: int) -> list[float]:
        logprobs = list(line.logprobs) if line.logprobs is not None else [-0.5] * count
        if line.fault == "nan_logprob":
            logprobs[min(line.at, count - 1)] = float("nan")
        if line.fault == "few_logprobs":
            logprobs = logprobs[: count - 1]
        return logprobs[:count]


def _as_text(content: Any) -> str:
    """Content as vLLM's renderer gives it to a template that expects text."""
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def _steps(ids: list[int], logprobs: list[float]) -> list[dict[int, ScriptedLogprob]]:
    return [{token: ScriptedLogprob(value)} for token, value in zip(ids, logprobs, strict=False)]


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
