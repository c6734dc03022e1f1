"""From ledger file to row: one changed byte in what binds a call to its tokens is refused by reader or verifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chains import Chain

from workbench.errors import LedgerCorrupt, ReceiptRejected
from workbench.finalizer import verify_and_linearize
from workbench.ledger import LedgerStore
from workbench.wire import RolloutCommit, RolloutReceipt

ROLLOUT = "run.g.0.0"
BINDING = (
    "chain_hash",
    "cum_len",
    "cumulative_hash",
    "delta_len",
    "extras_digest",
    "mode",
    "model_call_id",
    "parent_call_id",
    "prev_len",
    "staging_digest",
    "weight_version",
)


def written(directory: Path) -> tuple[Chain, Path]:
    chain = Chain(ROLLOUT, weight_version=2)
    chain.call()
    chain.call("c0")
    store = LedgerStore(directory)
    items = [{"role": "user", "content": "a"}]
    for number, record in enumerate(chain.records):
        reply = [{"role": "assistant", "content": f"reply {number}"}]
        staging_chain = [row.staging_key for row in chain.records[: number + 1]]
        commit = RolloutCommit(rollout_id=ROLLOUT, record=record, staging_chain=staging_chain)
        store.record(commit, items, reply)
        items = [*items, *reply, {"role": "user", "content": "go on"}]
    return chain, directory / f"{ROLLOUT}.lineage.jsonl"


def verify(directory: Path, chain: Chain) -> list[int]:
    manifest = LedgerStore(directory).manifest(ROLLOUT)
    receipt = RolloutReceipt(
        rollout_id=ROLLOUT,
        reward=1.0,
        terminal_model_call_id="c1",
        terminal_selection="declared",
        manifest=manifest.records,
    )
    return verify_and_linearize(receipt, chain.staged).token_ids.tolist()


def test_an_untouched_ledger_gives_the_row(tmp_path: Path) -> None:
    chain, _ = written(tmp_path)
    assert verify(tmp_path, chain) == chain.ids["c1"].tolist()


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize("column", BINDING)
def test_one_changed_byte_of_a_ledger_row_is_refused(line: int, column: str, tmp_path: Path) -> None:
    chain, path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    key = f'"{column}":'.encode()
    start = lines[line].index(key) + len(key)
    value = json.dumps(json.loads(lines[line])[column]).encode()
    assert lines[line][start:].startswith(value)
    for byte in range(start, start + len(value)):
        changed = bytearray(lines[line])
        changed[byte] ^= 1
        path.write_bytes(b"".join([*lines[:line], bytes(changed), *lines[line + 1 :]]))
        # ValueError: a call that lost its row cannot be the terminal of a receipt.
        with pytest.raises((LedgerCorrupt, ReceiptRejected, ValueError)):
            verify(tmp_path, chain)
