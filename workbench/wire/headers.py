"""Headers: what gateway and policy worker tell each other beside a request and its answer. No token is ever in one."""

from __future__ import annotations

from typing import Final

ROLLOUT_HEADER: Final = "x-workbench-rollout"
"""Request: the rollout that it belongs to; without it a request is untagged."""
ADMISSION_HEADER: Final = "x-workbench-admission"
"""Request: `CaptureAdmission.to_header`."""
CAPTURED_HEADER: Final = "x-workbench-captured"
"""Answer that was captured before its first byte left: the JSON that `GET /workbench/capture/<call>` would give."""
