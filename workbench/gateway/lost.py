"""Lost calls: what becomes of a call whose gateway is gone and did not live to see its ledger row.

    it was answered ──▶ settled by whoever is asked for that answer, before the answer leaves
    else            ──▶ buried: a failure row, before the rollout is frozen, and before anything that an agent may have
                        seen of it can come back as a history
Invariant: what an agent gets or may have got of a lost call is in the ledger before it counts.
Not here: whether a call is lost, which request asks for it (retries).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from workbench.errors import LedgerConflict, RolloutFrozen
from workbench.gateway.asked import Asked
from workbench.gateway.custody import Call, Custodian
from workbench.gateway.delivery import SSE
from workbench.gateway.dialects import Dialect
from workbench.gateway.metrics import Metrics
from workbench.gateway.replay import Answer, Known, ReplayLog
from workbench.gateway.sse import split
from workbench.ledger import Admitted, Resolution
from workbench.wire import Cause


class LostCalls:
    """`alive`: whether a call's gateway runs and has the call in hand."""

    def __init__(self, custodian: Custodian, metrics: Metrics, alive: Callable[[Known], bool]) -> None:
        self._custodian = custodian
        self._metrics = metrics
        self._alive = alive

    def bury(self, log: ReplayLog, *, spare: str | None = None, seen_only: bool = False) -> None:
        """Give lost calls their failure row. Blocks. `seen_only`: those of which an agent may have seen something."""
        store = self._custodian.store
        with log.lock:
            log.refresh()
            lost = [
                known
                for known in list(log.unsettled.values())  # others settle their calls without the lock
                if known.call_id != spare and (known.content_left or not seen_only) and not self._alive(known)
            ]
            if not lost or store.frozen(log.rollout_id):
                return
            for known in lost:
                if not store.has_row(log.rollout_id, known.call_id):
                    self._write_failure(log.rollout_id, known)
                if known.state == "running":
                    log.lost(known.call_id)
                # Another gateway may have served it meanwhile, and its line was read with the one before.
                log.settled(known.call_id)

    async def settle(self, asked: Asked, log: ReplayLog, call_id: str, answer: Answer, raw: bytes) -> None:
        """Settle an answered call, as its gateway would have done, where it has no row yet."""
        if call_id not in log.unsettled:
            return
        if not await self._custodian.off_loop(self.has_row, log.rollout_id, call_id):
            admitted = await self._custodian.off_loop(self._admitted, log.rollout_id, call_id, answer)
            call = Call(
                log.rollout_id,
                call_id,
                asked.dialect,
                asked.items,
                asked.options,
                admitted,
                answer.admitted_at,
                asked.after,
                asked.stored_input,
            )
            await self._custodian.settle(call, _served(asked.dialect, answer.media_type, raw))
        log.settled(call_id)

    def has_row(self, rollout_id: str, call_id: str) -> bool:
        """Whether the ledger has nothing more to say of a call: what was frozen stays as it is. Blocks."""
        store = self._custodian.store
        return store.frozen(rollout_id) or store.has_row(rollout_id, call_id)

    def _admitted(self, rollout_id: str, call_id: str, answer: Answer) -> Admitted:
        """What a call of which only the answer is known was admitted with."""
        if not answer.captured:
            return Admitted(None, Resolution("unresolved"))
        admission = self._custodian.store.readmit(rollout_id, call_id, answer.parent)
        resolution = Resolution("resolved" if answer.parent else "root", answer.parent)
        return Admitted(admission, resolution, compaction_of=answer.compaction_of)

    def _write_failure(self, rollout_id: str, known: Known) -> None:
        reason = (
            Cause.WORKER_CAPTURE_FAILED if known.content_left else Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        )
        try:
            self._custodian.store.record_failure(rollout_id, known.call_id, reason, "the gateway died in this call")
            self._metrics.failures.labels(reason.value).inc()
        except (RolloutFrozen, LedgerConflict):
            # Somebody closed the rollout or settled the call since; what is there stands.
            return


def _served(dialect: Dialect, media_type: str, raw: bytes) -> Mapping[str, Any]:
    if media_type != SSE:
        served = orjson.loads(raw)
        return served if isinstance(served, dict) else {}
    assembler = dialect.assembler()
    for frame in split(raw):
        assembler.feed(frame)
    return assembler.served()
