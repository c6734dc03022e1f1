"""Routes: the experts that a call's tokens went to, aligned with its delta.

    engine's rows [cum_len - 1, layers, topk] ──align_routes──▶ [delta_len, layers, topk] ──▶ extras.routed_experts
Row i of the engine's is the route of token i as *input*. The last sampled token was never one, so there is a row less
than tokens; the delta's last row is -1 throughout. A child's delta begins at prev_len, and so do its rows.
Invariants: rows that are not exactly one a position are left out and counted, never shifted to fit; a call without
routes is staged without them, whatever the reason.
Not here: how an engine comes to know them (`serving.expert_routes`), what a row makes of them (`finalizer.routes`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from workbench.capture.collect import CollectedCall
from workbench.errors import WireError
from workbench.wire import CaptureAdmission, Cause, encode_routes
from workbench.wire.extras import ROUTED_EXPERTS
from workbench.wire.routes import NO_ROUTE, widened

_LOG = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 10.0
"""How long a finished call waits for routes that its engine has to be asked for."""

TakeRoutes = Callable[[str, int, int], Awaitable[np.ndarray | None]]
"""`take_routes(model_call_id, start, end)`: rows of the input tokens [start, end), or None."""


def align_routes(rows: np.ndarray, prev_len: int, cum_len: int) -> np.ndarray:
    """The delta's routes [cum_len - prev_len, layers, topk] from those of the whole sequence, one row less than tokens.

    Unsigned ids are widened to the next signed dtype, so that -1 fits. Raises WireError for any other number of rows.
    """
    rows = np.asarray(rows)
    if rows.ndim != 3 or len(rows) != cum_len - 1:
        raise WireError(
            f"an engine that ran {cum_len} tokens gives routes [{cum_len - 1}, layers, topk], because the last one was "
            f"never an input; got {list(rows.shape)}"
        )
    return with_last(rows[prev_len:])


def with_last(rows: np.ndarray) -> np.ndarray:
    """Rows of a delta's inputs, and one of -1 for the token that was sampled last."""
    signed = widened(rows)
    return np.concatenate((signed, np.full((1, *rows.shape[1:]), NO_ROUTE, dtype=signed.dtype)))


class RouteCapture:
    """Adds routes to calls' extras. `take` asks the engine for rows that its outputs do not carry.

    `faults` counts calls that were staged without, by cause.
    """

    def __init__(self, take: TakeRoutes | None = None) -> None:
        self._take = take
        self.faults: Counter[str] = Counter()

    async def extras(self, admission: CaptureAdmission, collected: CollectedCall) -> dict[str, Any]:
        """`{"routed_experts": envelope}`, or {} where there are none that fit."""
        start, end = admission.prev_len, int(collected.prompt_ids.size + collected.sampled_ids.size)
        try:
            if collected.routed_experts is not None:
                values = align_routes(collected.routed_experts, start, end)
            else:
                rows = await self._taken(admission.model_call_id, start, end - 1)
                if rows is None:
                    return self._without(admission, Cause.ROUTE_MISSING, "the engine gave none")
                values = with_last(rows)
            return {ROUTED_EXPERTS: encode_routes(values)}
        except WireError as error:
            return self._without(admission, Cause.ROUTE_LENGTH_MISMATCH, str(error))
        except Exception as error:  # whatever an engine raises, the completion is there and is served
            return self._without(admission, Cause.ROUTE_MISSING, f"{type(error).__name__}: {error}")

    async def _taken(self, model_call_id: str, start: int, end: int) -> np.ndarray | None:
        if self._take is None:
            return None
        async with asyncio.timeout(TAKE_TIMEOUT_S):
            return await self._take(model_call_id, start, end)

    def _without(self, admission: CaptureAdmission, cause: Cause, why: str) -> dict[str, Any]:
        self.faults[cause.value] += 1
        _LOG.warning("call %s is staged without routed experts: %s: %s", admission.model_call_id, cause, why)
        return {}
