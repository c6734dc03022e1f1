"""The contract's corpora of ledger, attribution and terminal heuristic, every case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from workbench.ledger import LedgerStore, attribute_terminal, select_terminal
from workbench.wire import CallRecord

CORPORA = Path(__file__).resolve().parents[1] / "conformance"


def cases(kind: str) -> list[Any]:
    lines = (CORPORA / f"{kind}.jsonl").read_bytes().splitlines()
    return [pytest.param(orjson.loads(line), id=f"{kind}-{number}") for number, line in enumerate(lines)]


@pytest.mark.parametrize("case", cases("attribution"))
def test_attribution(case: dict[str, Any]) -> None:
    given = case["input"]
    records = [CallRecord.model_validate(record) for record in given["records"]]
    found = attribute_terminal(records, given["response"], given["declared_response_id"])
    assert {"terminal": found.terminal, "method": found.method, "reason": found.reason} == case["expect"]


@pytest.mark.parametrize("case", cases("terminal_heuristic"))
def test_heuristic(case: dict[str, Any]) -> None:
    found = select_terminal([CallRecord.model_validate(record) for record in case["input"]])
    assert {"terminal": found.terminal, "reason": found.reason} == case["expect"]


@pytest.mark.parametrize("case", cases("ledger"))
def test_ledger(case: dict[str, Any], tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    rollout_id = case["expect"]["manifest"]["rollout_id"]
    for operation in case["input"]:
        match operation["op"]:
            case "resolve":
                found = store.resolve(rollout_id, operation["request"])
                assert {
                    "status": found.status,
                    "parent": found.parent,
                    "staging_chain": list(found.staging_chain),
                    "prev_len": found.prev_len,
                    "chain_hash": found.chain_hash,
                } == operation["expect"]
            case "record":
                store.record(operation["commit"])
            case "record_failure":
                store.record_failure(rollout_id, operation["model_call_id"], operation["reason"])
    assert (tmp_path / f"{rollout_id}.lineage.jsonl").read_text() == case["expect"]["file"]
    assert store.manifest(rollout_id).model_dump(mode="json") == case["expect"]["manifest"]
    # Another process reads the same from the file alone.
    assert LedgerStore(tmp_path).manifest(rollout_id) == store.manifest(rollout_id)
