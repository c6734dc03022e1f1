"""A whole worker with a scripted engine: what is staged, what is served, and what each fault becomes.

Long because each fault, streamed or not, is played through the same worker: the list of them is what this file is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from capture.scripted_worker import (
    DEADLINE_S,
    NEXT,
    USER,
    Agent,
    joined,
    rows_of,
    said,
    serving,
    text_of,
    until,
    write_script,
)
from capture.templates import tokenizer

from workbench.capture.staging import MemorySink
from workbench.capture.transport import TaggedCall, current_call
from workbench.errors import CallRefused, CaptureError, ComponentDied, ProbeFailed, SetupError
from workbench.serving.scripted import ScriptedParams, ScriptLine
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import Cause, StagedCall


async def test_row_keeps_the_sampled_pieces_of_a_word(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """TRL #5224: the policy samples `he`,`llo`, whose text encodes as other ids; the child's prompt begins with those.

    verl #6921, miles #784: the template's line break after the turn is carried; a sampled stop token stands once.
    """
    words = tokenizer("chatml")
    pieces = [words.convert_tokens_to_ids(piece) for piece in ("h", "e", "l", "l", "o")]
    assert words("hello", add_special_tokens=False)["input_ids"] != pieces
    script = write_script(tmp_path, {"token_ids": [*pieces, words.eos_token_id]}, {"text": "bye"})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        first, response, _ = await agent.call([USER])
        assert text_of(response) == "hello"
        second, _, _ = await agent.call([USER, said("hello"), NEXT], first)
        rows = await rows_of(sink, agent, second)
        parent = rows[0].token_ids_delta.tolist()
        assert parent[-6:] == [*pieces, words.eos_token_id]
        assert joined(rows, "token_ids_delta")[: len(parent)] == parent
        # The stop token that was sampled is the template's end of turn too: once, mask 1, with its own log-prob. The
        # newline that the template writes after it opens the child's delta, mask 0.
        assert rows[0].token_mask_delta[-1] == 1.0
        assert rows[0].generation_log_probs_delta[-1] == pytest.approx(-0.5)
        assert words.decode(rows[1].token_ids_delta[rows[1].token_mask_delta == 0].astype(int)) == (
            "\n<|im_start|>user\nsay hello<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_streamed_and_whole_responses_stage_the_same(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France is Paris."})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        whole, response, _ = await agent.call([USER])
        streamed, frames, _ = await agent.call([USER], stream=True)
        assert text_of(response) == text_of(frames)
        assert frames["frames"] >= 3
        (one,), (two,) = await rows_of(sink, agent, whole), await rows_of(sink, agent, streamed)
        assert one.chain_hash == two.chain_hash
        assert one.extras == two.extras
        assert one.generation_log_probs_delta.tolist() == two.generation_log_probs_delta.tolist()


async def test_length_cut_and_stop_string_are_recorded_with_all_ids(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """vLLM #47616: a stop string is cut from the text, and from nothing else; where it stopped is recorded."""
    words = tokenizer("chatml")
    script = write_script(tmp_path, {"text": "The capital of France is Paris."})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        cut, response, _ = await agent.call([USER], max_tokens=3)
        (row,) = await rows_of(sink, agent, cut)
        assert row.token_mask_delta.sum() == 3
        assert (row.extras["finish_reason"], row.extras["truncated"]) == ("length", True)
        child, _, _ = await agent.call([USER, said(text_of(response)), NEXT], cut)
        tail = (await rows_of(sink, agent, child))[1]
        assert (tail.token_ids_delta[0], tail.token_mask_delta[0]) == (words.eos_token_id, 0.0)

        stopped, response, _ = await agent.call([USER], stop=["France"])
        (row,) = await rows_of(sink, agent, stopped)
        assert text_of(response) == "The capital of "
        assert "France" in words.decode(row.token_ids_delta[row.token_mask_delta == 1].astype(int))
        assert (row.extras["stop_reason"], row.extras["truncated"]) == ("France", False)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("nan_logprob", Cause.NONFINITE_LOGPROB),
        ("few_logprobs", Cause.LOGPROB_COUNT_MISMATCH),
        ("no_logprobs", Cause.LOGPROB_COUNT_MISMATCH),
        ("no_ids", Cause.INVALID_STAGING_ROW),
        ("no_prompt_ids", Cause.INVALID_STAGING_ROW),
    ],
)
async def test_what_the_engine_leaves_out_is_a_typed_failure_and_the_agent_is_served(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, fault: str, cause: Cause
) -> None:
    """vLLM #28256 (no ids), vime #70 (too few log-probs), TRL #6166 (NaN): typed, and the probe stops at them too."""
    script = write_script(tmp_path, {"text": "Paris is the capital", "fault": fault, "at": 2})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        for stream in (False, True):
            _, response, outcome = await Agent(server, "run.0.0.0").call([USER], stream=stream)
            assert text_of(response) == "Paris is the capital"
            assert outcome["coords"]["disposition"] == "capture_failed"
            assert outcome["failure"]["cause"] == cause
        assert sink.rows == {}
        with pytest.raises(ProbeFailed, match=cause):
            await server.probe()


async def test_a_completion_that_the_engine_calls_an_error_is_none(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """vLLM ends a request so when its cache could not be loaded: whatever was sampled is no answer of the policy."""
    script = write_script(tmp_path, {"text": "Par", "finish_reason": "error"})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        _, _, outcome = await Agent(server, "run.0.0.0").call([USER])
    assert outcome["failure"]["cause"] == Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
    assert sink.rows == {}


async def test_engine_error_ends_the_call_without_coordinates_of_a_stage(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "Paris is the capital", "fault": "raise", "at": 1})
    async with serving(chatml_folder, script, monkeypatch) as (server, _):
        agent = Agent(server, "run.0.0.0")
        admission = agent.admission()
        answer = await agent.http.post(
            agent.path, json={"model": "policy", "messages": [USER]}, headers=agent.headers(admission)
        )
        assert answer.status_code == 500
        outcome = await agent.outcome(admission.model_call_id)
        assert outcome["failure"]["cause"] == Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        assert server.capture.board.live_calls == 0


class SlowSink(MemorySink):
    """Holds every staging until told; may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def stage_async(self, call: StagedCall) -> None:
        self.asked.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.stage(call)


@pytest.mark.parametrize("stream", [False, True])
async def test_last_output_leaves_only_after_staging(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, stream: bool
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France is Paris."})
    sink = SlowSink()
    async with serving(chatml_folder, script, monkeypatch, sink=sink) as (server, _):
        agent = Agent(server, "run.0.0.0")
        admission = agent.admission()
        ends: list[str] = []

        async def read() -> None:
            # The response alone: asking for the outcome would wait for the sink whatever had left before.
            body = {"model": "policy", "messages": [USER], "stream": stream}
            async with agent.http.stream("POST", agent.path, json=body, headers=agent.headers(admission)) as answer:
                async for line in answer.aiter_lines():
                    if '"finish_reason":"stop"' in line:
                        ends.append(line)

        call = asyncio.create_task(read())
        await asyncio.wait_for(sink.asked.wait(), DEADLINE_S)
        # Time enough to answer, were it not held back.
        await asyncio.wait([call], timeout=0.3)
        assert (ends, call.done(), server.capture.board.live_calls) == ([], False, 1)
        sink.go.set()
        await asyncio.wait_for(call, DEADLINE_S)
        assert len(ends) == 1
        outcome = await agent.outcome(admission.model_call_id)
        assert outcome["coords"]["disposition"] == "staged"


async def test_failing_or_slow_sink_fails_the_capture_only(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "Paris."})
    sink = SlowSink()
    async with serving(chatml_folder, script, monkeypatch, sink=sink, sink_timeout_s=0.2) as (server, _):
        agent = Agent(server, "run.0.0.0")
        _, response, outcome = await agent.call([USER])
        assert text_of(response) == "Paris."
        assert outcome["failure"]["cause"] == Cause.SINK_TIMEOUT
        sink.go.set()
        sink.error = RuntimeError("disk full")
        _, response, outcome = await agent.call([USER])
        assert text_of(response) == "Paris."
        assert outcome["failure"]["cause"] == Cause.SINK_ERROR
        assert "disk full" in outcome["failure"]["detail"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reader_who_leaves_gets_the_call_staged_as_aborted(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, stream: bool
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France is Paris. " * 4, "delay_s": 20.0})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        admission = agent.admission()
        body = {"model": "policy", "messages": [USER], "stream": stream}
        request = asyncio.create_task(agent.http.post(agent.path, json=body, headers=agent.headers(admission)))
        await until(lambda: server.gate.running == 1)
        request.cancel()
        await asyncio.wait([request])
        await agent.http.aclose()
        agent = Agent(server, "run.0.0.0")
        outcome = await agent.outcome(admission.model_call_id)
        assert outcome["coords"]["disposition"] == "staged"
        (row,) = await sink.fetch([outcome["coords"]["staging_key"]])
        assert row.extras["finish_reason"] == "abort"
        await until(lambda: server.gate.running == 0)
        assert server.capture.board.live_calls == 0


@pytest.mark.parametrize(("cache_bytes", "hits", "fetches"), [(10_000, 3, 0), (0, 0, 3)])
async def test_a_prefix_comes_from_memory_or_from_storage_in_one_read(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, cache_bytes: int, hits: int, fetches: int
) -> None:
    script = write_script(tmp_path, {"text": "one"}, {"text": "two"}, {"text": "three"})
    async with serving(chatml_folder, script, monkeypatch, cache_bytes=cache_bytes) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        messages: list[dict[str, str]] = [USER]
        call_id = None
        for _ in range(3):
            call_id, response, outcome = await agent.call(messages, call_id)
            assert outcome["failure"] is None
            messages = [*messages, said(text_of(response)), NEXT]
        child, _, outcome = await agent.call(messages, call_id)
        assert outcome["failure"] is None
        assert (server.capture.prefixes.hits, server.capture.prefixes.fetches, sink.reads) == (hits, fetches, fetches)
        rows = await rows_of(sink, agent, child)
        assert joined(rows[:-1], "token_ids_delta") == joined(rows, "token_ids_delta")[: rows[-1].prev_len]
        assert (await agent.http.get("/workbench/status")).json()["prefix_fetches"] == fetches


async def test_memory_for_prefixes_is_bounded(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    script = write_script(tmp_path, {"text": "one"})
    async with serving(chatml_folder, script, monkeypatch, cache_bytes=400) as (server, _):
        agent = Agent(server, "run.0.0.0")
        for _ in range(8):
            await agent.call([USER])
        assert 0 < server.capture.prefixes.bytes_held <= 400


async def test_prefix_that_cannot_be_had_is_a_typed_failure_and_the_agent_is_served(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Gym #1545, NeMo RL #3763: a prefix that was lost on the way, or is another one."""
    script = write_script(tmp_path, {"text": "one"})
    async with serving(chatml_folder, script, monkeypatch, cache_bytes=0) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        first, _, _ = await agent.call([USER])
        await agent.call([USER], None)
        # Another rollout's deltas under the right keys do not hash to the chain that the admission names.
        stranger = Agent(server, "run.0.0.0")
        stranger.coords[first] = agent.coords[first] | {"chain_hash": "f" * 64}
        stranger.chains[first] = agent.chains[first]
        _, response, outcome = await stranger.call([USER, said("one"), NEXT], first)
        assert text_of(response) == "one"
        assert outcome["failure"]["cause"] == Cause.PREFIX_MISMATCH
        await sink.clear(agent.chains[first])
        _, response, outcome = await agent.call([USER, said("one"), NEXT], first)
        assert text_of(response) == "one"
        assert outcome["failure"]["cause"] == Cause.MISSING_STAGING_ROW
        assert outcome["coords"]["cum_len"] == agent.coords[first]["cum_len"]


async def test_turn_that_the_template_does_not_render_is_a_splice_failure(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "one"})
    async with serving(chatml_folder, script, monkeypatch) as (server, _):
        agent = Agent(server, "run.0.0.0")
        first, _, _ = await agent.call([USER])
        _, response, outcome = await agent.call([USER, NEXT], first)
        assert text_of(response) == "one"
        assert outcome["failure"]["cause"] == Cause.SPLICE_BOUNDARY


async def test_sampling_of_a_captured_call_is_the_recipes(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """TRL #4159: what the log-probs were sampled with is pinned and recorded."""
    script = write_script(tmp_path, {"text": "one"})
    pins = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 40}
    async with serving(chatml_folder, script, monkeypatch, sampling=pins) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        call_id, _, _ = await agent.call([USER], temperature=0.2, top_p=0.9, presence_penalty=1.5, max_tokens=500)
        (row,) = await rows_of(sink, agent, call_id)
        sampling = row.extras["sampling"]
        assert (sampling["temperature"], sampling["top_p"], sampling["presence_penalty"]) == (0.7, 0.9, 0.0)
        assert sampling["max_tokens"] == 40
        status = (await agent.http.get("/workbench/status")).json()
        assert status["sampling_overrides"] == {"temperature": 1, "presence_penalty": 1}


async def test_untagged_calls_are_served_and_not_staged(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    script = write_script(tmp_path, {"text": "one"})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        answer = await agent.http.post(agent.path, json={"model": "policy", "messages": [USER]})
        assert text_of(answer.json()) == "one"
        assert sink.rows == {}


async def test_prompt_beyond_the_window_is_a_client_error_without_coordinates(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Trinity-RFT #608: a prompt over the window by one is refused; nothing is invented."""
    script = write_script(tmp_path, {"text": "one"})
    async with serving(chatml_folder, script, monkeypatch, max_model_len=32) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        admission = agent.admission()
        long = {"role": "user", "content": "hello there " * 30}
        answer = await agent.http.post(
            agent.path, json={"model": "policy", "messages": [long]}, headers=agent.headers(admission)
        )
        assert answer.status_code == 400
        assert "maximum context length" in answer.json()["error"]["message"]
        assert await agent.outcome(admission.model_call_id) is None
        assert (sink.rows, server.capture.board.live_calls) == ({}, 0)


async def test_a_call_with_less_room_than_it_asked_for_is_cut_at_the_window(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """tinker-cookbook #506: prompt + max_tokens is over the window; the answer is cut by length and stays captured."""
    script = write_script(tmp_path, {"text": "The capital of France is Paris. " * 9})
    async with serving(chatml_folder, script, monkeypatch, max_model_len=64) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        call, response, _ = await agent.call([USER], max_tokens=60)
        assert response["choices"][0]["finish_reason"] == "length"
        (row,) = await rows_of(sink, agent, call)
        assert (row.cum_len, row.extras["truncated"]) == (64, True)


async def test_probe_proves_this_engine_and_leaves_nothing_behind(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France is Paris."})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        found = await server.probe()
        assert found["prefix_stable"] is True
        assert found["renders_tools"] is False  # SmolLM2's template leaves them out
        assert found["equals_plain_rendering"] is True
        assert sink.rows == {}


async def test_probe_stops_a_begin_token_that_stands_twice(tmp_path: Path, monkeypatch: Any) -> None:
    """TRL #3853, vLLM #16976: template and tokenizer both write it."""
    words = tokenizer("llama3")
    folder = tmp_path / "model"
    words.save_pretrained(folder)
    template = words.chat_template
    (folder / "chat_template.jinja").write_text("{{ '<|begin_of_text|>' }}" + template)
    script = write_script(tmp_path, {"text": "The capital of France is Paris."})
    async with serving(folder, script, monkeypatch) as (server, _):
        with pytest.raises(ProbeFailed, match="2 begin-of-sequence tokens"):
            await server.probe()


async def test_worker_refuses_to_start_without_its_token(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:

    monkeypatch.delenv("WORKBENCH_WORKER_TOKEN", raising=False)
    config = WorkerConfig(model_path=str(chatml_folder), engine="scripted", script_path="unused")
    with pytest.raises(SetupError, match="WORKBENCH_WORKER_TOKEN"):
        await PolicyServer(config, MemorySink(), None).start()


async def test_one_admission_is_one_generation_of_one_completion(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """What a dialect makes of one request is the dialect's; a second completion would have no call of its own."""
    async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch) as (server, _):
        call = TaggedCall(Agent(server, "run.0.0.0").admission())
        token = current_call.set(call)
        try:
            with pytest.raises(CallRefused, match="n=2; only n=1"):
                server.capture.engine.generate({}, ScriptedParams(ScriptLine(text="x"), 8, n=2), "r")
            call.taken = True
            with pytest.raises(CallRefused, match="a second generation"):
                server.capture.engine.generate({}, ScriptedParams(ScriptLine(text="x"), 8), "r")
        finally:
            current_call.reset(token)


async def test_an_engine_without_a_last_output_is_a_failure_of_its_call(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch) as (server, sink):

        async def generate(*_: Any, **__: Any) -> Any:
            for output in ():
                yield output

        monkeypatch.setattr(server.engine, "generate", generate)
        agent = Agent(server, "run.0.0.0")
        admission = agent.admission()
        body = {"model": "policy", "messages": [USER]}
        answer = await agent.http.post(agent.path, json=body, headers=agent.headers(admission))
        assert answer.status_code == 500
        outcome = await agent.outcome(admission.model_call_id)
        assert outcome["failure"]["cause"] == Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        assert "no completion" in outcome["failure"]["detail"] and sink.rows == {}


async def left_alone(server: PolicyServer, waiting: Any) -> str:
    """One call whose reader leaves once `waiting()` holds; returns its id."""
    agent = Agent(server, "run.0.0.0")
    admission = agent.admission()
    body = {"model": "policy", "messages": [USER]}
    request = asyncio.create_task(agent.http.post(agent.path, json=body, headers=agent.headers(admission)))
    await until(waiting)
    request.cancel()
    await asyncio.wait([request])
    await agent.http.aclose()
    return admission.model_call_id


async def test_a_call_whose_reader_left_before_its_turn_is_never_sampled(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch) as (server, sink):
        await server.update_weights("unused", 1, hold=True)
        call_id = await left_alone(server, lambda: server.capture.board.live_calls == 1)
        await until(lambda: all(call.abandoned for call in server.capture.board._live.values()))
        server.resume()
        await server.capture.engine.drain(DEADLINE_S)
        assert (sink.rows, server.capture.board.live_calls) == ({}, 0)
        assert await Agent(server, "run.0.0.0").outcome(call_id) is None


@pytest.mark.parametrize("stuck", ["engine", "sink", "abort"])
async def test_an_abandoned_call_that_does_not_end_is_given_up_with_its_cause(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, stuck: str
) -> None:
    monkeypatch.setattr("workbench.capture.engine.ABORT_TIMEOUT_S", 0.3)
    script = write_script(tmp_path, {"text": "Paris.", "delay_s": 0.0 if stuck == "sink" else 60.0})
    sink = SlowSink()
    async with serving(chatml_folder, script, monkeypatch, sink=sink, sink_timeout_s=60.0) as (server, _):

        async def deaf(call_id: str) -> None:
            if stuck == "abort":
                await asyncio.Event().wait()

        monkeypatch.setattr(server.engine, "abort", deaf)
        waiting = sink.asked.is_set if stuck == "sink" else lambda: server.gate.running == 1
        call_id = await left_alone(server, waiting)
        await server.capture.engine.drain(DEADLINE_S)
        outcome = await Agent(server, "run.0.0.0").outcome(call_id)
        assert outcome["coords"]["disposition"] == "capture_failed"
        assert outcome["failure"]["cause"] == Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        assert (sink.rows, server.gate.running) == ({}, 0)


async def test_what_a_worker_cannot_start_with_is_said_before_it_does(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORKBENCH_WORKER_TOKEN", "t")
    config = WorkerConfig(model_path=str(chatml_folder), engine="scripted")
    with pytest.raises(SetupError, match="needs a sink to stage calls in"):
        PolicyServer(config)
    with pytest.raises(SetupError, match=r"needs a script: set engine\.script_path"):
        await PolicyServer(config, MemorySink(), None).start()
    script = write_script(tmp_path, {"text": "Paris."})
    async with serving(chatml_folder, script, monkeypatch) as (server, _):
        taken = config.model_copy(update={"script_path": str(script), "port": int(server.url.rsplit(":", 1)[1])})
        with pytest.raises(SetupError, match=r"cannot listen on .*: Address already in use. Next: set engine\.port=0"):
            await PolicyServer(taken, MemorySink(), None).start()
        with pytest.raises(CaptureError, match="has no model, so it cannot score"):
            await server.score([[1, 2]])
        assert (await Agent(server, "run.0.0.0").http.get("/health")).status_code == 200


@pytest.mark.parametrize("parser", ["httptools_impl:HttpToolsProtocol", "h11_impl:H11Protocol"])
async def test_an_admission_grows_with_its_chain_and_the_server_takes_it_with_either_parser(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, parser: str
) -> None:
    """uvicorn falls back to h11 where httptools is not installed; by itself it then takes 64 KiB of headers."""
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", f"uvicorn.protocols.http.{parser}")
    async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch) as (server, _):
        agent = Agent(server, "run.0.0.0")
        keys = [f"run.0.0.0/{number:032x}" for number in range(20_000)]
        admission = agent.admission().model_copy(update={"staging_chain": keys})
        assert len(admission.to_header()) > 1_000_000
        answer = await agent.http.post(agent.path, json={}, headers=agent.headers(admission))
        assert (answer.status_code, "it takes no parent, prefix or chain" in answer.text) == (400, True), answer.text


async def test_a_server_that_ends_before_it_listens_is_an_error_and_no_wait(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async def ends(self: Any, sockets: Any) -> None: ...

    monkeypatch.setattr("uvicorn.Server.serve", ends)
    with pytest.raises(ComponentDied, match="ended before it listened"):
        async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch):
            pass


async def test_without_capture_there_is_nothing_to_probe(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    script = write_script(tmp_path, {"text": "Paris."})
    async with serving(chatml_folder, script, monkeypatch, capture_enabled=False) as (server, _):
        assert await server.probe() == {"capture_enabled": False}


async def test_an_error_in_the_middle_of_a_stream_is_its_last_word(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "Paris is the capital", "fault": "raise", "at": 2})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        agent = Agent(server, "run.0.0.0")
        body = {"model": "policy", "messages": [USER], "stream": True}
        answer = await agent.http.post(agent.path, json=body, headers=agent.headers(agent.admission()))
        assert '"error":{"message":' in answer.text and sink.rows == {}


async def test_what_the_engine_refuses_is_a_client_error(chatml_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    async with serving(chatml_folder, write_script(tmp_path, {"text": "Paris."}), monkeypatch) as (server, _):

        def refuses(*_: Any, **__: Any) -> Any:
            raise CallRefused("one admission is one completion")

        monkeypatch.setattr(server.capture.engine, "generate", refuses)
        agent = Agent(server, "run.0.0.0")
        body = {"model": "policy", "messages": [USER]}
        answer = await agent.http.post(agent.path, json=body, headers=agent.headers(agent.admission()))
        assert (answer.status_code, "one completion" in answer.text) == (400, True)
