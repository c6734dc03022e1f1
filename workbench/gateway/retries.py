"""Retries: a request that repeats a call gets that call's response, and no second row.

    request ──▶ claim ──┬─ new                ──▶ begin a call
                        ├─ running here       ──▶ join it: the same response, from its start
                        ├─ running elsewhere  ──▶ wait for the other gateway's answer
                        └─ answered           ──▶ its stored bytes (and its ledger row, where a crash came between)
What is known of a call is in two places: its lines in the replay log, for every gateway and for good (replay), and, of
a call of this process, its `OwnCall`, from before it is claimed until its end is noted.
Not here: what becomes of a call whose gateway died without an outcome (lost).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from workbench.errors import LedgerError, WorkbenchError
from workbench.gateway.answers import SUFFIX, AnswerFile, answer_files
from workbench.gateway.asked import Asked
from workbench.gateway.custody import Custodian
from workbench.gateway.delivery import Head
from workbench.gateway.exchange import Exchange
from workbench.gateway.lost import LostCalls
from workbench.gateway.metrics import Metrics
from workbench.gateway.presence import Presence
from workbench.gateway.recording import Recording
from workbench.gateway.refusals import Refused, stopping
from workbench.gateway.replay import Known, ReplayLog, ReplayLogs

logger = logging.getLogger(__name__)

POLL_S = 0.05

Begin = Callable[[str, Recording], Awaitable[Exchange]]
"""(call id, its recording) → an exchange that was admitted and has not run yet."""


@dataclass(frozen=True)
class Stored:
    """A stored answer, in the exchange's place."""

    call_id: str
    media_type: str
    raw: bytes

    async def head(self) -> Head:
        return Head(200, self.media_type, self.raw)


class OwnCall:
    """One call of this process, as those see it that repeat it.

    claimed ──▶ begun: it has an exchange ──▶ over: its end is noted
       └──────▶ it could not be begun, and who joined it is told the same as its own request
    """

    def __init__(self) -> None:
        self.call_id = uuid4().hex
        self._exchange: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

    @property
    def is_begun(self) -> bool:
        return self._exchange.done() and self._exchange.exception() is None

    def begun(self, exchange: Exchange) -> None:
        self._exchange.set_result(exchange)

    def not_begun(self, error: BaseException) -> None:
        self._exchange.set_exception(error if isinstance(error, Exception) else stopping())
        self._exchange.exception()  # whether anybody joined or not, it was told

    def over(self) -> None:
        self._over.set()

    async def joined(self) -> Exchange | None:
        """Its exchange, or None where that came to nothing, which is noted then. Raises what kept it from beginning."""
        exchange = await asyncio.shield(self._exchange)
        if not exchange.failed:
            return exchange
        await self._over.wait()
        return None


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
        self._logs = ReplayLogs(custodian.store.directory)
        self._own: dict[str, OwnCall] = {}
        self._lost = LostCalls(custodian, metrics, self._alive)

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
        log = self._logs.of(asked.rollout_id)
        while True:
            own = OwnCall()
            # Entered before it is claimed: from then on others may ask whether it is running.
            self._own[own.call_id] = own
            try:
                known = await self._custodian.off_loop(self._claim, log, asked, own.call_id)
                if known is None:
                    return await self._begin(log, own, begin)
            except BaseException as error:
                own.not_begun(error)
                raise
            finally:
                if not own.is_begun:
                    del self._own[own.call_id]
            if (served := await self._repeat(asked, log, known, deadline)) is not None:
                return served
            if time.monotonic() > deadline:
                raise Refused(504, f"Call {known.call_id} did not finish within {self._timeout_s:g} s.", "call_timeout")

    async def delivered(self, rollout_id: str, call_id: str) -> None:
        """Its response has left, to the last byte, for a client that was still there."""
        # Not noted, it can only be served once more, to a client that says that it retries.
        with contextlib.suppress(LedgerError, OSError):
            await self._custodian.off_loop(self._logs.of(rollout_id).delivered, call_id)

    async def forget(self, rollout_id: str) -> None:
        """Keep the answers of a rollout no longer: its harness is done with it."""
        await self._custodian.off_loop(self._logs.of(rollout_id).forget)
        await self._custodian.off_loop(self._custodian.histories.forget, rollout_id)

    def sweep(self, idle_s: float) -> None:
        """Drop the answers of rollouts in which nothing was answered for `idle_s` seconds. Blocks."""
        for rollout_id in answer_files(self._custodian.store.directory, idle_s):
            try:
                self._logs.fresh(rollout_id).forget(idle_s)
            except (WorkbenchError, OSError):
                # A log that cannot be read keeps its own answers and not those of the others.
                logger.exception("the answers of rollout %s could not be removed", rollout_id)

    async def bury(self, rollout_id: str) -> None:
        """Give every call that died with its gateway its failure row. Before a freeze."""
        await self._custodian.off_loop(self._lost.bury, self._logs.of(rollout_id))

    def _claim(self, log: ReplayLog, asked: Asked, call_id: str) -> Known | None:
        with log.lock:
            known = log.claim(call_id, self._presence.id, asked.key, asked.body, asked.retry, self._alive)
            self._lost.bury(log, spare=known.call_id if known else None, seen_only=True)
        return known

    async def _begin(self, log: ReplayLog, own: OwnCall, begin: Begin) -> Exchange:
        recording = Recording(log, own.call_id, self._custodian)
        try:
            exchange = await begin(own.call_id, recording)
        except Exception:
            # Without that line the call counts as lost, which it is; its agent is told what stopped it.
            with contextlib.suppress(LedgerError, OSError):
                await recording.ended()
            raise
        self._spawn(self._run(own, exchange, recording), f"call {own.call_id}")
        own.begun(exchange)
        return exchange

    async def _run(self, own: OwnCall, exchange: Exchange, recording: Recording) -> None:
        try:
            await exchange.run()
            # A call that was cancelled does not come here: it is lost, as if the process had died.
            if exchange.failed:
                await recording.ended()
            recording.settled()
        except (LedgerError, OSError):
            # Without that line the call counts as lost, which it is.
            logger.exception("the end of call %s could not be noted", own.call_id)
        finally:
            del self._own[own.call_id]
            own.over()

    async def _repeat(self, asked: Asked, log: ReplayLog, known: Known, deadline: float) -> Exchange | Stored | None:
        """The response of a known call; None where it came to nothing and the request must be looked at again."""
        own = self._own.get(known.call_id)
        if own is not None:
            exchange = await own.joined()
            if exchange is not None:
                self._metrics.repeated.labels("joined").inc()
            return exchange
        while await self._custodian.off_loop(self._is_under_way, log, known):
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
        await self._lost.settle(asked, log, known.call_id, answer, raw)
        self._metrics.repeated.labels("stored").inc()
        return Stored(known.call_id, answer.media_type, raw)

    def _is_under_way(self, log: ReplayLog, known: Known) -> bool:
        """Whether a call that lives has neither come to nothing nor the ledger row without which no answer leaves."""
        state = log.state(known.call_id)
        if state == "answered":
            if known.call_id not in log.unsettled or self._lost.has_row(log.rollout_id, known.call_id):
                return False
        elif state != "running":
            return False
        return self._alive(known)

    def _alive(self, known: Known) -> bool:
        if known.gateway == self._presence.id:
            return known.call_id in self._own
        return self._presence.alive(known.gateway)
