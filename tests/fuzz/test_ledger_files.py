"""Ledger files with anything done to their bytes: typed errors, and no row but the true one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from fuzz import truth
from fuzz.mutations import ROUND, mutated_json, mutated_lines, play
from hypothesis import example, given
from hypothesis import strategies as st

from workbench import runs
from workbench.errors import LedgerError, ReceiptRejected, RunStoreError, WireError
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import LedgerStore
from workbench.wire import Cause

with tempfile.TemporaryDirectory() as folder:
    FILE = truth.write_ledger(Path(folder)).read_bytes()
    ITEMS = (Path(folder) / f"{truth.R}.items.jsonl").read_bytes()
LINES = [orjson.loads(line) for line in FILE.splitlines()]


def rows_of(file: bytes) -> str:
    """Do with a ledger file everything that the product does with one. What came of it: a row or the error's name."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / f"{truth.R}.lineage.jsonl").write_bytes(file)
        (directory / f"{truth.R}.items.jsonl").write_bytes(ITEMS)
        try:
            ledger = runs.open_ledger(directory)
            assert ledger.rollouts.height == 1 and ledger.calls.height <= file.count(b"\n")
        except RunStoreError:
            pass
        store = LedgerStore(directory)
        try:
            for parent, asked, _ in truth.CALLS.values():
                resolution = store.resolve(truth.R, asked)
                # A call may be lost to its children or have lost its name, but is never exchanged for another.
                assert resolution.parent in (parent, None) or resolution.parent not in truth.CALLS
                assert parent is None or resolution.status != "root"
            store.admit(truth.R, truth.CALLS["c2"][1], "c9")
            receipt = truth.receipt_for(store)
            staged = truth.staged_for(receipt)
            row = None if staged is None else verify_and_linearize(receipt, staged)
            store.record_failure(truth.R, "c8", "worker_capture_failed")
            store.freeze(truth.R)
        except (LedgerError, WireError, ReceiptRejected) as error:
            return type(error).__name__
        if row is None:
            return "missing"
        assert row.model_call_ids[-1] == "c2"
        truth.assert_true(row)
        return "row"


def test_the_file_as_it_was_written_gives_the_row() -> None:
    assert rows_of(FILE) == "row"


def test_bytes_and_lines() -> None:
    @ROUND
    @given(mutated_lines(FILE))
    @example(FILE[:-1])
    @example(FILE + FILE)
    @example(b"\n" + FILE)
    @example(b"")
    def lines(file: bytes) -> None:
        rows_of(file)

    play(lines)


def test_values_of_a_row() -> None:
    @ROUND
    @given(st.data())
    def values(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(LINES) - 1))
        mutated = data.draw(mutated_json(LINES[at], most=2))
        rows_of(json_lines([mutated if i == at else line for i, line in enumerate(LINES)]))

    play(values)


FOUND = [(4, "model_call_id", ["c4"]), (4, "detail", ["HTTP 400"]), (4, "failure_reason", [1]), (0, "context_len", [1])]
FOUND += [(0, "fingerprint", ["f"]), (0, "staging_chain", 3), (0, "prompt_options", {}), (0, "model_call_id", "")]
FOUND += [(1, "staging_chain", ["", "run.0.0.0/c1"]), (4, "model_call_id", "")]


@pytest.mark.parametrize(("line", "column", "value"), FOUND)
def test_an_odd_column_is_corruption_of_that_rollout(line: int, column: str, value: Any) -> None:
    assert rows_of(json_lines([{**row, column: value} if i == line else row for i, row in enumerate(LINES)])) == (
        "LedgerCorrupt"
    )


def test_a_row_under_the_id_of_another_call_is_believed_neither_way() -> None:
    """The last call's row renamed to its parent's id: its response must not elect the parent's shorter row."""
    assert rows_of(json_lines([{**row, "model_call_id": "c1"} if i == 2 else row for i, row in enumerate(LINES)])) == (
        "ReceiptRejected"
    )


def test_the_digests_beside_a_ledger_cost_a_diagnosis_at_most() -> None:
    noted = [orjson.loads(line) for line in ITEMS.splitlines()]
    came = [*truth.CALLS["c1"][1], {"role": "assistant", "content": "It pours."}, {"role": "user", "content": "so?"}]

    @ROUND
    @given(mutated_lines(ITEMS) | mutated_json(noted).map(json_lines))
    @example(ITEMS)
    @example(b"null\n" + ITEMS)
    @example(json_lines([noted[0] | {"model_call_id": []}]))
    def items(sidecar: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            (directory / f"{truth.R}.lineage.jsonl").write_bytes(FILE)
            (directory / f"{truth.R}.items.jsonl").write_bytes(sidecar)
            admitted = LedgerStore(directory).admit(truth.R, came, "c9")
            assert admitted.admission is None and admitted.drift is not None
            if sidecar == ITEMS:
                assert admitted.drift.cause is Cause.ASSISTANT_TEXT_CHANGED

    play(items)


def json_lines(values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in (values if isinstance(values, list) else [values]))
