"""Capture: exact ids and log-probs of every call, taken where they are made and stored before the answer leaves.

`CaptureCore` turns one finished call into one durable delta; `TransferQueueSink` and `TransferQueueSource` write and
read deltas in TransferQueue and are loaded when they are first used, so importing this package needs no Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.capture.core import ActiveCall, CaptureCore, CaptureFailure, StagingSink, StagingSource

if TYPE_CHECKING:
    from workbench.capture.staging import TransferQueueSink, TransferQueueSource

__all__ = [
    "ActiveCall",
    "CaptureCore",
    "CaptureFailure",
    "StagingSink",
    "StagingSource",
    "TransferQueueSink",
    "TransferQueueSource",
]


def __getattr__(name: str) -> Any:
    if name in ("TransferQueueSink", "TransferQueueSource"):
        from workbench.capture import staging

        return getattr(staging, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
