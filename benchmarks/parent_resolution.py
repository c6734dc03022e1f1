"""Parent resolution: a rollout of 200 calls against a new ledger, and what a look-up costs as rows grow.

Whole rollout: for each call resolve its request, then record its row; with recording, fsyncs included, on both sides.
Look-up: the time of `resolve` less that of hashing the request, for one request against ledgers of several sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import inputs
from benchmarks.measure import Figure, Growth, Sampler, alternate, in_memory, median, medians, processor, timed, wall
from benchmarks.reference import against_reference
from workbench.ledger import LedgerStore, diagnose_drift
from workbench.ledger.items import CallItems
from workbench.ledger.journal import encode_line
from workbench.ledger.rows import custody_row
from workbench.wire import CallRecord, RolloutCommit, assistant_fingerprint, conversation_digest

CALLS = 200
SIZES = (50, 100, 200, 400)
ROWS = (100, 400, 1_600, 6_400)


def rollout(calls: int, recording: bool = True) -> Sampler:
    """A whole rollout, resolved and recorded call by call: the seconds of both, or of resolving alone."""
    requests, responses = inputs.conversation(calls)
    commits = [
        RolloutCommit(
            rollout_id=inputs.ROLLOUT,
            record=CallRecord.model_validate(inputs.custody_record(number)),
            staging_chain=[f"{inputs.ROLLOUT}/c{earlier:06d}" for earlier in range(number + 1)],
            request_items=request,
            response_items=response,
        )
        for number, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]

    def play() -> float:
        with tempfile.TemporaryDirectory(dir=None if recording else in_memory()) as scratch:
            store = LedgerStore(Path(scratch))
            resolving = whole = 0.0
            for request, commit in zip(requests, commits, strict=True):
                began, spent = wall(), processor()
                resolved = store.resolve(inputs.ROLLOUT, request)
                resolving += processor() - spent
                store.record(commit)
                whole += wall() - began
            assert resolved.parent == commits[-2].record.model_call_id
            return whole if recording else resolving

    return play


def look_up(rows: int, directory: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """`resolve` of a short request against a ledger of `rows` rows, and the hashing of that request alone."""
    requests, responses = inputs.conversation(4)
    lines = []
    for number in range(rows):
        # Roots of other tasks, and in the middle of them the one call that the request continues.
        request, response = requests[0], responses[0]
        if number != rows // 2:
            request = [{"role": "user", "content": f"Task {number}"}]
            response = [{"role": "assistant", "content": f"Answer {number}"}]
        record = CallRecord.model_validate({**inputs.custody_record(number), **_ROOT})
        lines.append(encode_line(custody_row(record, [record.staging_key], request, response, {})))
    (directory / f"{inputs.ROLLOUT}.{rows}.lineage.jsonl").write_bytes(b"".join(lines))
    store = LedgerStore(directory)
    asked = requests[1]
    assert store.resolve(f"{inputs.ROLLOUT}.{rows}", asked).status == "resolved"

    def hashing() -> None:
        assistant_fingerprint(asked)
        conversation_digest(asked[:1])

    return lambda: store.resolve(f"{inputs.ROLLOUT}.{rows}", asked), hashing


def diagnosis(calls: int) -> Callable[[], Any]:
    """Say what is wrong with a request that holds the whole conversation but for a change in its middle."""
    requests, responses = inputs.conversation(calls)
    recorded = [
        CallItems.of(
            f"c{number}",
            request,
            response,
            parent=f"c{number - 1}" if number else None,
            skip=len(requests[number - 1]) if number else 0,
        )
        for number, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]
    asked = list(requests[-1])
    asked[calls] = {**asked[calls], "content": "something else"}
    assert diagnose_drift(recorded, asked).position == calls
    return lambda: diagnose_drift(recorded, asked)


_ROOT = {"parent_call_id": None, "prev_len": 0, "cum_len": 1_000, "mode": "text"}


def measure() -> list[Figure | Growth]:
    """Against the reference's file ledger, the look-up, and how a rollout's total grows."""
    figures: list[Figure | Growth] = []
    name = "parent resolution, rollout of 200 calls"
    asked = {"calls": CALLS, "recording": False}
    figures += against_reference(name, rollout(CALLS, False), "resolution", asked, rounds=5, at_least=3.0)
    name = "resolving and recording, rollout of 200 calls"
    note = "200 fsyncs are in both, so this ratio goes to 1 as the disk gets slower."
    asked = {"calls": CALLS, "recording": True}
    figures += against_reference(name, rollout(CALLS), "resolution", asked, rounds=5, note=note)
    beside = []
    with tempfile.TemporaryDirectory() as scratch:
        for rows in ROWS:
            resolve, hashing = look_up(rows, Path(scratch))
            sides = {"resolve": timed(resolve, repeats=50), "hashing": timed(hashing, repeats=50)}
            samples = alternate(sides, rounds=41)
            beside.append(samples["resolve"] - samples["hashing"])
    figures.append(median("look-up beside hashing the request, 6,400 rows", beside[-1], "µs", 1e6))
    figures.append(
        Growth(
            "look-up beside hashing the request",
            "rows in the ledger",
            [float(rows) for rows in ROWS],
            [max(float(np.median(values)), 1e-9) for values in beside],
            note="Flat: the number of rows does not enter.",
        )
    )
    diagnosing = alternate({str(calls): timed(diagnosis(calls)) for calls in SIZES}, rounds=5)
    figures.append(
        Growth(
            "diagnosis of a request that continues no call",
            "calls of the rollout",
            [float(calls) for calls in SIZES],
            medians(diagnosing, SIZES),
            note="Most of it are the digests of the request's own items, two a call.",
        )
    )
    grown = alternate({str(calls): rollout(calls, recording=False) for calls in SIZES}, rounds=5)
    figures.append(
        Growth(
            "parent resolution, a whole rollout",
            "items hashed by contract",
            [float(sum(2 * number + 1 for number in range(calls))) for calls in SIZES],
            medians(grown, SIZES),
            note="Each request holds the whole history, so the items to hash grow with the square of the calls.",
        )
    )
    return figures
