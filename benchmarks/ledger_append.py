"""Ledger append: one custody row, durable, beside a bare write and fsync of the same bytes to an open file."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import inputs
from benchmarks.measure import Figure, Growth, Sampler, alternate, median, ratio, wall
from workbench.ledger.journal import Journal, encode_line
from workbench.ledger.rows import custody_row
from workbench.ledger.store import LedgerStore
from workbench.wire import CallRecord, RolloutCommit

ROUNDS = 400
ROWS = (100, 200, 400, 800)


def bare(path: Path, line: bytes) -> Sampler:
    """Write and fsync to a file that stays open."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append() -> float:
        began = wall()
        os.write(descriptor, line)
        os.fsync(descriptor)
        return wall() - began

    return append


def journal(path: Path, row: dict[str, object]) -> Sampler:
    """Append to the journal: lock, look for what others wrote, write, fsync."""
    file = Journal(path, lambda number, value: None)

    def append() -> float:
        began = wall()
        with file.exclusive() as write:
            write(row)
        return wall() - began

    return append


def record(directory: Path) -> Sampler:
    """`LedgerStore.record` of one more call of one chain, each of few items; its row names the chain's staging keys."""
    store = LedgerStore(directory)
    requests, responses = inputs.conversation(2)
    numbers = itertools.count()
    keys: list[str] = []

    def append() -> float:
        made = CallRecord.model_validate(inputs.custody_record(next(numbers)))
        keys.append(made.staging_key)
        commit = RolloutCommit(
            rollout_id=inputs.ROLLOUT,
            record=made,
            staging_chain=list(keys),
            request_items=requests[0],
            response_items=responses[0],
        )
        began = wall()
        store.record(commit)
        return wall() - began

    return append


_ROOT = {"parent_call_id": None, "prev_len": 0, "cum_len": 1_000, "mode": "text"}


def measure() -> list[Figure | Growth]:
    """Over a bare write and fsync, and whether it grows with the rows that are there."""
    requests, responses = inputs.conversation(2)
    made = CallRecord.model_validate({**inputs.custody_record(0), **_ROOT})
    row = custody_row(made, [made.staging_key], requests[0], responses[0], {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sides = {
            "bare": bare(folder / "bare", encode_line(row)),
            "journal": journal(folder / "journal", row),
            "record": record(folder),
        }
        samples = alternate(sides, ROUNDS)
        name, bound = "ledger append", 1.3
        added_us = 1e6 * float(np.median(samples["journal"] - samples["bare"]))
        figures: list[Figure | Growth] = [
            ratio(
                f"{name}: over a bare write + fsync",
                samples["journal"],
                samples["bare"],
                at_most=bound,
                note=f"Lock, look for what others wrote, spell the row as the reference does, read it back: "
                f"{added_us:.0f} µs here, beside the disk's own time. That is within the target where a bare write and "
                f"fsync takes {added_us / (bound - 1):.0f} µs or more.",
            ),
            median(f"{name}: a bare write + fsync", samples["bare"], "µs", 1e6),
            median(f"{name}: the journal", samples["journal"], "µs", 1e6),
            median(
                f"{name}: the whole commit of a call",
                samples["record"],
                "µs",
                1e6,
                note="Row and hashes of its conversation, the append, and the items that a diagnosis of drift reads.",
            ),
        ]
        append, seconds = record(folder / "growing"), []
        there = 0
        for rows in ROWS:
            while there < rows - 50:
                append()
                there += 1
            seconds.append(float(np.median([append() for _ in range(50)])))
            there += 50
    figures.append(
        Growth(
            "commit of one call",
            "calls of the chain before it",
            [float(rows) for rows in ROWS],
            seconds,
            note="A row names the staging keys of its whole chain, by contract: 20 to 30 bytes a call before it. The "
            "number of rows does not enter.",
        )
    )
    return figures
