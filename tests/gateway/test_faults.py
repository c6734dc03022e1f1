"""What becomes of a call when the worker breaks in every way that HTTP allows: a row, a reason, an answer in time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from conftest import CONTROL, gateway_over, listening, until
from workbench.errors import LedgerCorrupt
from workbench.gateway.client import ControlClient
from workbench.wire import CaptureAdmission, hash_token_ids, staging_key

ASK = {"model": "policy", "messages": [{"role": "user", "content": "say something"}]}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
}
RESPONSE = {
    "object": "response",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}],
}
DIGEST = hash_token_ids([1, 2, 3])


class Worker:
    """A worker that answers as it is told. `coords` makes the acknowledgement from the admission that came, `header`
    what it says with its answer."""

    def __init__(
        self,
        answer: Callable[[], Response],
        coords: Callable[[CaptureAdmission], Any] | None = None,
        header: Callable[[CaptureAdmission], bytes] | None = None,
    ) -> None:
        self._answer = answer
        self._coords = coords
        self._header = header
        self.admissions: dict[str, CaptureAdmission] = {}
        self.headers: dict[str, str] = {}
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._complete, methods=["POST"]),
                Route("/workbench/capture/{call}", self._acknowledge),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        self.headers = dict(request.headers)
        answer = self._answer()
        if "x-workbench-admission" not in request.headers:
            return answer  # of a call that was not resolved
        admission = CaptureAdmission.from_header(request.headers["x-workbench-admission"])
        self.admissions[admission.model_call_id] = admission
        if self._header is not None:
            answer.headers["x-workbench-captured"] = self._header(admission).decode()
        return answer

    async def _acknowledge(self, request: Request) -> Response:
        admission = self.admissions[request.path_params["call"]]
        if self._coords is None:
            return Response(status_code=404)
        return JSONResponse({"coords": self._coords(admission), "failure": None})


def staged(admission: CaptureAdmission, **changed: Any) -> dict[str, Any]:
    return {
        "rollout_id": admission.rollout_id,
        "model_call_id": admission.model_call_id,
        "parent_call_id": admission.parent_call_id,
        "prev_len": admission.prev_len,
        "delta_len": 3,
        "cum_len": admission.prev_len + 3,
        "weight_version": 0,
        "disposition": "staged",
        "digest": DIGEST,
        "extras_digest": DIGEST,
        "staging_key": staging_key(admission.rollout_id, admission.model_call_id),
        "chain_hash": DIGEST,
        "cumulative_hash": DIGEST,
    } | changed


def chunk(content: str | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "choices": [choice]}) + b"\n\n"


def stream_of(*frames: bytes, breaks: bool = False) -> Callable[[], Response]:
    async def body() -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame
        if breaks:
            raise RuntimeError("the worker dies here")

    return lambda: StreamingResponse(body(), media_type="text/event-stream")


@contextlib.asynccontextmanager
async def asking(worker: Worker, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        listening(worker.app) as worker_url,
        gateway_over(worker_url, tmp_path, **{"coords_timeout_s": 1.0, **settings}) as (url, gateway),
        httpx.AsyncClient(verify=False, timeout=20.0) as http,
    ):

        async def ask(**body: Any) -> httpx.Response:
            return await http.post(f"{url}/ng-rollout/r/v1/chat/completions", json=ASK | body)

        yield ask, gateway.custodian.store


def told(coords: Callable[[CaptureAdmission], Any]) -> Callable[[CaptureAdmission], bytes]:
    return lambda admission: orjson.dumps({"coords": coords(admission), "failure": None})


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "told with the answer"])
@pytest.mark.parametrize(
    ("coords", "reason"),
    [
        (None, "worker_response_missing_commit_coordinates"),
        (lambda a: None, "worker_response_missing_commit_coordinates"),
        (lambda a: staged(a, rollout_id="other"), "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, model_call_id="other"), "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, prev_len=4, cum_len=7, parent_call_id="x"), "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, cum_len=9), "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, staging_key="r/other"), "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, digest="abc"), "invalid_worker_commit_coordinates"),
        (lambda a: "nonsense", "invalid_worker_commit_coordinates"),
        (lambda a: staged(a, chain_hash=None), "ledger_row_missing_chain_hash"),
    ],
)
async def test_an_acknowledgement_that_does_not_fit_gives_no_row(
    coords: Any, reason: str, asked: bool, tmp_path: Path
) -> None:
    if asked or coords is None:
        worker = Worker(lambda: JSONResponse(ANSWER), coords)
    else:  # what would be answered if it were asked for does not count
        worker = Worker(lambda: JSONResponse(ANSWER), staged, told(coords))
    async with asking(worker, tmp_path) as (ask, store):
        answer = await ask()
        assert (answer.status_code, answer.json()) == (200, ANSWER)
        manifest = store.manifest("r")
    assert manifest.records == []
    assert [failure.reason for failure in manifest.failures] == [reason]


@pytest.mark.parametrize("header", [b"nonsense", b"[]", b"", b'{"coords": {"rollout_id"'])
async def test_coordinates_that_cannot_be_read_are_asked_for(header: bytes, tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse(ANSWER), staged, lambda _: header)
    async with asking(worker, tmp_path) as (ask, store):
        answer = await ask()
        (record,) = store.manifest("r").records
    assert answer.status_code == 200
    assert "x-workbench-captured" not in answer.headers, "it is for the gateway alone"
    assert record.chain_hash == DIGEST


async def test_an_answer_that_is_sent_whole_takes_one_exchange(tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse(ANSWER), None, told(staged))
    async with asking(worker, tmp_path) as (ask, store):
        await ask()
        (record,) = store.manifest("r").records
    assert record.chain_hash == DIGEST


async def test_a_served_object_without_an_id_gives_no_row(tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse({**ANSWER, "id": ""}), staged)
    async with asking(worker, tmp_path) as (ask, store):
        assert (await ask()).status_code == 200
        assert [failure.reason for failure in store.manifest("r").failures] == ["ledger_row_missing_response_id"]


@pytest.mark.parametrize(
    ("arguments", "in_custody"),
    [
        ('{"n": 1e30}', True),
        # The wire's fingerprint has no spelling for these, so the call is not captured.
        ('{"n": 123456789012345678901234567890}', False),
        ("[" * 300 + "]" * 300, False),
        ("[" * 900 + "]" * 900, False),
    ],
    ids=["a float beyond 64 bits", "an int beyond 64 bits", "nested deeply", "nested more deeply"],
)
async def test_an_agent_is_served_whatever_the_model_wrote_as_arguments(
    arguments: str, in_custody: bool, tmp_path: Path
) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "count", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    served = ANSWER | {"choices": [{"index": 0, "message": turn, "finish_reason": "tool_calls"}]}
    worker = Worker(lambda: JSONResponse(served), staged)
    async with asking(worker, tmp_path) as (ask, store):
        answer = await ask()
        assert (answer.status_code, answer.json()) == (200, served)
        edited = [*ASK["messages"], turn | {"content": "edited"}, {"role": "user", "content": "go on"}]
        again = await ask(messages=edited)
        manifest = store.manifest("r")
    assert len(manifest.records) == in_custody
    if in_custody:
        assert again.status_code == 200, "unresolved, and served"
        assert [failure.reason for failure in manifest.failures] == ["unresolved_parent"]
    else:
        assert [failure.reason for failure in manifest.failures] == ["worker_capture_failed"]
        assert again.status_code == 400, "a history without a fingerprint is refused before it is generated"


async def test_an_agents_request_id_is_not_forwarded(tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse(ANSWER), staged)
    async with (
        listening(worker.app) as worker_url,
        gateway_over(worker_url, tmp_path) as (url, gateway),
        httpx.AsyncClient(verify=False, headers={"x-request-id": "chosen-by-the-agent", "x-other": "1"}) as http,
    ):
        await http.post(f"{url}/ng-rollout/r/v1/chat/completions", json=ASK)
        (record,) = gateway.custodian.store.manifest("r").records
    assert worker.headers["x-request-id"] == record.model_call_id
    assert "x-other" not in worker.headers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stream_of(chunk("ye"), chunk("s")), "worker_capture_failed"),
        (stream_of(chunk("ye"), breaks=True), "worker_capture_failed"),
        (stream_of(chunk("ye"), b'data: {"error": {"message": "boom"}}\n\n'), "worker_capture_failed"),
        (stream_of(chunk("ye"), b'data: {"choices": [{"delta": {"tool_calls": [3]}}]}\n\n'), "worker_capture_failed"),
        (stream_of(), "request_finished_without_staged_coordinates"),
        (stream_of(b'data: {"error": {"message": "boom"}}\n\n'), "request_finished_without_staged_coordinates"),
        (stream_of(chunk(None, "stop")[:-2]), "request_finished_without_staged_coordinates"),
    ],
)
async def test_a_broken_stream_poisons_only_after_content_left(
    answer: Callable[[], Response], reason: str, tmp_path: Path
) -> None:
    async with asking(Worker(answer, staged), tmp_path) as (ask, store):
        told = await ask(stream=True)
        manifest = store.manifest("r")
    assert [failure.reason for failure in manifest.failures] == [reason]
    assert told.status_code == (200 if reason == "worker_capture_failed" else 502)
    assert '"error"' in told.text, "the agent must see that the response did not end well"


async def test_a_window_that_is_full_in_mid_answer_is_no_end_to_go_on_from(tmp_path: Path) -> None:
    """`context_length_exceeded` says that nothing was generated; here the agent has seen a part."""
    full = {"error": {"message": "Input length (600) exceeds model's maximum context length (512)."}}
    cut = stream_of(chunk("ye"), b"data: " + orjson.dumps(full) + b"\n\n")
    async with asking(Worker(cut, staged), tmp_path) as (ask, store):
        told = await ask(stream=True)
        assert [failure.reason for failure in store.manifest("r").failures] == ["worker_capture_failed"]
    assert '"worker_error"' in told.text
    assert "context_length_exceeded" not in told.text


async def test_what_follows_the_final_frame_waits_behind_it(tmp_path: Path) -> None:
    usage = b'data: {"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 3}}\n\n'
    frames = (chunk("yes"), chunk(None, "stop"), usage, b"data: [DONE]\n\n")
    async with asking(Worker(stream_of(*frames), staged), tmp_path) as (ask, store):
        assert (await ask(stream=True)).content == b"".join(frames)
        assert len(store.manifest("r").records) == 1


async def test_a_worker_that_hangs_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield chunk("ye")
        await asyncio.Event().wait()

    worker = Worker(lambda: StreamingResponse(forever(), media_type="text/event-stream"), staged)
    async with asking(worker, tmp_path, request_timeout_s=0.3) as (ask, store):
        told = await ask(stream=True)
        assert "worker_timeout" in told.text
        assert [failure.reason for failure in store.manifest("r").failures] == ["worker_capture_failed"]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [((), "request_finished_without_staged_coordinates"), ((chunk("ye"),), "worker_capture_failed")],
)
async def test_a_gateway_that_stops_leaves_a_row_of_every_call_it_gives_up(
    frames: tuple[bytes, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.gateway.app.STOP_GRACE_S", 0.05)
    begun = asyncio.Event()

    async def forever() -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame
        begun.set()
        await asyncio.Event().wait()

    worker = Worker(lambda: StreamingResponse(forever(), media_type="text/event-stream"), staged)
    async with (
        listening(worker.app) as worker_url,
        gateway_over(worker_url, tmp_path) as (url, gateway),
        httpx.AsyncClient(verify=False, timeout=20.0) as http,
    ):
        told = bytearray()

        async def read() -> None:
            route = f"{url}/ng-rollout/r/v1/chat/completions"
            async with http.stream("POST", route, json=ASK | {"stream": True}) as answer:
                async for part in answer.aiter_bytes():
                    told.extend(part)

        reading = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 10.0)
        await until(lambda: not frames or told, "the frame has reached the agent")
        await gateway.close()
        await reading
        assert b"gateway_stopping" in told
        manifest = gateway.custodian.store.manifest("r")
    assert [failure.reason for failure in manifest.failures] == [reason]


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_a_worker_that_refuses_gives_a_harmless_row(status: int, tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse({"error": {"message": "no"}}, status))
    async with asking(worker, tmp_path) as (ask, store):
        told = await ask()
        assert (told.status_code, told.json()["error"]["message"]) == (status, "no")
        (failure,) = store.manifest("r").failures
        assert failure.reason == "request_finished_without_staged_coordinates"


async def test_a_dead_worker_is_told_at_once(tmp_path: Path) -> None:
    async with gateway_over("http://127.0.0.1:9", tmp_path) as (url, gateway), httpx.AsyncClient(verify=False) as http:
        told = await http.post(f"{url}/ng-rollout/r/v1/chat/completions", json=ASK)
        assert (told.status_code, told.json()["error"]["code"]) == (502, "worker_unreachable")
        (failure,) = gateway.custodian.store.manifest("r").failures
        assert failure.reason == "request_finished_without_staged_coordinates"


@pytest.mark.parametrize("suffix", ["lineage", "replay"])
async def test_a_broken_line_before_others_stops_its_rollout_and_no_other(suffix: str, tmp_path: Path) -> None:
    worker = Worker(lambda: JSONResponse(ANSWER), staged)
    async with (
        listening(worker.app) as worker_url,
        gateway_over(worker_url, tmp_path) as (url, _),
        ControlClient(url, CONTROL) as control,
        httpx.AsyncClient(verify=False, timeout=20.0) as http,
    ):

        async def ask(rollout_id: str) -> httpx.Response:
            return await http.post(f"{url}/ng-rollout/{rollout_id}/v1/chat/completions", json=ASK)

        for rollout_id in ("damaged", "whole"):
            assert (await ask(rollout_id)).status_code == 200
        path = tmp_path / f"damaged.{suffix}.jsonl"
        path.write_bytes(b"{broken\n" + path.read_bytes())
        told = await ask("damaged")
        assert (told.status_code, told.json()["error"]["code"]) == (500, "ledger_corrupt")
        assert f"{path}, line 1" in told.json()["error"]["message"]
        with pytest.raises(LedgerCorrupt, match=f"{path.name}, line 1"):
            await control.freeze("damaged")
        assert (await ask("whole")).status_code == 200
        assert len((await control.freeze("whole"))["manifest"]["records"]) == 2


@pytest.mark.parametrize("suffix", ["lineage", "replay", "responses", "items", "events"])
async def test_a_torn_last_line_is_dropped(suffix: str, tmp_path: Path) -> None:
    """A call and two that continue it, with a crash in the middle of a line after the first one."""
    ids = itertools.count(1)
    worker = Worker(lambda: JSONResponse(RESPONSE | {"id": f"resp_{next(ids)}"}), staged)
    async with (
        listening(worker.app) as worker_url,
        gateway_over(worker_url, tmp_path) as (url, gateway),
        httpx.AsyncClient(verify=False, timeout=20.0) as http,
    ):
        route = f"{url}/ng-rollout/torn/v1/responses"
        answer = await http.post(route, json={"input": "go"})
        with (tmp_path / f"torn.{suffix}.jsonl").open("ab") as file:
            file.write(b'{"kind":"answer","id":"resp_1","model_call_id":"x')
        for _ in range(2):
            named = {"previous_response_id": answer.json()["id"]}
            answer = await http.post(route, json={"input": "and then?", **named})
            assert answer.status_code == 200, answer.text
        assert len(gateway.custodian.store.manifest("torn").records) == 3
        assert gateway.custodian.store.manifest("torn").failures == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_row_cannot_be_written_is_not_let_go_as_if_it_were_recorded(
    stream: bool, tmp_path: Path
) -> None:
    """A full disk, or a ledger's place that is taken: the agent hears of it, and nothing waits for the call."""

    def answered() -> Response:
        (tmp_path / "r.lineage.jsonl").mkdir()
        if stream:
            return stream_of(chunk("said"), chunk(finish="stop"), b"data: [DONE]\n\n")()
        return JSONResponse(ANSWER)

    worker = Worker(answered, staged)
    async with asking(worker, tmp_path) as (ask, _):
        answer = await ask(stream=stream)
    assert "ledger_error" in answer.text and "[DONE]" not in answer.text and '"stop"' not in answer.text
    assert answer.status_code == (200 if stream else 500)


@pytest.mark.parametrize(
    ("made", "status", "code"),
    [
        (lambda: Response(b"<html>", media_type="application/json"), 502, "worker_error"),
        (lambda: Response(b"bad gateway", status_code=503), 503, "worker_error"),
        (lambda: JSONResponse({"error": {"message": "wrong token tk-1"}}, 401), 502, "worker_refused_gateway"),
    ],
)
async def test_an_answer_that_is_none_leaves_a_row_and_tells_the_agent_nothing_it_must_not_know(
    made: Callable[[], Response], status: int, code: str, tmp_path: Path
) -> None:
    async with asking(Worker(made, staged), tmp_path) as (ask, store):
        answer = await ask()
        manifest = store.manifest("r")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "tk-1" not in answer.text
    assert manifest.records == [] and len(manifest.failures) == 1
