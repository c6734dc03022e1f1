"""Receipts, staged calls, admissions, extras, route envelopes with anything done to them: typed errors, true rows."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import orjson
from fuzz import truth
from fuzz.mutations import ROUND, junk, mutated_bytes, mutated_json, play
from hypothesis import example, given
from pydantic import ValidationError

from workbench.capture import CaptureCore
from workbench.capture.staging import MemorySink
from workbench.errors import CaptureError, ReceiptRejected, WireError
from workbench.finalizer.verify import verify_and_linearize
from workbench.wire import (
    CaptureAdmission,
    RolloutReceipt,
    StagedCall,
    decode_routes,
    encode_routes,
    extras_digest,
)

RECEIPT = truth.chain().receipt("c2").model_dump(mode="json")
STAGED = [call.model_dump(mode="json") for call in truth.chain().staged]


def row_of(receipt: Any, staged: list[Any]) -> None:
    """Parse and verify; whatever comes out as a row is the true one of its terminal."""
    try:
        parsed = RolloutReceipt.model_validate(receipt)
        calls = [StagedCall.model_validate(call) for call in staged]
    except ValidationError:
        return
    stored = {call.staging_key: call for call in calls}
    try:
        row = verify_and_linearize(parsed, [stored[r.staging_key] for r in parsed.manifest if r.staging_key in stored])
    except ReceiptRejected as rejected:
        assert rejected.cause
        return
    truth.assert_true(row)


def test_receipts() -> None:
    @ROUND
    @given(mutated_json(RECEIPT))
    @example(RECEIPT)
    def receipts(receipt: Any) -> None:
        row_of(receipt, STAGED)

    play(receipts)


def test_staged_calls() -> None:
    @ROUND
    @given(mutated_json(STAGED))
    @example(STAGED)
    def staged_calls(staged: Any) -> None:
        row_of(RECEIPT, staged if isinstance(staged, list) else [staged])

    play(staged_calls)


PREFIX = [5, 6, 7, 8]
ADMISSION = CaptureAdmission(
    rollout_id=truth.R,
    model_call_id="c1",
    parent_call_id="c0",
    prev_len=len(PREFIX),
    mode="token_in",
    staging_chain=[f"{truth.R}/c0"],
    parent_chain_hash="1" * 64,
)


def capture_under(header: str) -> None:
    """Read an admission, begin and complete a call under it; what is staged verifies and begins with the prefix."""
    try:
        admission = CaptureAdmission.from_header(header)
    except (WireError, ValidationError):
        return
    sink = MemorySink()
    core = CaptureCore(sink, lambda: 0, sink_timeout_s=None, on_failure=lambda failure: None)
    child = admission.mode == "token_in"
    try:
        call = core.begin(admission, PREFIX if child else None)
    except CaptureError:
        return
    coords = core.complete(call, prompt_token_ids=[*PREFIX, 9], generated_token_ids=[10], logprobs=[-0.5])
    if coords.disposition == "staged":
        (key,) = sink.rows
        assert key == coords.staging_key == f"{admission.rollout_id}/{admission.model_call_id}"
        assert coords.cum_len == 6 and coords.prev_len == (4 if child else 0)


def test_admissions() -> None:
    fields = ADMISSION.model_dump(mode="json")

    @ROUND
    @given(
        mutated_json(fields).map(lambda value: base64.urlsafe_b64encode(as_json(value)).decode())
        | mutated_bytes(ADMISSION.to_header().encode()).map(lambda header: header.decode("latin-1"))
    )
    @example(ADMISSION.to_header())
    def admissions(header: str) -> None:
        capture_under(header)

    play(admissions)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_extras_and_routes() -> None:
    routes = encode_routes(np.arange(24, dtype=np.int16).reshape(4, 3, 2))

    @ROUND
    @given(junk, junk, mutated_bytes(routes.encode()).map(lambda text: text.decode("latin-1")) | junk)
    @example({"a": 1}, {"a": 1.0}, routes)
    @example({"a": True}, {"a": 1}, [[[1, 2]], [[3]]])
    def trees(one: Any, other: Any, envelope: Any) -> None:
        digests = []
        for tree in (one, other):
            try:
                digests.append(extras_digest(tree))
            except WireError:
                digests.append(None)
        if digests[0] is not None and digests[0] == digests[1]:
            assert orjson.dumps(one, option=orjson.OPT_SORT_KEYS) == orjson.dumps(other, option=orjson.OPT_SORT_KEYS)
        try:
            decoded = decode_routes(envelope)
        except WireError:
            return
        assert decoded.values.ndim == 3 and 0 not in decoded.values.shape
        if isinstance(envelope, str):
            # The same values at least; the text may spell unused bits of its last digit otherwise.
            assert np.array_equal(decode_routes(encode_routes(decoded.values)).values, decoded.values)

    play(trees)
