"""Exhibit: one cause, provoked on purpose: what an agent does, and what is then done to what it left.

    agent ── talks to the bench's gateway ──▶ receipt, staged calls ── spoil ──▶ verification
`Hand` is what an agent holds, `Case` is what a spoiler may touch. Not here: which exhibits there are (calls, receipts,
damage), how they are played and what the product said of them (the package's head).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from workbench.capture.staging import MemorySink
from workbench.demo.bench import Bench
from workbench.finalizer.messages import RolloutOutcome
from workbench.ledger import assemble_receipt
from workbench.wire import CallRecord, Cause, RolloutManifest, StagedCall

Message = dict[str, Any]
ASK: Message = {"role": "user", "content": "What is the weather in Rome?"}
MORE: Message = {"role": "user", "content": "And what follows from that?"}
STORY = ({"text": "It rains."}, {"text": "Take an umbrella."}, {"text": "Nothing more."})
"""What the policy says where an exhibit has no script of its own."""


@dataclass
class Hand:
    """What an agent holds: a client, and for the mischief some of them do, the bench itself."""

    bench: Bench
    rollout_id: str
    client: openai.AsyncOpenAI
    last: dict[str, Any] | None = None
    """The last served object: the response that is scored."""

    async def say(self, *messages: Message, **options: Any) -> Message:
        """Ask for the next turn; returns the model's message."""
        self.last = await self.bench.say(self.rollout_id, messages, **options)
        message = self.last["choices"][0]["message"]
        return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}


Agent = Callable[[Hand], Awaitable[None]]


async def two_turns(hand: Hand) -> None:
    """A well-behaved conversation."""
    await hand.say(ASK, await hand.say(ASK), MORE)


@dataclass
class Case:
    """A finished rollout before it is verified. `calls` are its staged calls in manifest order, `ledger` its file;
    `put` replaces what storage gives back for one of them."""

    outcome: RolloutOutcome
    calls: list[StagedCall]
    sink: MemorySink
    ledger: Path
    replaced: dict[str, StagedCall] = field(default_factory=dict)

    @property
    def records(self) -> list[CallRecord]:
        assert self.outcome.receipt is not None
        return list(self.outcome.receipt.manifest)

    def put(self, index: int, call: StagedCall) -> None:
        self.replaced[self.records[index].staging_key] = call

    def set_staged(self, index: int, **fields: Any) -> None:
        """Change a staged call and leave its digest."""
        self.put(index, StagedCall.unverified(**{**vars(self.calls[index]), **fields}))

    def set_both(self, index: int, **fields: Any) -> None:
        """Change a staged call and the manifest's row alike, with a digest that fits: a consistent lie."""
        changed = StagedCall.unverified(**{**vars(self.calls[index]), **fields})
        changed = StagedCall.unverified(**{**vars(changed), "digest": changed.recompute_digest()})
        self.put(index, changed)
        shared = {name: value for name, value in fields.items() if name in CallRecord.model_fields}
        self.set_row(index, digest=changed.digest, **shared)

    def set_row(self, index: int, **fields: Any) -> None:
        records = self.records
        records[index] = records[index].model_copy(update=fields)
        self.set_receipt(manifest=records)

    def set_receipt(self, **fields: Any) -> None:
        assert self.outcome.receipt is not None
        self.set_outcome(receipt=self.outcome.receipt.model_copy(update=fields))

    def set_outcome(self, **fields: Any) -> None:
        self.outcome = self.outcome.model_copy(update=fields)

    def attribute_again(
        self,
        records: Sequence[CallRecord] | None = None,
        *,
        response: dict[str, Any] | None = None,
        declared: str | None = None,
    ) -> None:
        """Assemble the receipt once more, from other records or with other witnesses."""
        manifest = RolloutManifest(
            rollout_id=self.outcome.rollout_id,
            records=self.records if records is None else list(records),
            failures=self.outcome.failures,
        )
        receipt = assemble_receipt(
            manifest,
            rollout_id=self.outcome.rollout_id,
            reward=self.outcome.reward,
            response=response,
            declared_response_id=declared,
        )
        self.set_outcome(receipt=receipt)


@dataclass(frozen=True)
class Exhibit:
    """`how` is one sentence for the reader: what is done here to provoke `cause`."""

    cause: Cause
    how: str
    agent: Agent = two_turns
    script: Sequence[dict[str, Any]] = STORY
    spoil: Callable[[Case], None] | None = None
