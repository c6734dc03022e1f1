"""Rare requests, answers and faults at the gateway's edges, each part by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import orjson
import pytest
from starlette.datastructures import Headers

from conftest import CONTROL, gateway_over, listening, until
from workbench.errors import (
    DeadlineExceeded,
    FingerprintError,
    GatewayError,
    LedgerConflict,
    LedgerCorrupt,
    LedgerError,
    RolloutFrozen,
    SetupError,
)
from workbench.gateway import metrics
from workbench.gateway.answers import answer_files
from workbench.gateway.app import SAMPLES_NOTHING
from workbench.gateway.asked import Asked
from workbench.gateway.client import ControlClient
from workbench.gateway.control import _from_this_machine
from workbench.gateway.custody import Custodian
from workbench.gateway.dialects import DIALECTS
from workbench.gateway.histories import Histories, _same
from workbench.gateway.patience import patient
from workbench.gateway.process import GatewayProcess
from workbench.gateway.refusals import Refused, refusal_of
from workbench.gateway.replay import Answer, ReplayLog, ReplayLogs
from workbench.gateway.settings import CONTROL_TOKEN
from workbench.gateway.sse import encode, split
from workbench.gateway.upstream import Acknowledgement
from workbench.wire import Cause

CHAT, RESPONSES, MESSAGES = DIALECTS.values()


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        (CHAT, {"response_format": {"type": "text"}}, {}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"thinking": "disabled"}),
        (MESSAGES, {"thinking": {"type": "enabled"}}, {}),
        (RESPONSES, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, {}),
    ],
)
def test_what_changes_the_prompt_is_part_of_the_context_and_what_says_nothing_is_not(
    dialect: Any, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert dialect.prompt_options(body) == expected


def test_a_response_without_output_has_no_items_and_only_responses_are_named_later() -> None:
    assert RESPONSES.response_items({"output": None}) == []
    for dialect in (CHAT, MESSAGES):
        assert dialect.stored_input({"messages": []}) is None and dialect.stored_output({}) == []
        assert dialect.with_history({"model": "policy"}, None) == {"model": "policy"}


def test_instructions_in_blocks_and_between_turns_are_put_together() -> None:
    between = [{"role": "user", "content": "a"}, {"role": "system", "content": "be brief"}]
    texts = [
        MESSAGES.request_items({"system": system, "messages": between})[0]["content"]
        for system in ("You help.", [{"type": "text", "text": "You help."}])
    ]
    assert texts[0] == texts[1] and "You help." in texts[0] and "be brief" in texts[0]


def test_a_streamed_tool_call_that_was_cut_keeps_what_came_of_its_arguments() -> None:
    assembler = MESSAGES.assembler()
    started = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    for event in (
        {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": started},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"q": "Ro'}},
    ):
        (frame,) = split(b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n")
        assembler.feed(frame)
    assert assembler.served()["content"][0]["input"] == '{"q": "Ro'


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (LedgerError("no space left"), 500, "ledger_error"),
        (OSError(28, "No space left on device"), 500, "ledger_error"),
        (aiohttp.ServerDisconnectedError(), 502, "worker_unreachable"),
        (aiohttp.ClientOSError(104, "Connection reset by peer"), 502, "worker_unreachable"),
    ],
)
def test_a_fault_behind_the_gateway_has_its_code(error: Exception, status: int, code: str) -> None:
    refused = refusal_of(error)
    assert (refused.status, refused.code) == (status, code)
    assert str(Refused(400, "not like that")) == "not like that"


@pytest.mark.parametrize(
    ("client", "expected"),
    [(None, False), (("a name", 1), False), (("127.0.0.1", 1), True), (("::ffff:127.0.0.1", 1), True),
     (("10.0.0.9", 1), False), (("10.0.0.7", 1), True)],
)  # fmt: skip
def test_this_machine_is_who_comes_from_it(client: tuple[str, int] | None, expected: bool) -> None:
    host = None if client is None else SimpleNamespace(host=client[0])
    request: Any = SimpleNamespace(client=host, scope={"server": ("10.0.0.7", 80)})
    assert _from_this_machine(request) is expected


def test_items_without_a_fingerprint_equal_nothing() -> None:
    assert _same([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}])
    assert not _same([{"role": "user", "content": 5}], [{"role": "user", "content": 5}])


@pytest.mark.parametrize("line", [b'{"kind":"begun"}', b"[1]", b'{"kind":"answer","call":"c"}'])
def test_a_step_of_a_call_that_cannot_be_read_names_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r.replay.jsonl"
    begun = {"kind": "begun", "call": "c", "gateway": "g", "body": "b", "retry": False}
    path.write_bytes(orjson.dumps(begun) + b"\n" + line + b"\n")
    with pytest.raises(LedgerCorrupt, match=r"r\.replay\.jsonl, line 2: expected a step of a call"):
        ReplayLog(path).refresh()


def test_a_call_that_ended_twice_failed_once(tmp_path: Path) -> None:
    path = tmp_path / "r.replay.jsonl"
    begun = {"kind": "begun", "call": "c", "gateway": "g", "body": "b", "retry": False}
    steps = [begun, {"kind": "lost", "call": "c"}, {"kind": "ended", "call": "c"}]
    path.write_bytes(b"".join(orjson.dumps(step) + b"\n" for step in steps))
    log = ReplayLog(path)
    log.refresh()
    assert log._failed["b"] == 1 and log.state("c") == "lost"


def test_of_a_row_that_is_there_or_a_rollout_that_is_closed_nothing_is_written(tmp_path: Path) -> None:
    """Somebody settled the call, or closed the rollout, while its failure was on its way."""
    counted: dict[str, int] = defaultdict(int)

    class Counter:
        def __init__(self, name: str) -> None:
            self.name = name

        def labels(self, *_: str) -> Counter:
            return self

        def inc(self) -> None:
            counted[self.name] += 1

    custodian = object.__new__(Custodian)
    custodian._metrics = SimpleNamespace(failures=Counter("failures"), late=Counter("late"))  # type: ignore[assignment]
    call: Any = SimpleNamespace(rollout_id="r", model_call_id="c")
    for error in (RolloutFrozen("closed"), LedgerConflict("there")):

        def record_failure(*_: Any, error: Exception = error) -> None:
            raise error

        custodian.store = SimpleNamespace(record_failure=record_failure)  # type: ignore[assignment]
        custodian._write_failure(call, Cause.WORKER_CAPTURE_FAILED, None)
    assert counted == {"late": 1}


def test_a_process_of_somebody_else_is_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gauge_livesum_7.db").touch()
    buried: list[int] = []
    monkeypatch.setattr(metrics, "mark_process_dead", lambda pid, path: buried.append(pid))

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    metrics._forget_the_dead(tmp_path)
    assert buried == []


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (502, b"<html>proxy</html>", r"answered 502 \(<html>proxy"),
        (500, b'{"error": "odd"}', r"answered 500 \("),
        (200, b"<html>sign in</html>", r"answered 200 \(<html>sign in"),
        (200, b"[]", r"answered 200 \(\[\]"),
    ],
)
async def test_what_answers_in_the_gateways_place_is_quoted(status: int, body: bytes, says: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with listening(app) as url, ControlClient(url, CONTROL) as control:
        with pytest.raises(GatewayError, match=says):
            await control.freeze("r.0.0.0")


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_no_json_holds_is_not_sent_as_none(reward: float) -> None:
    async with ControlClient("http://127.0.0.1:1", CONTROL) as control:
        with pytest.raises(GatewayError, match=f"reward of rollout r.0.0.0 must be a finite number, got {reward}"):
            await control.seal("r.0.0.0", reward)


def test_the_retry_of_an_attempt_that_failed_gets_no_other_clients_answer(tmp_path: Path) -> None:
    """Two clients asked the same; the call of one failed, and that of the other is under way."""
    log = ReplayLog(tmp_path / "r.replay.jsonl")
    for call in ("a", "b"):
        assert log.claim(call, "g", None, "body", False, lambda known: True) is None
    log.ended("a")
    assert log.claim("c", "g", None, "body", True, lambda known: True) is None
    log.ended("c")
    log.delivered("b")
    assert log.claim("d", "g", None, "body", True, lambda known: True) is None
    repeated = log.claim("e", "g", None, "body", True, lambda known: True)
    assert repeated is not None
    assert repeated.call_id == "d", "no failure is left that it could mean, and one call whose answer nobody has"


def test_a_history_that_does_not_begin_with_the_one_before_is_stored_whole(tmp_path: Path) -> None:
    """What a response is said to continue is not taken for its beginning unheard."""
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    histories = Histories(tmp_path)
    histories.keep("r", "resp-1", None, told)
    for name, first in (("resp-2", "q"), ("resp-3", "another q")):
        items = [{"role": "user", "content": first}, *told[1:], {"role": "user", "content": "more"}]
        histories.keep("r", name, None, items, continues="resp-1")
        assert histories.items("r", name) == items


def test_a_cache_mark_among_what_the_model_wrote_as_arguments_is_kept() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t", "name": "set_header", "input": {**mark, "of": [mark]}, **mark}
    body = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [call]}]}
    (_, turn) = MESSAGES.request_items(body)
    del call["cache_control"]  # the mark on the block itself never reaches the prompt
    assert turn["content"] == [call]


def test_a_retry_count_of_any_length_is_read() -> None:
    body = {"messages": [{"role": "user", "content": "q"}]}
    for count, retry in (("1" * 5000, True), ("0" * 5000, False), ("-1", False), ("", False), ("02", True)):
        headers = Headers({"x-stainless-retry-count": count})
        assert Asked.of("r", CHAT, body, headers, None).retry is retry


async def test_a_gateway_that_does_not_answer_is_a_deadline() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    async with listening(app) as url, ControlClient(url, CONTROL, timeout_s=0.1) as control:
        with pytest.raises(DeadlineExceeded, match=r"No answer within 0\.1 s: freeze of rollout r\.0\.0\.0"):
            await control.freeze("r.0.0.0")


async def test_a_sweep_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_over("http://127.0.0.1:1", tmp_path / "ledger", answers_keep_s=0.05) as (_, gateway):
        swept: list[float] = []

        def sweep(idle_s: float) -> None:
            swept.append(idle_s)
            raise OSError("busy")

        monkeypatch.setattr(gateway.retries, "sweep", sweep)
        async with gateway._lifespan(gateway.app()):
            await until(lambda: len(swept) > 2, "it is swept again and again")


async def test_an_unreadable_log_keeps_its_own_answers_and_not_those_of_others(tmp_path: Path) -> None:
    async with gateway_over("http://127.0.0.1:1", tmp_path) as (_, gateway):
        for name in ("a", "b", "c"):
            (tmp_path / f"{name}.answers").write_bytes(b"served")
        first, *others = answer_files(tmp_path, 0.0)
        (tmp_path / f"{first}.replay.jsonl").write_bytes(b"no JSON\n")
        gateway.retries.sweep(0.0)
        assert answer_files(tmp_path, 0.0) == [first] and len(others) == 2


def test_answers_that_another_process_removes_meanwhile_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "there"):
        (tmp_path / f"{name}.answers").write_bytes(b"served")
    real = os.scandir

    @contextlib.contextmanager
    def scandir(directory: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(directory) as entries:
            listed = list(entries)
        (tmp_path / "gone.answers").unlink()
        yield iter(listed)

    monkeypatch.setattr("workbench.gateway.answers.os.scandir", scandir)
    assert answer_files(tmp_path, 0.0) == ["there"]


async def test_a_lost_call_that_is_served_while_others_are_buried_is_no_fault(tmp_path: Path) -> None:
    async with gateway_over("http://127.0.0.1:1", tmp_path) as (_, gateway):
        elsewhere = ReplayLog(tmp_path / "r.replay.jsonl")
        for call_id in ("running", "answered"):
            elsewhere.claim(call_id, "a gateway that is gone", None, call_id, False, lambda known: False)
        elsewhere.answered("answered", Answer("application/json", True, None, 0.0), b"{}")
        record_failure = gateway.custodian.store.record_failure

        def and_deliver(rollout_id: str, call_id: str, *reason: Any) -> None:
            record_failure(rollout_id, call_id, *reason)
            if call_id == "running":
                elsewhere.delivered("answered")

        gateway.custodian.store.record_failure = and_deliver  # type: ignore[method-assign]
        await gateway.retries.bury("r")
        assert not gateway.retries._logs.of("r").unsettled


async def test_a_call_that_is_settled_while_others_are_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own task settles a call on the event loop, whoever goes through the calls in a thread just then."""
    async with gateway_over("http://127.0.0.1:1", tmp_path) as (_, gateway):
        log = gateway.retries._logs.of("r")
        for call_id in ("a", "b", "c"):
            log.claim(call_id, "another gateway", None, call_id, False, lambda known: True)

        def alive(gateway_id: str) -> bool:
            log.settled("c")
            return True

        monkeypatch.setattr(gateway.retries._presence, "alive", alive)
        await gateway.retries.bury("r")
        assert list(log.unsettled) == ["a", "b"]


def test_a_sweep_pushes_no_log_out_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.gateway.replay.OPEN_LOGS", 1)
    logs = ReplayLogs(tmp_path)
    kept = logs.of("at.work")
    logs.fresh("old").forget()
    assert list(logs._recent.values()) == [kept]


def test_a_rollout_has_one_log_for_as_long_as_anybody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.gateway.replay.OPEN_LOGS", 1)
    logs = ReplayLogs(tmp_path)
    held = logs.of("held")
    assert [logs.of(name).rollout_id for name in ("b", "c")] == ["b", "c"]
    assert logs.of("held") is held and list(logs._recent) == ["held"]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_frames_end_at_their_own_blank_line(end: bytes) -> None:
    frames = [b"data: 1" + end, b": \r\n" + end, b"data: 2\n\n", b"data: 3\r\n\r\n"]
    cut = split(b"".join(frames) + b"data: 4")
    assert b"".join(frame.raw for frame in cut) == b"".join(frames)
    assert [frame.event for frame in cut if frame.event] == [1, 2, 3]


def test_cutting_a_stream_takes_time_by_its_length_and_not_by_its_square() -> None:
    frame = encode({"choices": [{"delta": {"content": "x" * 150}}]})

    class Counted(bytes):
        copied = 0

        def __getitem__(self, place: Any) -> Any:
            part = Counted(super().__getitem__(place))
            Counted.copied += len(part)
            return part

    assert len(split(Counted(frame * 500))) == 500
    assert Counted.copied == 500 * len(frame)


async def test_a_slow_reader_who_goes_on_reading_is_not_given_up() -> None:
    size = 2**24

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(16):
            await send({"type": "http.response.body", "body": b"x" * (size // 16), "more_body": True})
        await send({"type": "http.response.body"})

    async with listening(large, http=patient(30.0)) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        came = await asyncio.wait_for(reader.read(-1), 30.0)
        writer.close()
    assert came.count(b"x") >= size


def test_a_gateway_that_does_not_come_up_is_a_deadline_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CONTROL_TOKEN", CONTROL)
    monkeypatch.setenv("WORKBENCH_WORKER_TOKEN", "w")
    settings = {"ledger_dir": str(tmp_path), "worker_url": "http://127.0.0.1:1"}
    with pytest.raises(DeadlineExceeded, match=r"did not serve within 0\.001 s"):
        GatewayProcess.start(settings, start_timeout_s=0.001)


async def served(scope: Any, receive: Any, send: Any) -> None:
    """A worker that answers whatever it is asked, with the path that it was asked for."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": orjson.dumps({"path": scope["path"]})})


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_body_that_passes_and_does_not_end_is_given_up_at_the_deadline(tmp_path: Path, leaves: bool) -> None:
    left = asyncio.Event()

    async def dripping(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            continue
        left.set()

    deadline_s = 60.0 if leaves else 0.3
    async with (
        listening(dripping) as worker,
        gateway_over(worker, tmp_path, request_timeout_s=deadline_s, capture_enabled=False) as (url, _),
        httpx.AsyncClient(timeout=5.0) as http,
    ):
        with contextlib.nullcontext() if leaves else pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            async with http.stream("GET", url + "/v1/models") as answer:
                async for part in answer.aiter_raw():
                    assert part == b"data: 1\n\n"
                    if leaves:
                        break
        await asyncio.wait_for(left.wait(), 5.0)


async def test_a_worker_that_does_not_answer_what_passes_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        left.set()

    async with (
        listening(silent) as worker,
        gateway_over(worker, tmp_path, request_timeout_s=0.2, capture_enabled=False) as (url, _),
        httpx.AsyncClient() as http,
    ):
        for path in ("/v1/models", "/ng-rollout/r/v1/models"):
            told = await http.get(url + path)
            assert (told.status_code, told.json()["error"]["code"]) == (504, "worker_timeout")
        assert (await http.post(f"{url}/ng-rollout/r/v1/chat/completions", json={})).status_code == 504
        await asyncio.wait_for(left.wait(), 10.0)


async def test_what_samples_nothing_and_what_is_not_captured_passes_and_leaves_no_row(tmp_path: Path) -> None:
    async with listening(served) as worker, httpx.AsyncClient() as http:
        for captured, path in ((True, SAMPLES_NOTHING[0].strip("/")), (False, "v1/chat/completions")):
            ledger = tmp_path / str(captured)
            async with gateway_over(worker, ledger, capture_enabled=captured) as (url, _):
                answer = await http.post(f"{url}/ng-rollout/r.0.0.0/{path}", json={"model": "policy", "messages": []})
                assert answer.json() == {"path": f"/{path}"}, answer.text
            assert not list(ledger.glob("*.lineage.jsonl"))


async def test_a_gateway_that_is_stopping_says_so(tmp_path: Path) -> None:
    async with (
        listening(served) as worker,
        httpx.AsyncClient() as http,
        gateway_over(worker, tmp_path) as (url, gateway),
    ):
        await gateway.end_calls()
        answer = await http.post(f"{url}/ng-rollout/r.0.0.0/v1/chat/completions", json={"messages": []})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_stopping")


def test_a_response_that_cannot_be_fingerprinted_leaves_a_failure_row() -> None:
    custodian = object.__new__(Custodian)
    written: list[tuple[Any, ...]] = []

    def commit(*_: Any) -> None:
        raise FingerprintError("content must be text")

    custodian.__dict__ |= {
        "_why_not": lambda *_: None,
        "_commit": commit,
        "_write_failure": lambda call, *failed: written.append(failed),
        "_note": lambda *_: None,
    }
    coords = {"rollout_id": "r", "model_call_id": "c", "prev_len": 0, "delta_len": 0, "cum_len": 0,
              "weight_version": 0, "disposition": "capture_failed"}  # fmt: skip
    call: Any = None
    custodian._write(call, {}, [], Acknowledgement(coords))
    assert written == [(Cause.WORKER_CAPTURE_FAILED, "response has no fingerprint: content must be text")]


def test_a_gateway_process_that_is_told_nonsense_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = subprocess.run(
            [sys.executable, "-m", "workbench.gateway", str(listener.fileno())],
            input=b"{\n",
            capture_output=True,
            pass_fds=(listener.fileno(),),
            env={**os.environ, CONTROL_TOKEN: CONTROL},
            timeout=60,
            check=False,
        )
    assert done.returncode == SetupError.exit_code, done.stderr
    assert b"expected the settings as one JSON line on stdin" in done.stderr
