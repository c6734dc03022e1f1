"""The gate in front of the worker: who is let in, what is refused, and how coordinates are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from workbench.capture.transport import CallBoard, CaptureGate, current_call
from workbench.serving.door import Door
from workbench.wire import CaptureAdmission, CommitCoords
from workbench.wire.headers import ADMISSION_HEADER, CAPTURED_HEADER, ROLLOUT_HEADER

TOKEN = "secret"
ADMISSION = CaptureAdmission(rollout_id="run.0.0.0", model_call_id="c1", mode="text")
TAGGED = {ROLLOUT_HEADER: "run.0.0.0", ADMISSION_HEADER: ADMISSION.to_header()}


class Inner:
    """The app behind the gate: remembers what it saw and answers 200."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.bodies: list[bytes] = []
        self.before: Callable[[], None] = lambda: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append(current_call.get())
        self.bodies.append((await receive()).get("body", b""))
        self.before()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def board() -> CallBoard:
    return CallBoard(capacity=2)


@pytest.fixture
def http(inner: Inner, board: CallBoard) -> httpx.AsyncClient:
    gate = CaptureGate(inner, board, answer_timeout_s=0.2)
    gate = Door(gate, token=TOKEN, status=lambda: {"weight_version": 3}, takes_tagged=True)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(gate), base_url="http://worker", headers={"authorization": f"Bearer {TOKEN}"}
    )


def failed(call_id: str) -> CommitCoords:
    return CommitCoords(
        rollout_id="run.0.0.0",
        model_call_id=call_id,
        prev_len=0,
        delta_len=0,
        cum_len=0,
        weight_version=0,
        disposition="capture_failed",
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/workbench/status", "/workbench/capture/c1", "/v1/models"])
@pytest.mark.parametrize("header", [{"authorization": "Bearer other"}, {"authorization": ""}])
async def test_nobody_without_the_token_gets_in(
    http: httpx.AsyncClient, inner: Inner, path: str, header: dict[str, str]
) -> None:
    answer = await http.get(path, headers=header)
    assert answer.status_code == 401
    assert TOKEN not in answer.text
    assert inner.calls == []


async def test_health_needs_no_token(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health", headers={"authorization": ""})).status_code == 200


async def test_admission_reaches_the_app_and_the_body_is_whole(http: httpx.AsyncClient, inner: Inner) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": []}, headers=TAGGED)
    assert answer.text == "served"
    assert inner.calls[0].admission == ADMISSION
    assert inner.bodies == [b'{"messages":[]}']
    assert current_call.get() is None
    await http.post("/v1/chat/completions", json={"messages": []})
    assert inner.calls[1] is None, "an untagged request carries no admission"


@pytest.mark.parametrize(
    "headers",
    [
        {ROLLOUT_HEADER: "run.0.0.0"},
        {ADMISSION_HEADER: ADMISSION.to_header()},
        {ROLLOUT_HEADER: "run.0.0.1", ADMISSION_HEADER: ADMISSION.to_header()},
        {ROLLOUT_HEADER: "run.0.0.0", ADMISSION_HEADER: "not base64!"},
        {ROLLOUT_HEADER: "run.0.0.0", ADMISSION_HEADER: "e30"},
    ],
)
async def test_tagged_request_without_a_fitting_admission_is_refused(
    http: httpx.AsyncClient, inner: Inner, headers: dict[str, str]
) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": []}, headers=headers)
    assert answer.status_code == 400
    assert "x-workbench" in answer.json()["error"]["message"]
    assert inner.calls == []


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"logprobs": True},
        {"top_logprobs": 1},
        {"prompt_logprobs": 0},
        {"return_token_ids": True},
        {"truncate_prompt_tokens": 5},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"include": ["message.output_text.logprobs"]},
        [],
    ],
)
async def test_request_that_cannot_be_captured_exactly_is_refused(
    http: httpx.AsyncClient, inner: Inner, body: Any
) -> None:
    answer = await http.post("/v1/chat/completions", json=body, headers=TAGGED)
    assert answer.status_code == 400
    if isinstance(body, dict):
        assert next(iter(body)) in answer.json()["error"]["message"]
    assert inner.calls == []
    # The same fields on an untagged request are nobody's business here.
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_one_admission_is_taken_once(http: httpx.AsyncClient, board: CallBoard) -> None:
    call = board.open(ADMISSION)
    assert (await http.post("/v1/chat/completions", json={}, headers=TAGGED)).status_code == 400
    board.settle(call, failed("c1"), None)
    answer = await http.post("/v1/chat/completions", json={}, headers=TAGGED)
    assert "admitted before" in answer.json()["error"]["message"]


async def test_coordinates_are_waited_for_while_the_call_runs(http: httpx.AsyncClient, board: CallBoard) -> None:
    assert (await http.get("/workbench/capture/c1")).status_code == 404
    call = board.open(ADMISSION)
    assert (await http.get("/workbench/capture/c1")).status_code == 404, "it gives up at its deadline"
    asked = asyncio.create_task(http.get("/workbench/capture/c1"))
    await asyncio.sleep(0)
    board.settle(call, failed("c1"), ("sink_error", "disk full"))
    answer = (await asked).json()
    assert answer["coords"] == failed("c1").model_dump(mode="json")
    assert answer["failure"] == {"cause": "sink_error", "detail": "disk full"}


@pytest.mark.parametrize(("detail", "is_told"), [("Platte voll:\r\nß", True), ("x" * 10_000, False)])
async def test_an_answer_says_how_its_capture_ended(
    http: httpx.AsyncClient, inner: Inner, board: CallBoard, detail: str, is_told: bool
) -> None:
    inner.before = lambda: board.settle(current_call.get(), failed("c1"), ("sink_error", detail))
    answer = await http.post("/v1/chat/completions", json={}, headers=TAGGED)
    asked = (await http.get("/workbench/capture/c1")).json()
    assert asked["failure"]["detail"] == detail
    assert (CAPTURED_HEADER in answer.headers) == is_told, "a header has a bounded length"
    if is_told:
        assert orjson.loads(answer.headers[CAPTURED_HEADER]) == asked


async def test_an_answer_that_is_not_captured_yet_says_nothing(http: httpx.AsyncClient) -> None:
    assert CAPTURED_HEADER not in (await http.post("/v1/chat/completions", json={}, headers=TAGGED)).headers


async def test_board_is_bounded(http: httpx.AsyncClient, board: CallBoard) -> None:
    for number in range(3):
        call = board.open(CaptureAdmission(rollout_id="run.0.0.0", model_call_id=f"c{number}", mode="text"))
        board.settle(call, failed(f"c{number}"), None)
    assert (await http.get("/workbench/capture/c0")).status_code == 404
    assert (await http.get("/workbench/capture/c2")).status_code == 200
    assert board.live_calls == 0


async def test_status_says_what_the_worker_says(http: httpx.AsyncClient) -> None:
    assert (await http.get("/workbench/status")).json() == {"weight_version": 3}


async def test_capture_switched_off_takes_no_tagged_requests(inner: Inner) -> None:
    gate = Door(inner, token=TOKEN, status=dict, takes_tagged=False)
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(gate), base_url="http://worker", headers={"authorization": f"Bearer {TOKEN}"}
    )
    assert (await http.post("/v1/chat/completions", json={}, headers=TAGGED)).status_code == 400
    assert (await http.post("/v1/chat/completions", json={})).status_code == 200


async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient, inner: Inner) -> None:
    answer = await http.post("/v1/chat/completions", content=b"{", headers=TAGGED)
    assert (answer.status_code, inner.calls) == (400, [])
    assert "needs a JSON body" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_before_its_body_is_whole_admits_nothing(inner: Inner, board: CallBoard) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.lower().encode(), value.encode()) for name, value in TAGGED.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await CaptureGate(inner, board)(scope, receive, send)
    assert (inner.calls, board.live_calls, sent[0]["status"]) == ([], 0, 400)


async def test_what_is_no_request_passes_the_gate(board: CallBoard) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await CaptureGate(app, board)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


def test_facts_are_told_of_captured_calls_alone(board: CallBoard) -> None:
    for call_id in ("c1", "c2"):
        call = board.open(ADMISSION.model_copy(update={"model_call_id": call_id}))
        facts = {"sampled_tokens": 3, "finish_reason": "stop", "staged_s": 0.1} if call_id == "c1" else {}
        board.settle(call, failed(call_id), None, **facts)
    assert board.facts(["c1", "c2", "c3"]) == {"c1": {"sampled_tokens": 3, "finish_reason": "stop"}}
