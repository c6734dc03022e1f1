"""Recording: what an exchange notes of its call in the replay log, so that a request that comes again finds it.

Not here: the log itself (replay), who looks in it (retries).
"""

from __future__ import annotations

from workbench.gateway.custody import Call, Custodian
from workbench.gateway.replay import Answer, ReplayLog


class Recording:
    """One call's lines in the replay log, written as its exchange goes on."""

    def __init__(self, log: ReplayLog, call_id: str, custodian: Custodian) -> None:
        self._log, self._call_id, self._custodian = log, call_id, custodian

    async def content_left(self) -> None:
        await self._custodian.off_loop(self._log.content_left, self._call_id)

    async def answered(self, call: Call, media_type: str, raw: bytes) -> None:
        admitted = call.admitted
        answer = Answer(
            media_type,
            captured=admitted.admission is not None,
            parent=admitted.resolution.parent,
            admitted_at=call.admitted_at,
            compaction_of=admitted.compaction_of,
        )
        await self._custodian.off_loop(self._log.answered, self._call_id, answer, raw)

    async def ended(self) -> None:
        await self._custodian.off_loop(self._log.ended, self._call_id)

    def settled(self) -> None:
        self._log.settled(self._call_id)
