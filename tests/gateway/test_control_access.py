"""Who may use the control plane: the holder of its token, on the gateway's own machine unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import CONTROL, Stack
from workbench.gateway import control
from workbench.gateway.app import Gateway
from workbench.gateway.settings import GatewaySettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKS = {"model": "policy", "input": [{"role": "user", "content": "say something"}]}
TOKEN = {"authorization": f"Bearer {CONTROL}"}

STRANGERS: dict[str, list[tuple[str, str]]] = {
    "nobody": [],
    "wrong": [("authorization", "Bearer wrong")],
    "as long": [("authorization", "Bearer " + "x" * len(CONTROL))],
    "a prefix": [("authorization", f"Bearer {CONTROL[:-1]}")],
    "one more": [("authorization", f"Bearer {CONTROL}x")],
    "another run's": [("authorization", "Bearer control-token-of-another-run")],
    "no token": [("authorization", "Bearer")],
    "no scheme": [("authorization", CONTROL)],
    "another scheme": [("authorization", f"Basic {CONTROL}")],
    "beside the right one": [("authorization", "Bearer wrong"), ("authorization", f"Bearer {CONTROL}")],
    "another header": [("x-api-key", CONTROL)],
}


def files(stack: Stack) -> set[str]:
    return {path.name for path in stack.gateway.custodian.store.directory.iterdir()}


@pytest.mark.parametrize("who", STRANGERS)
async def test_a_stranger_learns_and_changes_nothing(stack: Stack, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await stack.http.post(f"{stack.url}/ng-rollout/open/v1/responses", json=ASKS)).is_success
    before, compared, answers = files(stack), 0, set()

    def counting(given: bytes, expected: bytes) -> bool:
        nonlocal compared
        compared += 1
        return real(given, expected)

    real = control.hmac.compare_digest
    monkeypatch.setattr(control.hmac, "compare_digest", counting)
    for rollout_id in ("open", "never.was", "..."):
        for action, method, body in (("manifest", "GET", b""), ("freeze", "POST", b"{}"), ("seal", "POST", b"{broken")):
            url = f"{stack.url}/training-token-capture/control/rollouts/{rollout_id}/{action}"
            answer = await stack.http.request(method, url, headers=STRANGERS[who], content=body)
            assert answer.status_code == 401
            answers.add((answer.content, answer.headers["www-authenticate"]))
    assert len(answers) == 1, "the same words whether the rollout exists or not"
    assert CONTROL.encode() not in answers.pop()[0]
    assert compared == 9, "each time in constant time"
    assert files(stack) == before
    assert (await stack.http.post(f"{stack.url}/ng-rollout/open/v1/responses", json=ASKS)).is_success


@pytest.mark.parametrize(
    ("client", "server", "opened", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", False, 200),
        ("::1", "::1", False, 200),
        ("::ffff:127.0.0.1", "::", False, 200),
        ("10.0.0.5", "10.0.0.5", False, 200),
        ("10.0.0.9", "10.0.0.5", False, 403),
        ("::ffff:10.0.0.9", "::ffff:10.0.0.5", False, 403),
        ("10.0.0.9", "10.0.0.5", True, 200),
    ],
)
async def test_the_control_plane_answers_its_own_machine_unless_told_otherwise(
    client: str, server: str, opened: bool, expected: int, tmp_path: Path
) -> None:
    settings = GatewaySettings(ledger_dir=str(tmp_path), worker_url="http://127.0.0.1:9", control_open=opened)
    assert settings.host == "127.0.0.1"
    gateway = Gateway(settings, CONTROL)
    app = gateway.app()

    async def arriving(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": (server, 80)}, receive, send)

    transport = httpx.ASGITransport(arriving, client=(client, 1234))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"authorization": f"Bearer {CONTROL}"}
    ) as http:
        answer = await http.post("/training-token-capture/control/rollouts/r/freeze", json={})
    await gateway.close()
    assert answer.status_code == expected
    assert (tmp_path / "r.frozen").exists() is (expected == 200)


@pytest.mark.parametrize(
    ("action", "body", "says"),
    [
        ("freeze", b"{torn", "The body is no JSON"),
        ("freeze", b"[]", "Expected a JSON object with no other fields than"),
        ("freeze", b'{"reward": 1}', "Expected a JSON object with no other fields than"),
        ("freeze", b'{"response": "resp-1"}', "`response` must be the scored object, or null"),
        ("freeze", b'{"terminal_response_id": 5}', "`terminal_response_id` must be a string, or null"),
        ("seal", b'{"reward": true}', "`reward` must be a number, got True"),
        ("seal", b'{"failure_reason": 5}', "`failure_reason` must be a string, or null"),
        ("seal", b'{"on_no_witness": "guess"}', "`on_no_witness` must be 'mask' or 'heuristic'"),
    ],
)
async def test_a_wrong_control_call_is_refused_in_words_and_closes_nothing(
    stack: Stack, action: str, body: bytes, says: str
) -> None:
    url = f"{stack.url}/training-token-capture/control/rollouts/left.open/{action}"
    answer = await stack.http.post(url, headers=TOKEN, content=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert (await stack.http.post(f"{stack.url}/ng-rollout/left.open/v1/responses", json=ASKS)).is_success
