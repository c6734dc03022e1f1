"""A request that comes again is one call: the same bytes, one row. With the real SDK and its own retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
import pytest_asyncio
from gate import ACKNOWLEDGEMENT, COMPLETION, FRAMES, Gate

from conftest import CONTROL, Stack, gateway_over, listening, until
from workbench.gateway.app import Gateway
from workbench.gateway.client import ControlClient
from workbench.gateway.replay import Answer, ReplayLog

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "say something"}]
ASK = {"model": "policy", "messages": USER}
ASKS: dict[str, dict[str, Any]] = {
    "chat/completions": ASK,
    "responses": {"model": "policy", "input": USER},
    "messages": {"model": "policy", "messages": USER, "max_tokens": 16},
}
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Gated:
    """A gateway whose worker can be held, and what the tests ask it."""

    url: str
    gateway: Gateway
    gate: Gate
    http: httpx.AsyncClient

    def route(self, rollout_id: str) -> str:
        return f"{self.url}/ng-rollout/{rollout_id}/v1"

    async def post(
        self, rollout_id: str, headers: dict[str, str] | None = None, path: str = "chat/completions", **body: Any
    ) -> httpx.Response:
        return await self.http.post(f"{self.route(rollout_id)}/{path}", json=ASKS[path] | body, headers=headers)

    def rows(self, rollout_id: str) -> int:
        return len(self.gateway.custodian.store.manifest(rollout_id).records)

    def repeated(self, how: str) -> float:
        return self.gateway.metrics.repeated.labels(how)._value.get()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gated(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gated]:
    gate = Gate(stack.worker.url)
    ledger = tmp_path_factory.mktemp("ledger")
    async with (
        listening(gate.app) as worker_url,
        gateway_over(worker_url, ledger) as (url, gateway),
        httpx.AsyncClient(verify=False, timeout=30.0) as http,
    ):
        yield Gated(url, gateway, gate, http)
        gate.release()
    await gate.http.aclose()


async def by_sdk(url: str, path: str, stream: bool) -> list[Any]:
    """The answer as the API's own client gives it: an object, or its events. It gives up early and asks again."""
    options: Any = {"api_key": "unused", "max_retries": 5, "timeout": 0.3}
    if path == "messages":
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), **options) as claude:
            return await whole(claude.messages.create(**ASKS[path], stream=stream))
    async with openai.AsyncOpenAI(base_url=url, **options) as agent:
        create: Any = agent.responses.create if path == "responses" else agent.chat.completions.create
        return await whole(create(**ASKS[path], stream=stream))


async def whole(asked: Any) -> list[Any]:
    answer = await asked
    return [event async for event in answer] if hasattr(answer, "__aiter__") else [answer]


def text_in(part: dict[str, Any]) -> str:
    """What an answer, or one event of it, adds to the text."""
    match part:
        case {"choices": choices}:
            return "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)
        case {"object": "response", "output": [{"content": [{"text": text}]}]}:
            return text
        case {"type": "message", "content": [{"text": text}]}:
            return text
        case {"type": "response.output_text.delta", "delta": text}:
            return text
        case {"type": "content_block_delta", "delta": {"text": text}}:
            return text
    return ""


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_sdk_that_times_out_and_retries_makes_one_row(gated: Gated, stream: bool, path: str) -> None:
    rollout_id, joined = f"sdk.{stream}.{path[:4]}", gated.repeated("joined")
    gated.gate.hold(COMPLETION)
    asked = asyncio.create_task(by_sdk(gated.route(rollout_id), path, stream))
    await until(lambda: gated.repeated("joined") > joined, "the SDK's retry joins the call")
    gated.gate.release()
    came = await asked
    assert "".join(text_in(part.model_dump()) for part in came) == "first"
    assert gated.rows(rollout_id) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_took_is_served_to_the_retry(gated: Gated, stream: bool) -> None:
    rollout_id, stored = f"gone.{stream}", gated.repeated("stored")
    gated.gate.hold(COMPLETION)
    async with openai.AsyncOpenAI(
        base_url=gated.route(rollout_id), api_key="unused", max_retries=0, timeout=0.2
    ) as agent:
        with pytest.raises(openai.APITimeoutError):
            await agent.chat.completions.create(**ASK, stream=stream)  # type: ignore[call-overload]
        gated.gate.release()
        await until(lambda: not gated.gateway._live, "the abandoned call is over")
        assert gated.rows(rollout_id) == 1
    answer = await gated.post(rollout_id, RETRY, stream=stream)
    assert gated.repeated("stored") == stored + 1
    # Now it is delivered: a retry of anything else with this body is another call.
    await until(lambda: delivered(gated, rollout_id), "the delivery is noted")
    another = await gated.post(rollout_id, RETRY, stream=stream)
    assert another.content != answer.content
    assert gated.rows(rollout_id) == 2


def delivered(gated: Gated, rollout_id: str) -> bool:
    path = gated.gateway.custodian.store.directory / f"{rollout_id}.replay.jsonl"
    return b'"delivered"' in path.read_bytes()


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_key_gets_the_same_bytes_even_after_freeze(gated: Gated, stream: bool, path: str) -> None:
    """A closed rollout gets no new call, and this is none: nothing is generated, nothing is recorded."""
    rollout_id, header = f"key.{stream}.{path[:4]}", "x-request-id" if stream else "Idempotency-Key"
    first = await gated.post(rollout_id, {header: "k"}, path, stream=stream)
    again = await gated.post(rollout_id, {header: "k"}, path, stream=stream)
    gated.gateway.custodian.store.freeze(rollout_id)
    after = await gated.post(rollout_id, {header: "k"}, path, stream=stream)
    assert first.content == again.content == after.content
    assert {answer.headers["content-type"] for answer in (first, again, after)} == {first.headers["content-type"]}
    assert (await gated.post(rollout_id, {header: "other"}, path, stream=stream)).status_code == 409
    assert gated.rows(rollout_id) == 1


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_late_retry_reaches_over_the_freeze(gated: Gated, stream: bool, path: str) -> None:
    rollout_id, stored = f"late.{stream}.{path[:4]}", gated.repeated("stored")
    await abandon(gated, rollout_id, path, stream)
    gated.gateway.custodian.store.freeze(rollout_id)
    answer = await gated.post(rollout_id, RETRY, path, stream=stream)
    assert (answer.status_code, gated.repeated("stored")) == (200, stored + 1)
    await until(lambda: delivered(gated, rollout_id), "the delivery is noted")
    assert (await gated.post(rollout_id, RETRY, path, stream=stream)).status_code == 409, "that would be a new call"
    assert gated.rows(rollout_id) == 1


async def abandon(gated: Gated, rollout_id: str, path: str = "chat/completions", stream: bool = False) -> None:
    """Have a call answered whose client is gone."""
    gated.gate.hold(COMPLETION)
    reached = gated.gate.reached[COMPLETION]
    asked = asyncio.create_task(gated.post(rollout_id, None, path, stream=stream))
    await until(lambda: gated.gate.reached[COMPLETION] > reached, "the call is under way")
    asked.cancel()
    await asyncio.wait([asked])
    gated.gate.release()
    await until(lambda: not gated.gateway._live, "the abandoned call is over")


async def test_a_call_that_runs_at_the_freeze_is_joined_and_stays_out(gated: Gated) -> None:
    gated.gate.hold(COMPLETION)
    reached, joined = gated.gate.reached[COMPLETION], gated.repeated("joined")
    first = asyncio.create_task(gated.post("over"))
    await until(lambda: gated.gate.reached[COMPLETION] > reached, "the call is under way")
    store = gated.gateway.custodian.store
    store.freeze("over")
    again = asyncio.create_task(gated.post("over", RETRY))
    await until(lambda: gated.repeated("joined") > joined, "the retry joins the call")
    gated.gate.release()
    assert (await first).content == (await again).content
    assert gated.rows("over") == 0
    assert [event["kind"] for event in store.events("over")] == ["late_commit"]


async def test_a_key_outranks_a_retry_count(gated: Gated) -> None:
    await abandon(gated, "rank")
    other = await gated.post("rank", RETRY | {"x-request-id": "new"})
    assert other.status_code == 200
    assert gated.rows("rank") == 2, "another id is another call, whatever its count"


async def test_answers_are_kept_apart_and_go_with_the_seal(gated: Gated) -> None:
    ledger, key = gated.gateway.custodian.store.directory, {"idempotency-key": "k"}
    body = {"model": "policy", "input": "go"}
    url = f"{gated.route('sealed')}/responses"
    answer = await gated.http.post(url, json=body, headers=key)
    assert (ledger / "sealed.answers").read_bytes() == answer.content
    assert answer.content not in (ledger / "sealed.replay.jsonl").read_bytes()
    assert (ledger / "sealed.responses.jsonl").exists()
    async with ControlClient(gated.url, CONTROL) as control:
        await control.seal("sealed", 1.0, response=answer.json())
    assert not (ledger / "sealed.answers").exists()
    assert not (ledger / "sealed.responses.jsonl").exists()
    gone = await gated.http.post(url, json=body, headers=key)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "answer_expired")
    named = await gated.http.post(url, json=body | {"previous_response_id": answer.json()["id"]})
    assert (named.status_code, named.json()["error"]["code"]) == (409, "rollout_frozen")
    assert gated.rows("sealed") == 1


async def test_old_answers_go_and_new_ones_stay(gated: Gated) -> None:
    ledger, key = gated.gateway.custodian.store.directory, {"idempotency-key": "k"}
    for rollout_id in ("old", "young"):
        assert (await gated.post(rollout_id, key)).status_code == 200
    os.utime(ledger / "old.answers", (0, 0))
    gated.gateway.retries.sweep(idle_s=3600.0)
    assert (await gated.post("old", key)).json()["error"]["code"] == "answer_expired"
    assert (await gated.post("young", key)).status_code == 200
    fresh = await gated.post("old", {"idempotency-key": "new"})
    assert (await gated.post("old", {"idempotency-key": "new"})).content == fresh.content
    assert (await gated.post("old", key)).status_code == 409, "the bytes in its old place are another call's"


async def test_answers_of_closed_rollouts_go_with_the_gateway(stack: Stack, tmp_path: Path) -> None:
    async with gateway_over(stack.worker.url, tmp_path) as (url, gateway), httpx.AsyncClient(verify=False) as http:
        for rollout_id in ("closed", "open"):
            assert (await http.post(f"{url}/ng-rollout/{rollout_id}/v1/chat/completions", json=ASK)).is_success
        gateway.custodian.store.freeze("closed")
    assert {path.name for path in tmp_path.glob("*.answers")} == {"open.answers"}
    assert not list(tmp_path.glob("*.gateway"))


async def test_the_same_key_with_another_body_is_refused(gated: Gated) -> None:
    await gated.post("other.body", {"idempotency-key": "k"})
    refused = await gated.post("other.body", {"idempotency-key": "k"}, max_tokens=3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    spelt = await gated.http.post(
        f"{gated.route('other.body')}/chat/completions",
        content=orjson.dumps(dict(reversed(ASK.items())), option=orjson.OPT_INDENT_2),
        headers={"idempotency-key": "k", "x-request-id": "plays no part"},
    )
    assert spelt.status_code == 200, "the same JSON in another spelling is the same body"
    assert (await gated.post("another.rollout", {"idempotency-key": "k"}, max_tokens=3)).status_code == 200
    assert (await gated.post("other.body", {"idempotency-key": "k" * 300})).status_code == 400
    assert gated.rows("other.body") == 1


async def test_a_running_stream_is_joined_from_its_start(gated: Gated) -> None:
    gated.gate.hold(FRAMES)
    url = f"{gated.route('join')}/chat/completions"
    headers = {"x-request-id": "k"}
    async with gated.http.stream("POST", url, json=ASK | {"stream": True}, headers=headers) as one:
        first, second = one.aiter_raw(), b""
        head = await anext(first)
        async with gated.http.stream("POST", url, json=ASK | {"stream": True}, headers=headers) as other:
            rest = other.aiter_raw()
            while len(second) < len(head):
                second += await anext(rest)
            gated.gate.release()
            whole = head + b"".join([part async for part in first])
            assert second + b"".join([part async for part in rest]) == whole
    assert whole.endswith(b"data: [DONE]\n\n")
    assert (await gated.post("join", headers, stream=True)).content == whole
    assert gated.rows("join") == 1


async def test_two_equal_requests_are_two_calls(gated: Gated) -> None:
    both = await asyncio.gather(*(gated.post("two", {"x-stainless-retry-count": "0"}) for _ in range(2)))
    assert both[0].content != both[1].content
    assert gated.rows("two") == 2


async def test_a_retry_that_could_mean_two_calls_is_a_call_of_its_own(gated: Gated) -> None:
    gated.gate.hold(COMPLETION)
    reached = gated.gate.reached[COMPLETION]
    tasks = [asyncio.create_task(gated.post("many")) for _ in range(2)]
    await until(lambda: gated.gate.reached[COMPLETION] == reached + 2, "both are under way")
    tasks.append(asyncio.create_task(gated.post("many", RETRY)))
    await until(lambda: gated.gate.reached[COMPLETION] == reached + 3, "the third is, too")
    gated.gate.release()
    assert len({(await task).content for task in tasks}) == 3
    assert gated.rows("many") == 3


async def test_only_answers_are_kept(gated: Gated) -> None:
    key = {"idempotency-key": "k"}
    refused = await gated.post("refused", key, model="no such model")
    assert refused.status_code == 404
    assert (await gated.post("refused", key)).status_code == 200, "a key whose call failed is free again"
    manifest = gated.gateway.custodian.store.manifest("refused")
    assert (len(manifest.records), len(manifest.failures)) == (1, 1)


async def test_an_unresolved_call_is_repeated_without_a_second_row(gated: Gated) -> None:
    await gated.post("lost")
    history = [*ASK["messages"], {"role": "assistant", "content": "never said"}, *ASK["messages"]]
    first = await gated.post("lost", {"x-request-id": "k"}, messages=history)
    again = await gated.post("lost", {"x-request-id": "k"}, messages=history)
    assert first.content == again.content
    assert len(gated.gateway.custodian.store.manifest("lost").failures) == 1


async def test_another_gateway_waits_for_the_call_and_replays_it(gated: Gated) -> None:
    key, ledger = {"idempotency-key": "k"}, gated.gateway.custodian.store.directory
    async with (
        gateway_over("http://127.0.0.1:9", ledger) as (url, second),
        httpx.AsyncClient(verify=False, timeout=30.0) as http,
    ):
        gated.gate.hold(COMPLETION)
        reached = gated.gate.reached[COMPLETION]
        one = asyncio.create_task(gated.post("elsewhere", key))
        await until(lambda: gated.gate.reached[COMPLETION] > reached, "the call is under way")
        other = asyncio.create_task(http.post(f"{url}/ng-rollout/elsewhere/v1/chat/completions", json=ASK, headers=key))
        # From here on it holds the log, and has decided by the time that the first one can write there.
        await until(lambda: second.retries._logs.of("elsewhere").unsettled, "the other gateway knows of the call")
        gated.gate.release()
        assert (await one).content == (await other).content
    assert gated.rows("elsewhere") == 1


async def test_a_torn_last_record_is_dropped(gated: Gated, stack: Stack, tmp_path_factory: Any) -> None:
    ledger = tmp_path_factory.mktemp("torn")
    key, route = {"idempotency-key": "k"}, "/ng-rollout/torn/v1/chat/completions"
    async with gateway_over(stack.worker.url, ledger) as (url, _):
        first = await gated.http.post(url + route, json=ASK, headers=key)
    path = ledger / "torn.replay.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"answer","call":"x","raw":"abc')
    async with gateway_over(stack.worker.url, ledger) as (url, gateway):
        again = await gated.http.post(url + route, json=ASK, headers=key)
        fresh = await gated.http.post(url + route, json=ASK)
        assert first.content == again.content != fresh.content
        assert len(gateway.custodian.store.manifest("torn").records) == 2
    assert CONTROL not in path.read_text()
    assert all(orjson.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", [COMPLETION, ACKNOWLEDGEMENT])
async def test_a_call_that_has_no_row_yet_at_another_gateway_has_no_answer_here(
    gated: Gated, place: str, stream: bool
) -> None:
    rollout_id, ask = f"late.elsewhere.{place}.{stream}", ASK | {"stream": stream}
    key, ledger = {"idempotency-key": "k"}, gated.gateway.custodian.store.directory
    async with (
        gateway_over("http://127.0.0.1:9", ledger, request_timeout_s=0.2) as (url, _),
        httpx.AsyncClient(verify=False, timeout=30.0) as http,
    ):
        gated.gate.hold(place)
        reached = gated.gate.reached[place]
        one = asyncio.create_task(gated.post(rollout_id, key, stream=stream))
        await until(lambda: gated.gate.reached[place] > reached, "the call is under way")
        path = f"/ng-rollout/{rollout_id}/v1/chat/completions"
        late = await http.post(url + path, json=ask, headers=key)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "call_timeout")
        gated.gate.release()
        first = await one
        again = await http.post(url + path, json=ask, headers=key)
        assert (again.status_code, again.content) == (200, first.content)
    assert gated.rows(rollout_id) == 1


async def test_of_very_many_rollouts_the_logs_are_read_again(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = gated.gateway.retries._logs._recent
    logs.clear()
    monkeypatch.setattr("workbench.gateway.replay.OPEN_LOGS", 1)
    names = [f"many.{number}" for number in range(4)]
    first = [(await gated.post(name, {"idempotency-key": "k"})).content for name in names]
    assert [(await gated.post(name, {"idempotency-key": "k"})).content for name in names] == first
    assert len(logs) == 1


async def test_an_answer_of_a_dead_gateway_gets_its_row_however_many_other_rollouts_come_meanwhile(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rollout takes the place of this one's log just before the row is looked for."""
    retries, ledger, key = gated.gateway.retries, gated.gateway.custodian.store.directory, {"idempotency-key": "k"}
    raw = (await gated.post("other", key)).content
    begun = orjson.loads((ledger / "other.replay.jsonl").read_bytes().splitlines()[0])
    dead = ReplayLog(ledger / "crowded.replay.jsonl")
    dead.claim("c0", "a gateway that is gone", "k", begun["body"], False, lambda known: False)
    dead.answered("c0", Answer("application/json", True, None, 0.0), raw)
    bytes_of = ReplayLog.bytes_of

    def crowded(log: ReplayLog, answer: Answer) -> bytes | None:
        retries._logs.of("other")
        return bytes_of(log, answer)

    monkeypatch.setattr("workbench.gateway.replay.OPEN_LOGS", 1)
    monkeypatch.setattr(ReplayLog, "bytes_of", crowded)
    assert (await gated.post("crowded", key)).content == raw
    manifest = gated.gateway.custodian.store.manifest("crowded")
    assert [row.model_call_id for row in (*manifest.records, *manifest.failures)] == ["c0"]


async def test_who_joins_a_call_that_cannot_be_begun_is_told_so_too(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk takes neither the call's row nor the line that it ended."""
    begun, go, alive = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def full(*_: Any, **__: Any) -> None:
        begun.set()
        await go.wait()
        raise OSError(28, "No space left on device")

    def is_alive(known: Any, *_: Any) -> bool:
        alive.set()
        return known.call_id in gated.gateway.retries._own

    monkeypatch.setattr(gated.gateway.custodian, "admit", full)
    monkeypatch.setattr("workbench.gateway.retries.Recording.ended", full)
    first = asyncio.create_task(gated.post("full", {"idempotency-key": "k"}))
    await begun.wait()
    monkeypatch.setattr(gated.gateway.retries, "_alive", is_alive)
    second = asyncio.create_task(gated.post("full", {"idempotency-key": "k"}))
    await until(alive.is_set, "the second request has found the first")
    go.set()
    for answer in await asyncio.wait_for(asyncio.gather(first, second), 10.0):
        assert answer.status_code == 500 and "No space left" in answer.text


async def test_a_call_whose_end_cannot_be_noted_is_served_and_logged(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.gateway.retries.Recording.settled", full)
    assert (await gated.post("unnoted")).status_code == 200
    await until(lambda: "could not be noted" in caplog.text, "its end is logged")
    assert gated.rows("unnoted") == 1
