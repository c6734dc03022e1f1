"""Requests in every API with anything done to them, through a gateway and the scripted worker.

Each plays in a rollout that already has two calls. Whatever comes, the agent gets an answer of its API, nothing that
was sampled becomes another call's prompt in a root, and the row of the two good calls stays the true one or none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from fuzz.mutations import ROUND, junk, mutated_bytes, mutated_json, play
from gateway.tellers import Items, Teller
from hypothesis import given
from hypothesis import strategies as st

from workbench import models
from workbench.capture.staging import MemorySink
from workbench.errors import ReceiptRejected
from workbench.finalizer.verify import LinearizedRow, verify_and_linearize
from workbench.gateway.app import Gateway
from workbench.gateway.settings import WORKER_TOKEN, GatewaySettings
from workbench.ledger import assemble_receipt
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer
from workbench.wire import assistant_fingerprint

SCRIPT = [
    {"text": 'I look. <tool_call>{"name": "search", "arguments": {"query": "Rome"}}</tool_call>'},
    {"text": "It rains."},
]
SAMPLING = {"temperature": 1.0, "max_tokens": 48}


class House:
    """Gateway and worker in an event loop of their own; requests go in without a socket between agent and gateway."""

    def __init__(self, folder: Any, patch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.sink = MemorySink()
        self.ids = itertools.count()
        script = folder / "script.jsonl"
        script.write_bytes(b"\n".join(map(orjson.dumps, SCRIPT)))
        patch.setenv(WORKER_TOKEN, "worker-token-of-the-tests")
        self.worker = PolicyServer(
            WorkerConfig(
                model_path=str(models.build("tiny")),
                engine="scripted",
                script_path=str(script),
                max_model_len=2048,
                sampling=SAMPLING,
            ),
            self.sink,
            self.sink,
        )
        url = self.run(self.worker.start())
        self.gateway = Gateway(
            GatewaySettings(
                ledger_dir=str(folder / "ledger"), worker_url=url, sampling=SAMPLING, request_timeout_s=20.0
            ),
            "control-token-of-the-tests",
            "worker-token-of-the-tests",
        )
        self.agent = httpx.AsyncClient(transport=httpx.ASGITransport(self.gateway.app()), base_url="http://gateway")

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60.0)

    def close(self) -> None:
        self.run(self.agent.aclose())
        self.run(self.gateway.close())
        self.run(self.worker.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10.0)
        self.loop.close()

    def post(self, rollout_id: str, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.run(self.agent.post(f"/ng-rollout/{rollout_id}{path}", content=content, headers=headers or {}))

    def row(self, rollout_id: str, response: Any) -> LinearizedRow | None:
        """The row that the rollout gives for the scored response; None where it is rejected."""
        manifest = self.gateway.custodian.store.manifest(rollout_id)
        receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0, response=response)
        staged = self.run(self.sink.fetch([record.staging_key for record in receipt.manifest]))
        try:
            return verify_and_linearize(receipt, staged)
        except ReceiptRejected as rejected:
            assert rejected.cause
            return None


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with pytest.MonkeyPatch.context() as patch:
        house = House(tmp_path_factory.mktemp("fuzz"), patch)
        yield house
        house.close()


class Rollout:
    """Two good calls in one API, and the request that would be the third."""

    def __init__(self, house: House, name: str) -> None:
        self.house, self.say = house, Teller(name)
        self.rollout_id = f"fuzz.{next(house.ids)}"
        history = self.say.user("weather?")
        self.first = self.ask(history)
        call_id = self.call_id(self.first)
        self.history = history + self.answer(self.first) + self.say.results([(call_id, "rain")])
        self.second = self.ask(self.history)
        self.whole = self.history + self.answer(self.second) + self.say.user("and then?")
        self.true = house.row(self.rollout_id, self.second)
        assert self.true is not None and len(self.true.model_call_ids) == 2

    def ask(self, history: Items) -> dict[str, Any]:
        told = self.post(orjson.dumps(self.say.body(history) | {"model": "policy"}))
        assert told.status_code == 200, (told.text, history)
        return told.json()

    def post(self, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.house.post(self.rollout_id, self.say.dialect.path, content, headers)

    def answer(self, served: dict[str, Any]) -> Items:
        return self.say.dialect.response_items(served)

    def call_id(self, served: dict[str, Any]) -> str:
        (item,) = [item for item in self.answer(served) if self.say.name != "responses" or "call_id" in item]
        if self.say.name == "chat":
            return item["tool_calls"][0]["id"]
        if self.say.name == "responses":
            return item["call_id"]
        return next(block["id"] for block in item["content"] if block["type"] == "tool_use")

    def check_after(self, content: bytes, told: httpx.Response) -> None:
        """What must hold whatever was sent."""
        assert b"Traceback" not in told.content and told.status_code in range(200, 600)
        manifest = self.house.gateway.custodian.store.manifest(self.rollout_id)
        if told.status_code >= 400:
            error = told.json()["error"]
            assert error["message"] and told.status_code < 500, (told.status_code, told.text, content)
        else:
            # What goes on from the model's words is no root.
            for record in manifest.records[2:]:
                items = self.say.request_items_of(content)
                assert record.parent_call_id is not None or not assistant_fingerprint(items)
        row = self.house.row(self.rollout_id, self.second)
        if row is None:
            assert manifest.failures
            return
        assert self.true is not None
        assert row.model_call_ids == self.true.model_call_ids
        for name in ("token_ids", "token_mask", "logprobs"):
            assert np.array_equal(getattr(row, name), getattr(self.true, name)), name


headers = st.dictionaries(
    st.sampled_from(["x-request-id", "idempotency-key", "x-stainless-retry-count", "x-workbench-compaction"]),
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=9),
    max_size=2,
)


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_requests(house: House, name: str) -> None:
    @ROUND
    @given(st.data(), headers, st.booleans())
    def requests(data: st.DataObject, sent: dict[str, str], stream: bool) -> None:
        rollout = Rollout(house, name)
        truth = rollout.say.body(rollout.whole) | {"stream": stream}
        content = data.draw(mutated_json(truth).map(as_json) | mutated_bytes(orjson.dumps(truth)) | junk.map(as_json))
        rollout.check_after(content, rollout.post(content, sent))

    play(requests)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
