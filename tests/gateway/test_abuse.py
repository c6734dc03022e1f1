"""What strangers, broken clients and bad networks send: a clear 4xx, nothing told, nothing written, nothing stuck."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from conftest import CONTROL, Stack, gateway_over, listening, until
from workbench.gateway.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "say something"}]
ASKS: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "policy", "messages": USER},
    "responses": {"model": "policy", "input": USER},
    "messages": {"model": "policy", "messages": USER, "max_tokens": 16},
}
ANY_DIALECT = pytest.mark.parametrize("path", ASKS)
TOKEN = {"authorization": f"Bearer {CONTROL}"}


async def raw(url: str, *parts: bytes, pause_s: float = 0.0, leave: bool = False) -> bytes:
    """Send bytes that no client would, and return what comes until the other side closes. `leave`: close first."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    came = asyncio.create_task(reader.read())
    try:
        for part in parts:
            if came.done():
                break
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return b"" if leave else await asyncio.wait_for(came, 20.0)
    except ConnectionError:
        return b""
    finally:
        came.cancel()
        writer.close()


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: gateway", *headers, "", ""]).encode("utf-8")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def files(stack: Stack) -> set[str]:
    return {path.name for path in stack.gateway.custodian.store.directory.iterdir()}


async def nothing_is_stuck(stack: Stack) -> None:
    await until(lambda: not stack.gateway._live, "no call is under way")
    assert "workbench_live_calls 0.0" in (await stack.http.get(f"{stack.url}/metrics")).text


# -- what is no rollout id ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rollout_id",
    ["..", "%2e%2e", ".", "...", "a%2Fb", "..%2F..%2Fetc", "a%5Cb", "a" * 201, "a" * 300, "a%00", "a%0a", "%0d%0aa"]
    + ["a%20b", "%ff%fe", "a%c3%a9", "a:b", "a*", "~", "%25", "a;b", "a%3Fb"],
)
async def test_a_bad_rollout_id_reaches_no_path(stack: Stack, rollout_id: str) -> None:
    before = files(stack)
    for path in ASKS:
        body = orjson.dumps(ASKS[path])
        length = (f"Content-Length: {len(body)}", "Connection: close")
        answer = await raw(stack.url, head(f"/ng-rollout/{rollout_id}/v1/{path}", *length) + body)
        assert status(answer) in (400, 404), answer
        assert b'"error"' in answer
    close = ("Connection: close", f"Authorization: Bearer {CONTROL}", "Content-Length: 2")
    for method, path in (
        ("GET", f"/ng-rollout/{rollout_id}/v1/models"),
        ("GET", f"/training-token-capture/control/rollouts/{rollout_id}/manifest"),
        ("POST", f"/training-token-capture/control/rollouts/{rollout_id}/freeze"),
        ("POST", f"/training-token-capture/control/rollouts/{rollout_id}/seal"),
    ):
        answer = await raw(stack.url, head(path, *close, method=method) + b"{}")
        assert status(answer) in (400, 404, 405), answer
    assert files(stack) == before
    assert not any(path.suffix == ".frozen" for path in stack.gateway.custodian.store.directory.parent.iterdir())


# -- what is no request ------------------------------------------------------------------------------------------------

DEEP = 5_000


@ANY_DIALECT
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"{}",
        b'{"messages": NaN}',
        b"\xff\xfe{}",
        b'{"a": "\\ud800"}',
        b'{"messages": [3], "input": [3]}',
        b'{"messages": [null], "input": [null]}',
        b'{"messages": {"role": "user"}, "input": {"role": "user"}}',
        b'{"messages": [], "input": []}',
        b'{"messages": [{"role": "user", "content": 3}], "input": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": "user", "content": [3]}], "input": [{"role": "user", "content": [3]}]}',
        b"[" * DEEP + b"]" * DEEP,
        b'{"messages": ' + b"[" * DEEP + b"]" * DEEP + b', "input": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_what_is_no_request_is_refused(stack: Stack, path: str, body: bytes) -> None:
    answer = await stack.http.post(f"{stack.url}/ng-rollout/no.request/v1/{path}", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert b"Traceback" not in answer.content
    assert "no.request.lineage.jsonl" not in files(stack)


@ANY_DIALECT
@pytest.mark.parametrize("depth", [120, 900])
@pytest.mark.parametrize("where", ["tools", "extra", "include", "item", "kwargs"])
async def test_however_deep_a_request_is_it_gets_an_answer(stack: Stack, path: str, depth: int, where: str) -> None:
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    items = ASKS[path].get("messages") or ASKS[path]["input"]
    nested: dict[str, Any] = {
        "tools": {"tools": [{"type": "function", "name": "f", "input_schema": {"deep": deep}}]},
        "extra": {"something": deep},
        "include": {"include": [deep]},
        "item": {key: [{**items[0], "x": deep}] for key in ("messages", "input")},
        "kwargs": {"chat_template_kwargs": {"deep": deep}},
    }
    spelled = repr(ASKS[path] | nested[where]).replace("'", '"').encode()
    answer = await stack.http.post(f"{stack.url}/ng-rollout/deep/v1/{path}", content=spelled)
    assert answer.status_code in (200, 400), answer.text
    if depth > 255:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "nested_too_deeply")
    await nothing_is_stuck(stack)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_configured_size_is_refused(stack: Stack, announced: bool) -> None:
    most = stack.gateway.settings.max_body_bytes

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(0, size, 1024):
            yield b" " * 1024

    # The last one is far more than what the connection holds: the client must be told, not cut off.
    for size, expected in ((most, 400), (most + 1024, 413), (100 * most, 413)):
        content: Any = b" " * size if announced else chunks(size)
        answer = await stack.http.post(f"{stack.url}/ng-rollout/large/v1/responses", content=content)
        assert answer.status_code == expected
    assert answer.json()["error"]["code"] == "body_too_large"
    url = f"{stack.url}/training-token-capture/control/rollouts/large/seal"
    content = b" " * (most + 1) if announced else chunks(most + 1024)
    assert (await stack.http.post(url, content=content, headers=TOKEN)).status_code == 413
    assert not any(name.startswith("large") for name in files(stack))


# -- whose headers -----------------------------------------------------------------------------------------------------


@ANY_DIALECT
@pytest.mark.parametrize(
    "headers",
    [
        ["x-workbench-admission: e30="],
        ["X-Workbench-Admission: e30=", "x-workbench-admission: e30="],
        ["X-WORKBENCH-ROLLOUT: other"],
        ["x-workbench-something: new"],
        ["x-workbench-compaction: resp_1", "x-workbench-admission: e30="],
        ["x-workbench-compaction: resp_1", "x-workbench-compaction: resp_2"],
        ["Idempotency-Key: one", "idempotency-key: other"],
    ],
)
async def test_internal_headers_and_doubled_keys_are_refused(stack: Stack, path: str, headers: list[str]) -> None:
    body, staged = orjson.dumps(ASKS[path]), len(stack.sink.rows)
    length = (f"Content-Length: {len(body)}", "Connection: close")
    answer = await raw(stack.url, head(f"/ng-rollout/headers/v1/{path}", *headers, *length) + body)
    assert status(answer) == 400
    assert b"reserved_header" in answer or b"key_ambiguous" in answer
    assert len(stack.sink.rows) == staged


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: -1"],
        ["Content-Length: x"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding : chunked"],
        ["X-A: 1\r\n\tx-workbench-rollout: folded", "Content-Length: 0"],
        ["X-A: a\x00b"],
    ],
)
async def test_a_request_that_two_servers_would_read_differently_is_refused(stack: Stack, headers: list[str]) -> None:
    hidden = head("/ng-rollout/smuggled/v1/responses", "Content-Length: 0")
    answer = await raw(
        stack.url, head("/ng-rollout/outer/v1/responses", *headers, "Connection: close") + b"0\r\n\r\n" + hidden
    )
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status(answer) == 400
    assert not any(name.startswith(("outer", "smuggled")) for name in files(stack))


@ANY_DIALECT
@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("best_of", 2), ("use_beam_search", True), ("echo", True), ("prompt_logprobs", 0)]
    + [("prompt_logprobs", 5), ("continue_final_message", True)],
)
async def test_what_cannot_be_captured_is_refused_in_every_dialect(
    stack: Stack, path: str, field: str, value: Any
) -> None:
    before = files(stack)
    for stream in (False, True):
        body = ASKS[path] | {field: value, "stream": stream}
        answer = await stack.http.post(f"{stack.url}/ng-rollout/uncapturable/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "not_capturable", field)
        assert "Next: leave it out" in error["message"]
    assert files(stack) == before


# -- clients that leave or dawdle --------------------------------------------------------------------------------------


@ANY_DIALECT
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing_stuck(
    stack: Stack, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rollout_id = f"slow.left.{path[:4]}.{stream:d}"
    body = orjson.dumps(ASKS[path] | {"stream": stream})
    request = head(f"/ng-rollout/{rollout_id}/v1/{path}", f"Content-Length: {len(body)}")
    store = stack.gateway.custodian.store
    with caplog.at_level(logging.WARNING):
        await raw(stack.url, leave=True)
        await raw(stack.url, request[:40], leave=True)
        await raw(stack.url, request, leave=True)
        await raw(stack.url, request, body[:10], leave=True)
        await nothing_is_stuck(stack)
        assert f"{rollout_id}.lineage.jsonl" not in files(stack)
        await raw(stack.url, request, body, leave=True)
        await until(lambda: store.manifest(rollout_id).records, "the call that nobody waits for is recorded")
    await nothing_is_stuck(stack)
    assert caplog.records == []
    assert (await stack.http.get(f"{stack.url}/health")).is_success


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def impatient(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    ledger = tmp_path_factory.mktemp("ledger")
    async with gateway_over(stack.worker.url, ledger, client_timeout_s=1.0) as (url, _):
        yield url


UNFINISHED = ("Content-Length: 50", f"Authorization: Bearer {CONTROL}", "Connection: close")


async def test_a_client_that_dawdles_is_given_up(impatient: str) -> None:
    request = head("/ng-rollout/dawdle/v1/responses", "Content-Length: 100", "Connection: close")
    whole = head("/health", "Content-Length: 0", method="GET")
    silent, in_head, in_second_head, in_body, in_control_body = await asyncio.gather(
        raw(impatient),
        raw(impatient, *(bytes([byte]) for byte in request), pause_s=0.1),
        raw(impatient, whole, *(bytes([byte]) for byte in request), pause_s=0.1),
        raw(impatient, request, *[b" "] * 8, pause_s=0.1),
        raw(impatient, head("/training-token-capture/control/rollouts/r/seal", *UNFINISHED), b"{"),
    )
    assert (silent, in_head) == (b"", b"")
    assert in_second_head.count(b"HTTP/1.1 ") <= 1
    assert status(in_body) == 408
    assert b"body_timeout" in in_body
    assert status(in_control_body) == 408


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """An answer larger than what lies between the two, so that only reading makes room."""
    sent, over = 0, asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        left = asyncio.ensure_future(receive())
        while not left.done() and sent < 2**30:
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
            sent += 2**20
            await asyncio.sleep(0)
        over.set()

    async with listening(endless, http=patient(0.5)) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(head("/", method="GET"))
        await asyncio.wait_for(over.wait(), 30.0)
        writer.close()
    assert sent < 2**30


# -- faults of our own -------------------------------------------------------------------------------------------------


@ANY_DIALECT
async def test_a_fault_of_our_own_shows_no_traceback(
    stack: Stack, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("a secret of the inside")

    monkeypatch.setattr(stack.gateway.custodian, "admit", broken)
    answer = await stack.http.post(f"{stack.url}/ng-rollout/fault/v1/{path}", json=ASKS[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "gateway_fault")
    assert b"secret" not in answer.content
    assert b"Traceback" not in answer.content
    assert "a secret of the inside" in caplog.text, "who runs the gateway finds it in its log"
    await nothing_is_stuck(stack)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "/nothing", 404), ("PUT", "/v1/responses", 405), ("GET", "/ng-rollout/r/v1/responses", 405)]
    + [("POST", "/ng-rollout/r/v1/nothing", 404), ("POST", "/ng-rollout/r", 404), ("DELETE", "/metrics", 405)],
)
async def test_what_is_no_route_is_said_as_json(stack: Stack, method: str, path: str, expected: int) -> None:
    answer = await stack.http.request(method, stack.url + path)
    assert answer.status_code == expected
    assert answer.json()["error"]["message"]
