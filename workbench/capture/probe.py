"""Probe: one two-turn conversation at start-up that proves this engine and this chat template can be captured exactly.

    turn 1 (whole body) ─▶ staged root ─▶ prompt ids, one begin token, sampled ids, log-probs
    turn 2 (streamed)   ─▶ staged child ─▶ parent's ids first, then the tail that a plain rendering has after turn 1
It goes over HTTP like a gateway, and then reads the staged rows back. What fails stops the run and is named: a field
that the engine left out, a begin token that stands twice, a splice that is not the template's own rendering.
Not here: whether sampler and trainer agree (the proof after each weight update).
"""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import orjson

from workbench.capture.splice import TurnBoundary
from workbench.errors import ProbeFailed, StagingError
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.wire import CaptureAdmission, StagedCall
from workbench.wire.headers import ADMISSION_HEADER, ROLLOUT_HEADER

if TYPE_CHECKING:
    from workbench.capture.attach import Capture
    from workbench.capture.core import StagingSource
    from workbench.serving.worker import PolicyServer

ROOT = [{"role": "user", "content": "Name the capital of France, then count from 1 to 3."}]
FOLLOW_UP = {"role": "user", "content": "Thank you. And of Italy?"}
MAX_TOKENS = 16
MAX_MEAN_DELTA = 0.25
"""Captured against scored log-probs of one engine; bfloat16 noise is below 0.1, another distribution is far above."""
REQUEST_TIMEOUT_S = 60.0


async def run_probe(server: PolicyServer, capture: Capture) -> dict[str, Any]:
    """Returns what was found (token counts, `prefix_stable`, `equals_plain_rendering`, `renders_tools`, ...). Raises
    `ProbeFailed`."""
    if capture.source is None:
        raise ProbeFailed("The probe reads staged rows back, but this worker has no staging source.")
    began = time.perf_counter()
    keys: list[str] = []
    try:
        return await _converse(server, capture.source, keys) | {"seconds": round(time.perf_counter() - began, 3)}
    finally:
        await capture.source.clear(keys)


async def _converse(server: PolicyServer, source: StagingSource, keys: list[str]) -> dict[str, Any]:
    rollout_id = f"probe.{uuid.uuid4().hex[:12]}.0.0"
    headers = {"authorization": f"Bearer {os.environ[WORKER_TOKEN_ENV]}", ROLLOUT_HEADER: rollout_id}
    root = CaptureAdmission(rollout_id=rollout_id, model_call_id=uuid.uuid4().hex, mode="text")
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=REQUEST_TIMEOUT_S) as http:
        body = {"model": server.config.served_model_name, "messages": ROOT, "max_tokens": MAX_TOKENS}
        served, completion_tokens = await _whole(http, body, root)
        first = await _staged(source, http, root, keys)
        sampled = int(first.token_mask_delta.sum())
        if sampled != completion_tokens:
            raise ProbeFailed(
                f"Field token_ids: {sampled} sampled ids were captured, the engine counted {completion_tokens}."
            )
        begin_tokens = _check_root(server, first)
        child = CaptureAdmission(
            rollout_id=rollout_id,
            model_call_id=uuid.uuid4().hex,
            parent_call_id=root.model_call_id,
            prev_len=first.cum_len,
            mode="token_in",
            staging_chain=list(keys),
            parent_chain_hash=first.chain_hash,
        )
        messages = [*ROOT, {"role": "assistant", "content": served}, FOLLOW_UP]
        await _streamed(http, body | {"messages": messages, "stream": True}, child)
        second = await _staged(source, http, child, keys)
    found = _check_child(server, first, second, messages, served)
    return {
        "capture_enabled": True,
        "prompt_tokens": first.delta_len - sampled,
        "sampled_tokens": sampled,
        "begin_tokens": begin_tokens,
        "renders_tools": renders_tools(server.tokenizer),
        "mean_abs_logprob_delta": await _check_logprobs(server, first, second),
        **found,
    }


def renders_tools(tokenizer: Any) -> bool:
    """Whether the chat template puts the tools of a request into the prompt; a model never sees those that it drops."""
    name = "workbench_probe_tool"
    function = {"name": name, "description": "Nothing.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    return name in tokenizer.apply_chat_template(ROOT, tools=tools, tokenize=False, add_generation_prompt=True)


async def _whole(http: httpx.AsyncClient, body: dict[str, Any], admission: CaptureAdmission) -> tuple[str, int]:
    answer = await http.post("/v1/chat/completions", json=body, headers={ADMISSION_HEADER: admission.to_header()})
    if answer.status_code != 200:
        raise ProbeFailed(f"The engine refused the probe's first turn with {answer.status_code}: {answer.text[:300]}")
    response = answer.json()
    _check_no_ids(response)
    return response["choices"][0]["message"]["content"] or "", response["usage"]["completion_tokens"]


async def _streamed(http: httpx.AsyncClient, body: dict[str, Any], admission: CaptureAdmission) -> None:
    headers = {ADMISSION_HEADER: admission.to_header()}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise ProbeFailed(f"The engine refused the probe's second turn with {answer.status_code}: {text[:300]}")
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _check_no_ids(orjson.loads(line[6:]))


def _check_no_ids(response: dict[str, Any]) -> None:
    for part in (response, *response.get("choices", ())):
        for name in ("prompt_token_ids", "token_ids", "prompt_logprobs", "logprobs"):
            if part.get(name) is not None:
                raise ProbeFailed(
                    f"Field {name} of a captured call's response is filled; tokens must not leave the worker."
                )


async def _staged(
    source: StagingSource, http: httpx.AsyncClient, admission: CaptureAdmission, keys: list[str]
) -> StagedCall:
    """The staged row of one probe call; adds its key to `keys`."""
    answer = await http.get(f"/workbench/capture/{admission.model_call_id}")
    if answer.status_code != 200:
        raise ProbeFailed("The engine answered the probe but nothing was captured: generation bypassed the capture.")
    outcome = answer.json()
    if outcome["failure"] is not None:
        raise ProbeFailed(f"Capture failed with {outcome['failure']['cause']}: {outcome['failure']['detail']}")
    keys.append(outcome["coords"]["staging_key"])
    (row,) = await source.fetch(keys[-1:])
    if isinstance(row, StagingError):
        raise ProbeFailed(f"The probe's call was acknowledged but cannot be read back: {row}")
    return row


def _check_root(server: PolicyServer, row: StagedCall) -> int:
    """The root's prompt is the plain rendering, with one begin token where the model has one; returns their number."""
    prompt = _carry(row)
    begin = server.tokenizer.bos_token_id
    repeated = 0
    while begin is not None and repeated < len(prompt) and prompt[repeated] == begin:
        repeated += 1
    # A tokenizer that begins plain text with the token says that the model expects it.
    expected = begin is not None and server.tokenizer("a")["input_ids"][0] == begin
    if repeated > 1 or (expected and repeated == 0):
        raise ProbeFailed(
            f"The prompt begins with {repeated} begin-of-sequence tokens (id {begin}); expected exactly one."
        )
    plain = _encode(server, _render(server, ROOT))
    if prompt != plain:
        raise ProbeFailed(
            f"Field prompt_token_ids: the engine ran {len(prompt)} ids, the template renders {len(plain)} others."
        )
    return repeated


def _check_child(
    server: PolicyServer, first: StagedCall, second: StagedCall, messages: list[dict[str, Any]], served: str
) -> dict[str, Any]:
    """Compare the child's spliced prompt with the plain rendering, where the template keeps earlier turns as said."""
    prefix = first.token_ids_delta.astype(np.int64).tolist()
    spliced = prefix + _carry(second)
    plain = _render(server, messages)
    said = _render(server, ROOT) + served
    if not plain.startswith(said):
        # Such a template rewrites what the model said, which is what splicing is for; there is nothing to compare with.
        return {"prefix_stable": False, "equals_plain_rendering": None}
    text, end = plain[len(said) :], server.tokenizer.added_tokens_decoder.get(prefix[-1])
    if end is not None and text.lstrip().startswith(str(end)):
        # The model ended its turn itself, so white space that the template puts before that end has no place.
        text = text.lstrip()
    tail = TurnBoundary(server.tokenizer, ()).encode(text)
    if end is not None and tail[:1] == prefix[-1:]:
        tail = tail[1:]
    if spliced != prefix + tail:
        raise ProbeFailed(
            f"Splice: the child's prompt ends in {spliced[len(prefix) :][:12]}, the template's own rendering after the "
            f"first turn in {tail[:12]}."
        )
    whole = _encode(server, plain)
    same = spliced == whole
    if not same and whole[: len(prefix)] == prefix:
        raise ProbeFailed(
            "Splice: the plain rendering begins with the parent's ids but the spliced prompt differs from it."
        )
    return {"prefix_stable": True, "equals_plain_rendering": same}


async def _check_logprobs(server: PolicyServer, first: StagedCall, second: StagedCall) -> float | None:
    """Mean |captured − scored| over the sampled tokens; None where sampling is not the model's plain distribution."""
    pins = server.config.sampling
    if server.config.engine == "scripted" or (pins.temperature, pins.top_p, pins.top_k, pins.min_p) != (
        1.0,
        1.0,
        0,
        0.0,
    ):
        return None
    ids = np.concatenate([first.token_ids_delta, second.token_ids_delta]).astype(np.int64).tolist()
    captured = np.concatenate([first.generation_log_probs_delta, second.generation_log_probs_delta])[1:]
    sampled = np.concatenate([first.token_mask_delta, second.token_mask_delta])[1:] > 0
    (scored,) = await server.score([ids])
    delta = float(np.abs(captured - np.asarray(scored))[sampled].mean())
    if not delta <= MAX_MEAN_DELTA:
        raise ProbeFailed(
            f"Field logprobs: captured and scored log-probs differ by {delta:.3f} on average (at most "
            f"{MAX_MEAN_DELTA}); the engine reports another distribution than the one it samples from."
        )
    return delta


def _carry(row: StagedCall) -> list[int]:
    return row.token_ids_delta[row.token_mask_delta == 0].astype(np.int64).tolist()


def _render(server: PolicyServer, messages: list[dict[str, Any]]) -> str:
    return server.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode(server: PolicyServer, text: str) -> list[int]:
    return list(server.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
