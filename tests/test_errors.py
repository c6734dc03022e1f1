"""Errors come through Ray, which pickles them, as they were raised: with their cause, call and position."""

from __future__ import annotations

import pickle

import pytest

from workbench.errors import CaptureError, ReceiptRejected, StagingError, WorkbenchError
from workbench.wire import Cause


@pytest.mark.parametrize(
    "error",
    [
        StagingError("the row is gone", cause=Cause.MISSING_STAGING_ROW, key="r.0.0.0/c1"),
        ReceiptRejected(Cause.CORRUPT_DIGEST, call_id="c1", position=7, detail="a token was changed"),
        CaptureError("n=2"),
    ],
)
def test_an_error_comes_back_from_another_process_whole(error: WorkbenchError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
