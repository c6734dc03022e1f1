"""The gateway as a process: it starts, refuses to start in one line, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conftest import listening
from workbench import recipe_schema
from workbench.errors import ComponentDied, SetupError
from workbench.gateway.client import ControlClient
from workbench.gateway.process import GatewayProcess, parse_settings
from workbench.gateway.settings import CONTROL_TOKEN

SECRET = "never-to-be-seen"


def settings(tmp_path: Path, **changed: object) -> dict[str, object]:
    return {"ledger_dir": str(tmp_path / "ledger"), "worker_url": "http://127.0.0.1:9", **changed}


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


async def test_starts_serves_refuses_a_second_on_its_port_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, SECRET)
    gateway = GatewayProcess.start(settings(tmp_path))
    try:
        async with ControlClient(gateway.url, SECRET) as control:
            assert (await control.freeze("r"))["manifest"]["records"] == []
        assert SECRET not in " ".join(psutil.Process(gateway.pids[0]).cmdline())
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{gateway.url}/health")).json()["status"] == "ok"
        port = int(gateway.url.rsplit(":", 1)[1])
        with pytest.raises(SetupError, match=rf"cannot listen on 127.0.0.1:{port}.*gateway.port") as refused:
            GatewayProcess.start(settings(tmp_path, port=port))
        assert "\n" not in str(refused.value)
    finally:
        gateway.stop()
    assert gone(gateway.pids[0])
    with pytest.raises(ComponentDied, match=r"gateway is gone.*freeze of rollout r"):
        async with ControlClient(gateway.url, SECRET) as control:
            await control.freeze("r")


def test_a_wrong_setting_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="prot"):
        GatewayProcess.start(settings(tmp_path, prot=3))


def test_what_a_recipe_says_of_the_gateway_is_what_it_is_told(tmp_path: Path) -> None:
    said = recipe_schema.Gateway(workers=4, control_open=True, client_timeout_s=7.0)
    told = parse_settings(settings(tmp_path, **said.model_dump()))
    assert {name: getattr(told, name) for name in recipe_schema.Gateway.model_fields} == said.model_dump()
    with pytest.raises(ValidationError, match="workers"):
        recipe_schema.Gateway(workers=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_without_a_control_token_it_refuses(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTROL_TOKEN, raising=False)
    before = set(psutil.Process().children())
    with pytest.raises(SetupError, match=CONTROL_TOKEN):
        GatewayProcess.start(settings(tmp_path, workers=workers))
    assert set(psutil.Process().children()) <= before, "the others are not left behind"


async def test_calls_that_are_under_way_when_it_stops_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, SECRET)
    routes = ("/ng-rollout/r/v1/chat/completions", "/v1/chat/completions")
    asked, over = asyncio.Semaphore(0), asyncio.Event()

    async def too_late(request: Request) -> Response:
        asked.release()
        await over.wait()
        return Response(status_code=500)

    async with listening(Starlette(routes=[Route("/{path:path}", too_late, methods=["POST"])])) as worker_url:
        gateway = await asyncio.to_thread(GatewayProcess.start, settings(tmp_path, worker_url=worker_url))
        try:
            async with httpx.AsyncClient(timeout=60.0) as http:
                body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
                calls = [asyncio.create_task(http.post(gateway.url + route, json=body)) for route in routes]
                for _ in routes:
                    await asyncio.wait_for(asked.acquire(), 30)
                await asyncio.to_thread(gateway.stop)
                answers = await asyncio.gather(*calls)
        finally:
            over.set()
            gateway.stop()
    for told in answers:
        assert (told.status_code, told.json()["error"]["code"]) == (503, "gateway_stopping")


def test_it_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from workbench.gateway.process import GatewayProcess\n"
        f"gateway = GatewayProcess.start({settings(tmp_path, workers=2)!r})\n"
        "print(*gateway.pids, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, CONTROL_TOKEN: SECRET}
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for pid in pids:
        wait_until_gone(pid)
