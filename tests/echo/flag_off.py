"""One flag-off rollout group on a scripted engine, and everything that went over the wire and into the engine.

    python flag_off.py SCRIPT.jsonl [--without-capture]      prints JSON: {requests, engine, rows, imported}
With the flag, `workbench.capture` cannot be imported: it raises for whoever tries. Run as a program of its own, because
an import that has happened cannot be taken back.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any


class Forbidden:
    """A finder that lets nobody import capture."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "workbench.capture" or name.startswith("workbench.capture."):
            raise ImportError(f"{name} is forbidden in this run")


if "--without-capture" in sys.argv:
    sys.meta_path.insert(0, Forbidden())  # type: ignore[arg-type]

from workbench import models  # noqa: E402
from workbench.campaign.echo_rollouts import EchoPlayer  # noqa: E402
from workbench.campaign.environments import make_environment  # noqa: E402
from workbench.campaign.rollouts import RolloutPlan  # noqa: E402
from workbench.config import load_recipe  # noqa: E402
from workbench.echo.finalizer import EchoFinalizer  # noqa: E402
from workbench.echo.rows import assemble_echo  # noqa: E402
from workbench.finalizer.messages import FinalizationRequest  # noqa: E402
from workbench.gateway.process import GatewayProcess  # noqa: E402
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN  # noqa: E402
from workbench.serving.sampling import SamplingPins  # noqa: E402
from workbench.serving.settings import WorkerConfig  # noqa: E402
from workbench.serving.worker import PolicyServer  # noqa: E402

N = 3


class Wire:
    """ASGI middleware that writes down what comes in and what goes out."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] == "/workbench/status":
            await self.app(scope, receive, send)
            return
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        entry = {"path": scope["path"], "headers": sorted(set(headers) - {"host"}), "asked": "", "answered": ""}
        self.seen.append(entry)

        async def receiving() -> Any:
            message = await receive()
            entry["asked"] += message.get("body", b"").decode()
            return message

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            entry["answered"] += message.get("body", b"").decode()
            await send(message)

        await self.app(scope, receiving, sending)


def normalised(text: str) -> str:
    """Ids and times are minted anew in every run."""
    text = re.sub(r"(chatcmpl-|call_)[0-9a-f]+", r"\1ID", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def main(script: str) -> dict[str, Any]:
    os.environ[WORKER_TOKEN], os.environ[CONTROL_TOKEN] = "worker", "control"
    folder = Path(script).parent
    model = str(models.build("tiny"))
    server = PolicyServer(
        WorkerConfig(model_path=model, engine="scripted", script_path=script, capture_enabled=False, max_model_len=512)
    )
    wires: list[Wire] = []
    serve = server._serve

    async def serve_watched(app: Any) -> None:
        wires.append(Wire(app))
        await serve(wires[0])

    server._serve = serve_watched  # type: ignore[method-assign]
    url = await server.start()
    ran: list[dict[str, Any]] = []
    generate = server.engine.generate

    def generate_watched(prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
        ran.append({"prompt": prompt, "params": {k: v for k, v in vars(params).items() if k != "line"}})
        return generate(prompt, params, request_id, **kwargs)

    server.engine.generate = generate_watched
    settings = {"ledger_dir": str(folder / "ledger"), "worker_url": url, "capture_enabled": False}
    gateway = await asyncio.to_thread(GatewayProcess.start, settings)
    shares = ["environment.misbehave.retry=0.4", "environment.misbehave.stream=0.5"]
    environment = make_environment(load_recipe("cpu_smoke", ["environment.name=guess_number", *shares]))
    finalizer = EchoFinalizer(folder, 0, 10.0)
    player = EchoPlayer(
        finalizer=finalizer,
        sampling=SamplingPins(max_tokens=32),
        weight_version=lambda: 0,
        gateway_url=gateway.url,
        environment=environment,
        model="policy",
        timeout_s=60.0,
        request_timeout_s=30.0,
        seed=1,
    )
    try:
        task = environment.task(0)
        # One after the other, so that both runs write down the same order.
        outcomes = [await player.play(RolloutPlan("run", 0, index, 0, task)) for index in range(N)]
    finally:
        await player.close()
        await asyncio.to_thread(gateway.stop)
        await server.stop()
    request = FinalizationRequest(group_id="g0", weight_version=0, rollouts=outcomes)
    assembly = assemble_echo(request, finalizer.chains, 0)
    return {
        "requests": [
            {name: normalised(value) if isinstance(value, str) else value for name, value in entry.items()}
            for entry in wires[0].seen
        ],
        "engine": ran,
        "rows": [
            [row.token_ids.tolist(), row.token_mask.tolist(), row.logprobs.tolist(), summary.cause, summary.position]
            for row, summary in zip(assembly.rows, assembly.summaries, strict=True)
        ],
        "ledger": sorted(path.name for path in (folder / "ledger").glob("*")),
        "imported": sorted(name for name in sys.modules if name.startswith("workbench.capture")),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1])), default=str))
