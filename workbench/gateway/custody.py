"""Custody: from a finished completion to a row in the ledger, or to the reason why there is none.

    worker's coordinates → do they fit what was admitted? → ledger row, fsynced → (the last frame may leave)

Invariant: `settle` returns only when a row is durable. A capture that failed is a failure row, and the agent is still
served; a ledger that cannot be written is an error, for then nobody would know that a call is missing.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from workbench.errors import FingerprintError, LedgerConflict, RolloutFrozen, first_fault
from workbench.gateway.dialects import Dialect
from workbench.gateway.histories import Histories
from workbench.gateway.metrics import Metrics
from workbench.gateway.upstream import Acknowledgement, Upstream
from workbench.ledger import Admitted, LedgerStore
from workbench.wire import (
    FINGERPRINT_VERSION,
    CallRecord,
    Cause,
    CommitCoords,
    RolloutCommit,
    assistant_fingerprint,
    staging_key,
)

T = TypeVar("T")


@dataclass
class Call:
    """One tagged call: who it is, what it asked, what it may start from."""

    rollout_id: str
    model_call_id: str
    dialect: Dialect
    request_items: list[dict[str, Any]]
    prompt_options: dict[str, Any]
    admitted: Admitted
    admitted_at: float
    after: str | None = None
    """The response that the request named as the one before it."""
    stored_input: list[Any] | None = None
    """What the request added to that, where its own response may be named by a later one."""


class Custodian:
    """All ledger work of a gateway process, off the event loop."""

    def __init__(self, store: LedgerStore, upstream: Upstream, metrics: Metrics, *, coords_timeout_s: float) -> None:
        self.store = store
        self.histories = Histories(store.directory)
        self._upstream = upstream
        self._metrics = metrics
        self._coords_timeout_s = coords_timeout_s
        # On two cores, two of them take an eighth less of a processor for a call than sixteen, which take turns.
        threads = min(16, max(2, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ledger")

    def close(self) -> None:
        self._pool.shutdown()

    async def off_loop(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run ledger work in a thread: it waits for locks and disks."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(function, *args, **options)
        )

    async def admit(
        self,
        rollout_id: str,
        model_call_id: str,
        dialect: Dialect,
        request_items: list[dict[str, Any]],
        prompt_options: dict[str, Any],
        replaces_response_id: str | None,
        *,
        after: str | None = None,
        stored_input: list[Any] | None = None,
    ) -> Call:
        """Resolve and admit. Raises what `LedgerStore.admit` raises."""
        admitted_at = time.time()
        admitted = await self.off_loop(
            self.store.admit,
            rollout_id,
            request_items,
            model_call_id,
            prompt_options=prompt_options,
            dialect=dialect.name,
            replaces_response_id=replaces_response_id,
            after_response_id=after,
        )
        mode = admitted.admission.mode if admitted.admission is not None else "unresolved"
        self._metrics.admissions.labels(mode).inc()
        if admitted.drift is not None:
            self._metrics.unresolved.labels(admitted.drift.cause.value).inc()
            self._metrics.failures.labels(Cause.UNRESOLVED_PARENT.value).inc()
        return Call(
            rollout_id,
            model_call_id,
            dialect,
            request_items,
            prompt_options,
            admitted,
            admitted_at,
            after,
            stored_input,
        )

    async def settle(self, call: Call, served: Mapping[str, Any], told: str | None = None) -> None:
        """Write the row of a call whose completion is there, before it leaves. `told`: its coordinates, where the
        worker sent them with the answer."""
        response_items = call.dialect.response_items(served)
        if call.stored_input is not None and served.get("id"):
            added = [*call.stored_input, *call.dialect.stored_output(served)]
            await self.off_loop(
                self.histories.keep,
                call.rollout_id,
                served["id"],
                call.after,
                added,
                continues=call.admitted.parent_response_id,
            )
        if call.admitted.admission is None:
            # Its failure row was written at admission; only its items are noted, for later diagnoses.
            await self.off_loop(self._note, call, response_items)
            return
        began = time.monotonic()
        answer = await self._upstream.acknowledgement(call.rollout_id, call.model_call_id, self._coords_timeout_s, told)
        if answer.staged_s is not None:
            self._metrics.staging_s.observe(answer.staged_s)
        await self.off_loop(self._write, call, served, response_items, answer)
        self._metrics.custody_s.observe(time.monotonic() - began)

    async def fail(self, call: Call, reason: Cause, detail: str) -> None:
        """Write the failure row of a call that gave no completion. An unresolved call has its row already."""
        if call.admitted.admission is not None:
            await self.off_loop(self._write_failure, call, reason, detail)

    def _write(
        self, call: Call, served: Mapping[str, Any], response_items: list[dict[str, Any]], answer: Acknowledgement
    ) -> None:
        failed = self._why_not(call, served, answer)
        if failed is None:
            try:
                self._commit(call, served, response_items, CommitCoords.model_validate(answer.coords))
                return
            except FingerprintError as error:
                failed = Cause.WORKER_CAPTURE_FAILED, f"response has no fingerprint: {error}"
        self._write_failure(call, *failed)
        self._note(call, response_items)

    def _why_not(
        self, call: Call, served: Mapping[str, Any], answer: Acknowledgement
    ) -> tuple[Cause, str | None] | None:
        """Why this acknowledgement gives no custody row; None where it does."""
        admission = call.admitted.admission
        assert admission is not None
        if answer.coords is None:
            return Cause.WORKER_RESPONSE_MISSING_COMMIT_COORDINATES, answer.missing
        staged = isinstance(answer.coords, dict) and answer.coords.get("disposition") != "capture_failed"
        if staged and answer.coords.get("chain_hash") is None:
            return Cause.LEDGER_ROW_MISSING_CHAIN_HASH, None
        try:
            coords = CommitCoords.model_validate(answer.coords)
        except ValidationError as error:
            return Cause.INVALID_WORKER_COMMIT_COORDINATES, first_fault(error)
        for name in ("rollout_id", "model_call_id", "parent_call_id", "prev_len"):
            if getattr(coords, name) != getattr(admission, name):
                return (
                    Cause.INVALID_WORKER_COMMIT_COORDINATES,
                    f"{name}: admitted {getattr(admission, name)!r}, acknowledged {getattr(coords, name)!r}",
                )
        if coords.disposition == "capture_failed":
            failure = answer.failure or {}
            if failure:
                self.store.event(call.rollout_id, "capture_failed", model_call_id=call.model_call_id, **failure)
            return Cause.WORKER_CAPTURE_FAILED, failure.get("cause")
        if coords.staging_key != staging_key(call.rollout_id, call.model_call_id):
            return Cause.INVALID_WORKER_COMMIT_COORDINATES, f"staging_key: {coords.staging_key!r}"
        if not isinstance(served.get("id"), str) or not served["id"]:
            return Cause.LEDGER_ROW_MISSING_RESPONSE_ID, None
        return None

    def _commit(
        self, call: Call, served: Mapping[str, Any], response_items: list[dict[str, Any]], coords: CommitCoords
    ) -> None:
        admission = call.admitted.admission
        assert admission is not None
        continued = self.store.fingerprint(call.rollout_id, call.request_items, response_items)
        record = CallRecord(
            **coords.model_dump(exclude={"rollout_id", "disposition"}),
            mode=admission.mode,
            response_id=served["id"],
            admitted_at=call.admitted_at,
            output_fingerprint=assistant_fingerprint(response_items) or None,
            continuation_fingerprint=continued or None,
            fingerprint_version=FINGERPRINT_VERSION,
        )
        commit = RolloutCommit(
            rollout_id=call.rollout_id, record=record, staging_chain=[*admission.staging_chain, record.staging_key]
        )
        try:
            self.store.record(
                commit,
                call.request_items,
                response_items,
                prompt_options=call.prompt_options,
                dialect=call.dialect.name,
                compaction_of=call.admitted.compaction_of,
            )
            self._metrics.commits.inc()
        except RolloutFrozen:
            self._metrics.late.inc()

    def _write_failure(self, call: Call, reason: Cause, detail: str | None) -> None:
        try:
            self.store.record_failure(call.rollout_id, call.model_call_id, reason, detail)
            self._metrics.failures.labels(reason.value).inc()
        except RolloutFrozen:
            self._metrics.late.inc()
        except LedgerConflict:
            # Its row is there already: the reason that was written first stands.
            return

    def _note(self, call: Call, response_items: list[dict[str, Any]]) -> None:
        self.store.note_items(
            call.rollout_id,
            call.model_call_id,
            call.request_items,
            response_items,
            parent=call.admitted.resolution.parent,
            dialect=call.dialect.name,
            prompt_options=call.prompt_options,
        )
