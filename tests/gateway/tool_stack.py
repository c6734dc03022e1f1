"""A gateway over a scripted worker whose chat template renders tools and tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from capture.templates import QWEN

from conftest import CONTROL, WORKER, Stack, gateway_over
from workbench import models
from workbench.capture.staging import MemorySink
from workbench.gateway.client import ControlClient
from workbench.gateway.settings import WORKER_TOKEN
from workbench.serving.worker import PolicyServer, WorkerConfig

WINDOW = 2048
SAMPLING = {"temperature": 1.0, "max_tokens": 96}


def with_tool_template(folder: Path) -> Path:
    """The tiny model's tokenizer with a template that renders tool calls."""
    folder.mkdir()
    for path in Path(models.build("tiny")).iterdir():
        if "token" in path.name or path.name == "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": QWEN}))
    return folder


@contextlib.asynccontextmanager
async def tool_stack(folder: Path, model: Path, script: Iterable[dict[str, Any]]) -> AsyncIterator[Stack]:
    """`model` is a folder of `with_tool_template`, `script` the scripted engine's lines."""
    path = folder / "script.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, script)))
    config = WorkerConfig(
        model_path=str(model), engine="scripted", script_path=str(path), max_model_len=WINDOW, sampling=SAMPLING
    )
    sink = MemorySink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WORKER_TOKEN, WORKER)
        worker = PolicyServer(config, sink, sink)
    worker_url = await worker.start()
    async with (
        gateway_over(worker_url, folder / "ledger", sampling=SAMPLING) as (url, gateway),
        ControlClient(url, CONTROL) as control,
        httpx.AsyncClient(timeout=30.0) as http,
    ):
        yield Stack(url, gateway, worker, sink, control, http)
    await worker.stop()
