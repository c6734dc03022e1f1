"""The real engine, with a tap below the capture: what was staged is what the engine ran, id for id.

One engine for the module (tiny random model, float32): about half a minute to start. That is why this file is long:
whatever needs the real engine shares it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from capture.scripted_worker import TOKEN, Agent, close_clients, text_of
from capture.speakers import SPEAKERS, through_gateway
from capture.splicing import child_of
from capture.templates import QWEN

from workbench import models
from workbench.capture.staging import MemorySink
from workbench.capture.transport import TaggedCall, current_call
from workbench.errors import WeightSyncError
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.serving.sampling import SamplingPins
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import StagedCall

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

USER = {"role": "user", "content": "Hello 123, who are you?"}
NEXT = {"role": "user", "content": "Tell me more \U0001f30d, please."}
MAX_TOKENS = 24


class Tap:
    """Sits between vLLM's front end and its engine core: prompt ids sent, sampled ids received, by our call id."""

    def __init__(self, engine: Any) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.sampled: dict[str, list[int]] = defaultdict(list)
        self._names: dict[str, str] = {}
        core = engine.engine_core
        add, get = core.add_request_async, core.get_output_async

        async def add_request_async(request: Any) -> None:
            self._names[request.request_id] = request.external_req_id
            self.prompts[request.external_req_id] = list(request.prompt_token_ids)
            await add(request)

        async def get_output_async() -> Any:
            outputs = await get()
            for output in outputs.outputs:
                self.sampled[self._names.get(output.request_id, "")].extend(output.new_token_ids)
            return outputs

        core.add_request_async, core.get_output_async = add_request_async, get_output_async


class Worker:
    def __init__(self, server: PolicyServer, sink: MemorySink, tap: Tap, model: Path) -> None:
        self.server = server
        self.sink = sink
        self.tap = tap
        self.model = model

    async def rows(self, agent: Agent, call_id: str) -> list[StagedCall]:
        rows = await self.sink.fetch(agent.chains[call_id])
        assert all(isinstance(row, StagedCall) for row in rows)
        return rows  # type: ignore[return-value]

    async def check_chain(self, agent: Agent, call_id: str) -> list[int]:
        """The linearised chain equals what the engine ran at its last call; returns its ids."""
        rows = await self.rows(agent, call_id)
        ids = np.concatenate([row.token_ids_delta for row in rows]).astype(int).tolist()
        prompt = self.tap.prompts[call_id]
        assert ids[: len(prompt)] == prompt
        sampled = int(rows[-1].token_mask_delta.sum())
        assert ids[len(prompt) :] == self.tap.sampled[call_id][:sampled]
        if rows[-1].extras["stop_reason"] is None:
            assert len(self.tap.sampled[call_id]) == sampled
        return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: Any) -> AsyncIterator[Worker]:
    patch = pytest.MonkeyPatch()
    patch.setenv(WORKER_TOKEN_ENV, TOKEN)
    model = models.build("tiny")
    sink = MemorySink()
    config = WorkerConfig(
        model_path=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_gib=0.25,
        sampling={"max_tokens": MAX_TOKENS},
    )
    server = PolicyServer(config, sink, sink)
    await server.start()
    try:
        tap = Tap(server.engine)
        # The front end is waiting in the untapped read already; one call wakes it up.
        await server.score([[1, 2, 3]])
        yield Worker(server, sink, tap, model)
    finally:
        await close_clients()
        await server.stop()
        patch.undo()


def said(response: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": text_of(response)}


@cache
def network(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def reference_logprobs(model: Path, ids: list[int]) -> np.ndarray:
    """Log-probs of every token after the first by transformers, float32, temperature 1."""
    import torch

    with torch.inference_mode():
        logits = network(model)(torch.tensor([ids])).logits[0, :-1].double()
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
    return picked[:, 0].numpy()


async def test_probe_passes(worker: Worker) -> None:
    found = await worker.server.probe()
    assert found["prefix_stable"] is True
    assert found["mean_abs_logprob_delta"] < 1e-4
    assert worker.sink.rows == {}


async def test_a_call_that_could_not_be_captured_is_said_in_the_log(
    worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's server imports lifts the root logger to ERROR, and the worker's warnings would be lost."""
    agent = Agent(worker.server, "run.9.0.0")
    monkeypatch.setattr(worker.sink, "stage", lambda call: (_ for _ in ()).throw(OSError("disk full")))
    call_id, _, outcome = await agent.call([USER])
    assert outcome["coords"]["disposition"] == "capture_failed"
    assert f"run.9.0.0/{call_id}" in caplog.text and "disk full" in caplog.text


async def test_staged_rows_equal_what_the_engine_ran_over_many_turns(worker: Worker) -> None:
    agent = Agent(worker.server, "run.0.0.0")
    messages, call_id = [USER], None
    for turn in range(4):
        call_id, response, _ = await agent.call(messages, call_id, stream=turn % 2 == 1, max_tokens=6 + turn)
        messages = [*messages, said(response), NEXT]
    ids = await worker.check_chain(agent, call_id)
    rows = await worker.rows(agent, call_id)
    # Log-probs of the whole row, sampled in four calls and cached prefixes, against one uncached forward pass.
    captured = np.concatenate([row.generation_log_probs_delta for row in rows])[1:]
    mask = np.concatenate([row.token_mask_delta for row in rows])[1:] > 0
    delta = np.abs(captured - reference_logprobs(worker.model, ids))[mask]
    assert delta.max() <= 1e-4


async def test_branch_and_retry_share_the_parent_and_nothing_else(worker: Worker) -> None:
    agent = Agent(worker.server, "run.0.1.0")
    root, response, _ = await agent.call([USER])
    follow_up = [USER, said(response), NEXT]
    first, _, _ = await agent.call(follow_up, root)
    retried, again, _ = await agent.call(follow_up, root)
    branch, _, _ = await agent.call([USER, said(response), {"role": "user", "content": "Something else."}], root)
    third, _, _ = await agent.call([*follow_up, said(again), NEXT], retried)
    for call_id in (first, retried, branch, third):
        await worker.check_chain(agent, call_id)
    parent = await worker.check_chain(agent, root)
    assert worker.tap.prompts[first] == worker.tap.prompts[retried]
    assert worker.tap.prompts[branch][: len(parent)] == parent
    assert worker.tap.prompts[branch] != worker.tap.prompts[first]
    assert (await worker.check_chain(agent, third))[: len(worker.tap.prompts[first])] == worker.tap.prompts[first]


async def test_length_cut_and_stop_string_keep_every_id_the_engine_sampled(worker: Worker) -> None:
    agent = Agent(worker.server, "run.0.2.0")
    cut, response, _ = await agent.call([USER], max_tokens=5)
    (row,) = await worker.rows(agent, cut)
    assert (row.extras["finish_reason"], row.extras["truncated"], row.token_mask_delta.sum()) == ("length", True, 5)
    # A letter that the random model will have said soon.
    for stream in (False, True):
        stopped, response, _ = await agent.call([USER, said(response), NEXT], cut, stop=["e"], stream=stream)
        row = (await worker.rows(agent, stopped))[-1]
        sampled = row.token_ids_delta[row.token_mask_delta == 1].astype(int)
        assert row.extras["stop_reason"] == "e"
        assert "e" not in text_of(response)
        assert "e" in worker.server.tokenizer.decode(sampled)
        await worker.check_chain(agent, stopped)
        child, _, _ = await agent.call([USER, said(response), NEXT, said(response), NEXT], stopped)
        ids = await worker.check_chain(agent, child)
        assert ids[row.cum_len] == worker.server.tokenizer.eos_token_id, "the template ends the cut turn"


async def test_concurrent_calls_are_not_mixed_up(worker: Worker) -> None:
    agents = [Agent(worker.server, f"run.1.{index}.0") for index in range(12)]
    calls = await asyncio.gather(
        *(
            agent.call([{"role": "user", "content": f"I am number {index}."}], stream=index % 2 == 0)
            for index, agent in enumerate(agents)
        )
    )
    for agent, (call_id, response, _) in zip(agents, calls, strict=True):
        await worker.check_chain(agent, call_id)
        if "usage" in response:
            (row,) = await worker.rows(agent, call_id)
            assert response["usage"]["completion_tokens"] == row.token_mask_delta.sum()


async def test_other_dialects_are_captured_alike(worker: Worker) -> None:
    agent = Agent(worker.server, "run.2.0.0")
    for path, body in (
        ("/v1/responses", {"input": USER["content"], "store": False}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 8}),
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8}),
    ):
        admission = agent.admission()
        answer = await agent.http.post(path, json={"model": "policy", **body}, headers=agent.headers(admission))
        assert answer.status_code == 200, answer.text
        assert "token_ids" not in {key for key, value in _leaves(answer.json()) if value}
        agent.remember(admission, await agent.outcome(admission.model_call_id))
        await worker.check_chain(agent, admission.model_call_id)


@pytest.mark.parametrize("dialect", ["responses", "messages", "chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_token_in_rate_after_roots_is_one_through_the_gateway(
    worker: Worker, dialect: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with the API's own client, the gateway, vLLM's serving app: every later call runs its parent's ids."""
    rollout_id = f"run.8.{dialect}.{stream:d}"
    last = await through_gateway(worker.server.url, tmp_path, monkeypatch, SPEAKERS[dialect], rollout_id, stream)
    manifest = LedgerStore(tmp_path).freeze(rollout_id)
    assert manifest.failures == []
    root, *others = manifest.records
    assert root.mode == "text"
    assert [(record.mode, record.parent_call_id) for record in others] == [
        ("token_in", record.model_call_id) for record in manifest.records[:-1]
    ]
    receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0, response=last)
    rows = await worker.sink.fetch([record.staging_key for record in manifest.records])
    row = verify_and_linearize(receipt, rows)
    tail = others[-1].model_call_id
    assert row.token_ids.tolist() == worker.tap.prompts[tail] + worker.tap.sampled[tail]


async def test_parsers_are_named_without_importing_the_engine(worker: Worker) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from workbench.serving import parsers, tools_as_text

    assert parsers.offered("tool_call_parser") == sorted({*ToolParserManager.list_registered()} - {tools_as_text.NAME})
    assert parsers.offered("reasoning_parser") == sorted(ReasoningParserManager.list_registered())


def _leaves(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in ((key, item), *_leaves(item))]
    if isinstance(value, list):
        return [pair for item in value for pair in _leaves(item)]
    return []


async def test_tool_call_turn_is_spliced_in_vllms_own_renderer(worker: Worker) -> None:
    """Arguments that the renderer parses in place, one-shot lists, a template with tools: as a request brings them."""
    from vllm.renderers import ChatParams

    server = worker.server
    parent = [1, 9, 8, 7, server.tokenizer.eos_token_id]
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "Rome"}'}}
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    turn = {"role": "assistant", "content": None, "tool_calls": iter([call])}
    messages = [USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    tagged = TaggedCall(child_of(parent, "run.7.0.0"))
    kwargs = {"tools": tools, "add_generation_prompt": True, "continue_final_message": False, "tokenize": False}
    token = current_call.set(tagged)
    try:
        conversation, prompt = await server.engine.renderer.render_messages_async(
            messages, ChatParams(chat_template=QWEN, chat_template_kwargs=kwargs)
        )
    finally:
        current_call.reset(token)
    assert tagged.failure is None
    assert conversation[1]["tool_calls"][0]["function"]["arguments"] == {"query": "Rome"}
    assert prompt["prompt_token_ids"][: len(parent)] == parent
    assert server.tokenizer.decode(prompt["prompt_token_ids"][len(parent) :]) == (
        "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_response_of_a_captured_call_equals_that_of_an_uncaptured_one(worker: Worker) -> None:
    """Capture never changes the answer: same seed, same text, same fields."""
    agent = Agent(worker.server, "run.3.0.0")
    body = {"seed": 11, "max_tokens": 12, "temperature": 1.0}
    _, tagged, _ = await agent.call([USER], **body)
    request = {"model": "policy", "messages": [USER], **body}
    plain = (await agent.http.post(agent.path, json=request)).json()
    for response in (tagged, plain):
        for name in ("id", "created"):
            response.pop(name)
    assert tagged == plain


async def test_prompt_beyond_the_window_is_a_client_error(worker: Worker) -> None:
    agent = Agent(worker.server, "run.4.0.0")
    admission = agent.admission()
    long = {"role": "user", "content": "word " * 600}
    answer = await agent.http.post(
        agent.path, json={"model": "policy", "messages": [long]}, headers=agent.headers(admission)
    )
    assert answer.status_code == 400
    assert await agent.outcome(admission.model_call_id) is None


@pytest.mark.parametrize("stream", [False, True])
async def test_reader_who_leaves_gets_the_call_staged_as_aborted(
    worker: Worker, stream: bool, monkeypatch: Any
) -> None:
    agent = Agent(worker.server, f"run.5.{stream:d}.0")
    admission = agent.admission()
    # Long enough that the news of the leaving reader comes first.
    monkeypatch.setattr(worker.server.capture.engine, "_pins", SamplingPins(max_tokens=400))
    request = {"model": "policy", "messages": [USER], "stream": stream, "ignore_eos": True}
    sent = asyncio.create_task(agent.http.post(agent.path, json=request, headers=agent.headers(admission)))
    deadline = asyncio.get_running_loop().time() + 10
    while not worker.tap.sampled[admission.model_call_id]:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)
    sent.cancel()
    await asyncio.wait([sent])
    await agent.http.aclose()
    again = Agent(worker.server, agent.rollout_id)
    outcome = await again.outcome(admission.model_call_id)
    assert outcome["coords"]["disposition"] == "staged"
    again.remember(admission, outcome)
    (row,) = await worker.rows(again, admission.model_call_id)
    assert row.extras["finish_reason"] == "abort"
    sampled = row.token_ids_delta[row.token_mask_delta == 1].astype(int).tolist()
    assert sampled == worker.tap.sampled[admission.model_call_id][: len(sampled)]


async def test_a_seeded_call_samples_the_same_again_in_another_run(worker: Worker, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker.server.capture.engine, "_pins", SamplingPins(max_tokens=MAX_TOKENS, seed=3))

    async def sampled(rollout_id: str) -> tuple[list[int], int]:
        agent = Agent(worker.server, rollout_id)
        call_id, _, _ = await agent.call([USER])
        (row,) = await worker.rows(agent, call_id)
        return row.token_ids_delta.tolist(), row.extras["sampling"]["seed"]

    first = await sampled("run.9.0.0")
    await sampled("run.9.2.0")  # moves the engine's own generator
    assert await sampled("another.run.9.0.0") == first
    assert (await sampled("run.9.1.0"))[1] != first[1] != (await sampled("run.9.0.1"))[1]


def other_weights(model: Path, folder: Path) -> Path:
    """A copy of the model with every weight changed, tied output head included."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(7)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        changed = {
            name: (value.float() + 0.3 * torch.randn(value.shape, generator=generator) * value.float().std()).to(
                value.dtype
            )
            for name, value in weights.items()
        }
        save_file(changed, path, metadata={"format": "pt"})
    return folder


async def test_new_weights_reach_the_packed_output_head_too(worker: Worker, tmp_path: Path) -> None:
    """Scored log-probs follow the new weights; without packing the head again they are those of a mixed model."""
    server = worker.server
    assert json.loads((worker.model / "config.json").read_text())["tie_word_embeddings"] is True
    text = "The capital of France is Paris, and 1 + 1 = 2."
    ids = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    before = np.array((await server.score([ids]))[0])
    assert np.abs(before - reference_logprobs(worker.model, ids)).max() <= 1e-4
    new = other_weights(worker.model, tmp_path / "new")
    expected = reference_logprobs(new, ids)
    assert np.abs(before - expected).mean() > 0.05, "the other weights must be told apart"

    await server.engine.collective_rpc("workbench_reload", args=(str(new), False))
    mixed = np.array((await server.score([ids]))[0])
    assert np.abs(mixed - expected).mean() > 0.02, "vLLM now packs the head itself: the cure can go"

    timings = await server.update_weights(str(new), 1)
    assert timings["repacked"] >= 1
    assert np.abs(np.array((await server.score([ids]))[0]) - expected).max() <= 1e-4
    agent = Agent(server, "run.6.0.0")
    _, _, outcome = await agent.call([USER])
    assert outcome["coords"]["weight_version"] == 1

    with pytest.raises(WeightSyncError, match="versions only grow"):
        await server.update_weights(str(new), 1)
    with pytest.raises(WeightSyncError, match="No weights at"):
        await server.update_weights(str(tmp_path / "nothing"), 2)
    assert server.weight_version() == 1
    await server.update_weights(str(worker.model), 2)
    assert np.array((await server.score([ids]))[0]).tolist() == before.tolist(), "going back is exact"


async def test_calls_that_straddle_a_weight_update_say_which_tokens_came_from_which(
    worker: Worker, monkeypatch: Any, tmp_path: Path
) -> None:
    """A sync during ten live calls: before and after each boundary log-probs are those of the weights of that span."""
    server = worker.server
    monkeypatch.setattr(server.capture.engine, "_pins", SamplingPins(max_tokens=160))
    old, new = server.weight_version(), server.weight_version() + 1
    folder = other_weights(worker.model, tmp_path / "new")
    agent = Agent(server, "run.7.0.0")
    admissions = [agent.admission() for _ in range(10)]
    bodies = [
        {"model": "policy", "messages": [{"role": "user", "content": f"{i}?"}], "ignore_eos": True, "max_tokens": limit}
        for i, limit in enumerate([160] * 8 + [1, 60])
    ]
    bodies[7]["stream"] = True
    posts = [
        asyncio.create_task(agent.http.post(agent.path, json=body, headers=agent.headers(admission)))
        for body, admission in zip(bodies, admissions, strict=True)
    ]
    deadline = asyncio.get_running_loop().time() + 60
    while min(len(worker.tap.sampled[admission.model_call_id]) for admission in admissions[:8]) < 5:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)
    timings = await server.update_weights(str(folder), new, hold=True, straddle=True)
    assert timings["straddling"] >= 8
    late = asyncio.create_task(agent.call([USER], max_tokens=4))
    text = server.tokenizer("The proof runs while calls wait.", add_special_tokens=False)["input_ids"]
    proof = np.array((await server.score([text]))[0])
    assert np.abs(proof - reference_logprobs(folder, text)).max() <= 1e-4
    staged = {key.rpartition("/")[2] for key in worker.sink.rows}
    assert not any(posts[i].done() or admissions[i].model_call_id in staged for i in range(8)), "held until proved"
    server.resume()
    assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 10
    assert (await late)[2]["coords"]["weight_version"] == new

    boundaries, others = [], []
    for admission in admissions:
        agent.remember(admission, await agent.outcome(admission.model_call_id))
        (row,) = await worker.rows(agent, admission.model_call_id)
        await worker.check_chain(agent, admission.model_call_id)
        assert row.weight_version == old
        ids, sampled = row.token_ids_delta.astype(int).tolist(), int(row.token_mask_delta.sum())
        spans = row.extras.get("weight_spans", [[0, sampled, old]])
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])] and spans[-1][1] == sampled
        recorded = row.generation_log_probs_delta[-sampled:]
        off_T = {
            version: np.abs(recorded - reference_logprobs(model, ids)[-sampled:])
            for version, model in ((old, worker.model), (new, folder))
        }
        for start, end, version in spans:
            assert off_T[version][start:end].max() <= 2e-4, (start, end, version)
            others.append(off_T[old + new - version][start:end].max())
        if len(spans) == 2:
            assert [span[2] for span in spans] == [old, new]
            boundaries.append(spans[0][1])
    assert len(boundaries) >= 8 and min(boundaries) >= 5, boundaries
    # Not of each: where the model repeats itself, both weights are equally sure.
    assert np.median(others) > 0.01, "the other weights differ"
    await server.update_weights(str(worker.model), new + 1)


async def test_nobody_without_the_token_reaches_the_engine(worker: Worker) -> None:
    async with httpx.AsyncClient(base_url=worker.server.url) as http:
        answer = await http.post("/v1/chat/completions", json={"model": "policy", "messages": [USER]})
        assert answer.status_code == 401
        assert (await http.get("/health")).status_code == 200
