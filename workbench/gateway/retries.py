"""Retries: a request that repeats a call gets that call's response, and no second row.

    request ──▶ claim ──┬─ new                ──▶ begin a call
                        ├─ running here       ──▶ join it: the same response, from its start
                        ├─ running elsewhere  ──▶ wait for the other gateway's answer
                        └─ answered           ──▶ its stored bytes (and its ledger row, where a crash came between)
A call whose gateway died without an outcome is buried: it gets its failure row before the rollout is frozen, and before
anything that an agent may have seen of it can come back as a history.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from workbench.errors import LedgerConflict, LedgerError, RolloutFrozen, WorkbenchError
from workbench.gateway.answers import SUFFIX, AnswerFile, answer_files
from workbench.gateway.asked import Asked
from workbench.gateway.custody import Call, Custodian
from workbench.gateway.delivery import SSE, Head
from workbench.gateway.dialects import Dialect
from workbench.gateway.exchange import Exchange
from workbench.gateway.metrics import Metrics
from workbench.gateway.presence import Presence
from workbench.gateway.recording import Recording
from workbench.gateway.refusals import Refused, stopping
from workbench.gateway.replay import LOG_SUFFIX, Answer, Known, ReplayLog
from workbench.gateway.sse import split
from workbench.ledger import Admitted, Resolution
from workbench.wire import Cause, RolloutManifest, check_rollout_id

logger = logging.getLogger(__name__)

OPEN_LOGS = 1024
POLL_S = 0.05


@dataclass(frozen=True)
class Stored:
    """A stored answer, in the exchange's place."""

    call_id: str
    media_type: str
    raw: bytes

    async def head(self) -> Head:
        return Head(200, self.media_type, self.raw)


Begin = Callable[[str, Recording], Awaitable[Exchange]]
"""(call id, its recording) → an exchange that was admitted and has not run yet."""


class Retries:
    """Finds for each request the call that answers it. `spawn` starts a task that outlives its request."""

    def __init__(
        self,
        custodian: Custodian,
        metrics: Metrics,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        *,
        timeout_s: float,
    ) -> None:
        self._custodian = custodian
        self._metrics = metrics
        self._spawn = spawn
        self._timeout_s = timeout_s
        self._presence = Presence(custodian.store.directory)
        self._running: dict[str, asyncio.Future[Exchange]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logs: OrderedDict[str, ReplayLog] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Blocks. Answers of closed rollouts go with the gateway: nobody is there any more to ask for them."""
        self._presence.close()
        store = self._custodian.store
        for rollout_id in answer_files(store.directory, 0.0):
            if store.frozen(rollout_id):
                AnswerFile(store.directory / f"{rollout_id}{SUFFIX}").forget()
                self._custodian.histories.forget(rollout_id)

    async def serve(self, asked: Asked, begin: Begin) -> Exchange | Stored:
        """The exchange or the stored answer for a request. Raises what `begin` raises, and `Refused`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            call_id = uuid4().hex
            # Entered before it is claimed: from then on others may ask whether it is running.
            mine = self._running[call_id] = asyncio.get_running_loop().create_future()
            try:
                known = await self._custodian.off_loop(self._claim, asked, call_id)
                if known is None:
                    return await self._begin(asked.rollout_id, call_id, mine, begin)
            except BaseException as error:
                # Who joined it meanwhile is told the same, and does not wait for what will never come.
                mine.set_exception(error if isinstance(error, Exception) else stopping())
                mine.exception()  # whether anybody joined or not, it was told
                self._running.pop(call_id, None)
                raise
            self._running.pop(call_id, None)  # nothing was begun under it
            if (served := await self._repeat(asked, known, deadline)) is not None:
                return served
            if time.monotonic() > deadline:
                raise Refused(504, f"Call {known.call_id} did not finish within {self._timeout_s:g} s.", "call_timeout")

    async def delivered(self, rollout_id: str, call_id: str) -> None:
        """Its response has left, to the last byte, for a client that was still there."""
        # Not noted, it can only be served once more, to a client that says that it retries.
        with contextlib.suppress(LedgerError, OSError):
            await self._custodian.off_loop(self._log(rollout_id).delivered, call_id)

    async def forget(self, rollout_id: str) -> None:
        """Keep the answers of a rollout no longer: its harness is done with it."""
        await self._custodian.off_loop(self._log(rollout_id).forget)
        await self._custodian.off_loop(self._custodian.histories.forget, rollout_id)

    def sweep(self, idle_s: float) -> None:
        """Drop the answers of rollouts in which nothing was answered for `idle_s` seconds. Blocks."""
        for rollout_id in answer_files(self._custodian.store.directory, idle_s):
            try:
                self._log(rollout_id).forget(idle_s)
            except (WorkbenchError, OSError):
                # A log that cannot be read keeps its own answers and not those of the others.
                logger.exception("the answers of rollout %s could not be removed", rollout_id)

    async def bury(self, rollout_id: str) -> None:
        """Give every call that died with its gateway its failure row. Before a freeze."""
        await self._custodian.off_loop(self._bury, rollout_id)

    def _claim(self, asked: Asked, call_id: str) -> Known | None:
        log = self._log(asked.rollout_id)
        with log.lock:
            known = log.claim(call_id, self._presence.id, asked.key, asked.body, asked.retry, self._alive)
            self._bury(asked.rollout_id, spare=known.call_id if known else None, seen_only=True)
        return known

    async def _begin(self, rollout_id: str, call_id: str, mine: asyncio.Future[Exchange], begin: Begin) -> Exchange:
        recording = Recording(self._log(rollout_id), call_id, self._custodian)
        try:
            exchange = await begin(call_id, recording)
        except Exception:
            # Without that line the call counts as lost, which it is; its agent is told what stopped it.
            with contextlib.suppress(LedgerError, OSError):
                await recording.ended()
            raise
        self._tasks[call_id] = self._spawn(self._run(exchange, recording), f"call {call_id}")
        mine.set_result(exchange)
        return exchange

    async def _run(self, exchange: Exchange, recording: Recording) -> None:
        try:
            await exchange.run()
            # A call that was cancelled does not come here: it is lost, as if the process had died.
            if exchange.failed:
                await recording.ended()
            recording.settled()
        except (LedgerError, OSError):
            # Without that line the call counts as lost, which it is.
            logger.exception("the end of call %s could not be noted", exchange.call_id)
        finally:
            self._running.pop(exchange.call_id, None)
            self._tasks.pop(exchange.call_id, None)

    async def _repeat(self, asked: Asked, known: Known, deadline: float) -> Exchange | Stored | None:
        """The response of a known call; None where it came to nothing and the request must be looked at again."""
        running = self._running.get(known.call_id)
        if running is not None:
            exchange = await asyncio.shield(running)
            if exchange.failed:
                # Told to others, and about to be noted.
                if (task := self._tasks.get(known.call_id)) is not None:
                    await asyncio.wait([task])
                return None
            self._metrics.repeated.labels("joined").inc()
            return exchange
        log = self._log(asked.rollout_id)
        while await self._custodian.off_loop(self._under_way, asked.rollout_id, known.call_id):
            if not await self._custodian.off_loop(self._alive, known):
                break
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL_S)
        answer = await self._custodian.off_loop(log.answer, known.call_id)
        if answer is None:
            return None
        raw = await self._custodian.off_loop(log.bytes_of, answer)
        if raw is None:
            # To generate it anew would give this client's call a second, different answer.
            raise Refused(
                409,
                f"This request was answered before (call {known.call_id}), and its answer is no longer kept. Next: "
                "send it as a new request, without its key and its retry count.",
                "answer_expired",
            )
        await self._finish(asked, known, answer, raw)
        self._metrics.repeated.labels("stored").inc()
        return Stored(known.call_id, answer.media_type, raw)

    def _under_way(self, rollout_id: str, call_id: str) -> bool:
        """Whether a call has neither come to nothing nor the ledger row without which no answer leaves."""
        log = self._log(rollout_id)
        state = log.state(call_id)
        if state == "answered":
            return call_id in log.unsettled and not self._has_row(rollout_id, call_id)
        return state == "running"

    async def _finish(self, asked: Asked, known: Known, answer: Answer, raw: bytes) -> None:
        """Settle an answered call whose gateway is gone, where that kept it from its ledger row."""
        log = self._log(asked.rollout_id)
        if known.call_id not in log.unsettled:
            return
        if not await self._custodian.off_loop(self._has_row, asked.rollout_id, known.call_id):
            admitted = await self._custodian.off_loop(self._admitted, asked.rollout_id, known.call_id, answer)
            call = Call(
                asked.rollout_id,
                known.call_id,
                asked.dialect,
                asked.items,
                asked.options,
                admitted,
                answer.admitted_at,
                asked.after,
                asked.stored_input,
            )
            await self._custodian.settle(call, _served(asked.dialect, answer.media_type, raw))
        log.settled(known.call_id)

    def _admitted(self, rollout_id: str, call_id: str, answer: Answer) -> Admitted:
        """What a call of which only the answer is known was admitted with."""
        if not answer.captured:
            return Admitted(None, Resolution("unresolved"))
        admission = self._custodian.store.readmit(rollout_id, call_id, answer.parent)
        resolution = Resolution("resolved" if answer.parent else "root", answer.parent)
        return Admitted(admission, resolution, compaction_of=answer.compaction_of)

    def _has_row(self, rollout_id: str, call_id: str) -> bool:
        store = self._custodian.store
        # What was frozen stays as it is.
        return store.frozen(rollout_id) or call_id in _calls_of(store.manifest(rollout_id))

    def _bury(self, rollout_id: str, spare: str | None = None, seen_only: bool = False) -> None:
        """`seen_only`: of the lost calls only those of which an agent may have seen something."""
        store, log = self._custodian.store, self._log(rollout_id)
        with log.lock:
            log.refresh()
            alive = functools.cache(self._presence.alive)
            lost = [
                known
                for known in log.unsettled.values()
                if known.call_id != spare and (known.content_left or not seen_only) and not self._alive(known, alive)
            ]
            if not lost or store.frozen(rollout_id):
                return
            rows = _calls_of(store.manifest(rollout_id))
            for known in lost:
                if known.call_id not in rows:
                    self._write_lost(rollout_id, known)
                if known.state == "running":
                    log.lost(known.call_id)
                # Another gateway may have served it meanwhile, and its line was read with the one before.
                log.settled(known.call_id)

    def _write_lost(self, rollout_id: str, known: Known) -> None:
        reason = (
            Cause.WORKER_CAPTURE_FAILED if known.content_left else Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
        )
        try:
            self._custodian.store.record_failure(rollout_id, known.call_id, reason, "the gateway died in this call")
            self._metrics.failures.labels(reason.value).inc()
        except (RolloutFrozen, LedgerConflict):
            # Somebody closed the rollout or settled the call since; what is there stands.
            return

    def _alive(self, known: Known, alive: Callable[[str], bool] | None = None) -> bool:
        """`alive`: another way to ask for a gateway."""
        if known.gateway == self._presence.id:
            return known.call_id in self._running
        return (alive or self._presence.alive)(known.gateway)

    def _log(self, rollout_id: str) -> ReplayLog:
        with self._lock:
            log = self._logs.get(check_rollout_id(rollout_id))
            if log is None:
                path = self._custodian.store.directory / f"{rollout_id}{LOG_SUFFIX}"
                log = self._logs[rollout_id] = ReplayLog(path)
                if len(self._logs) > OPEN_LOGS:
                    self._logs.popitem(last=False)
            self._logs.move_to_end(rollout_id)
            return log


def _calls_of(manifest: RolloutManifest) -> set[str]:
    return {row.model_call_id for row in manifest.records} | {row.model_call_id for row in manifest.failures}


def _served(dialect: Dialect, media_type: str, raw: bytes) -> Mapping[str, Any]:
    if media_type != SSE:
        served = orjson.loads(raw)
        return served if isinstance(served, dict) else {}
    assembler = dialect.assembler()
    for frame in split(raw):
        assembler.feed(frame)
    return assembler.served()
