"""Desk: close rollouts of an agent that we do not run, and take them through the finalizer like a campaign's.

    receipt asked for → is there such a rollout? → freeze → terminal, receipt → Finalizer (verify, store) → verdict

Invariants: the rollouts of one request are one group, whole or not at all; a rollout is finalised once, and one whose
finalising failed may be asked for again; tokens do not pass through here.
Not here: how a request arrives (desk_socket), the words of the verdict (receipt_lines), verification (finalizer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.campaign.environments.fit import LARGEST
from workbench.errors import RunStoreError, SetupError, WireError, first_fault
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome, RowSummary
from workbench.gateway.client import ControlClient
from workbench.ledger import assemble_receipt
from workbench.places import as_word
from workbench.runs.custody import ledger_files, rollout_of
from workbench.runs.writer import RunWriter
from workbench.wire import CallRecord, RolloutManifest, check_rollout_id

Finalize = Callable[[FinalizationRequest], Awaitable[FinalizedGroup]]
_SHOWN = 5


class ReceiptAsked(BaseModel):
    """What `workbench receipt` asks for. `terminals` and `rewards` are empty, or one a rollout, in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollouts: list[str] = Field(min_length=1)
    terminals: list[str] = []
    rewards: list[float] = []
    group: str | None = None


class Verdict(BaseModel):
    """What became of one rollout, without its tokens. `digest` is that of the whole sequence up to the terminal;
    `other_roots` counts conversations that are not the terminal's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str
    group_id: str
    verified: bool
    cause: str | None
    detail: str | None
    call_id: str | None
    position: int | None
    terminal: str | None
    selection: str | None
    attribution: str | None
    digest: str | None
    calls: int
    chain: int
    failed_calls: int
    tokens: int
    sampled_tokens: int
    reward: float | None
    other_roots: int = 0


class ReceiptDesk:
    """Finalises rollouts of one served run. `finalize` is the finalizer's, `control` the gateway's control client.

    `named_only`: asked without terminals it refuses, before anything is closed.
    """

    def __init__(
        self, run_dir: Path, control: ControlClient, finalize: Finalize, writer: RunWriter, *, named_only: bool = False
    ) -> None:
        self._named_only = named_only
        self._run_dir = run_dir
        self._control = control
        self._finalize = finalize
        self._writer = writer
        self._turn = asyncio.Lock()
        self.finalised: dict[str, str] = {}
        """Rollout → its group, of those that have their receipt."""

    def open_rollouts(self) -> list[str]:
        """Rollouts that have calls and no receipt yet."""
        seen = [rollout_of(path) for path in ledger_files(self._run_dir / "ledger")]
        return [rollout_id for rollout_id in seen if rollout_id not in self.finalised]

    async def receipt(self, request: dict[str, Any]) -> dict[str, Any]:
        """`ReceiptAsked` in, `{"verdicts": […]}` out, both as JSON. One group at a time.

        Raises SetupError for a request that contradicts itself, RunStoreError for a rollout without calls or with a
        receipt, and what control client and finalizer raise.
        """
        try:
            asked = ReceiptAsked.model_validate(request)
        except ValidationError as error:
            raise SetupError(first_fault(error)) from None
        group_id = checked_group(asked)
        if self._named_only and not asked.terminals:
            raise SetupError(
                f"Nobody names the last call of {asked.rollouts[0]}, and rollouts.require_terminal_witness lets "
                "nothing be guessed. Next: --terminal ID, a response or call id, for each rollout"
            )
        async with self._turn:
            for index, rollout_id in enumerate(asked.rollouts):
                await self._check_open(rollout_id, asked.terminals[index] if asked.terminals else None)
            if group_id in self.finalised.values():
                raise RunStoreError(f"Group {group_id} is stored already. Next: choose another --group.")
            outcomes = []
            for index, rollout_id in enumerate(asked.rollouts):
                outcomes.append(await self._close(index, rollout_id, asked))
            asking = FinalizationRequest(
                group_id=group_id, weight_version=_dispatch_version(outcomes), rollouts=outcomes
            )
            group = await self._finalize(asking)
            self._writer.group({"step": None, **group.store_record()})
            self.finalised |= dict.fromkeys(asked.rollouts, group_id)
        verdicts = [_verdict(group_id, row, outcome) for row, outcome in zip(group.rows, outcomes, strict=True)]
        for verdict in verdicts:
            self._writer.event("receipt", **verdict.model_dump())
        return {"verdicts": [verdict.model_dump() for verdict in verdicts]}

    async def _check_open(self, rollout_id: str, terminal: str | None) -> None:
        if rollout_id in self.finalised:
            raise RunStoreError(
                f"Rollout {rollout_id} has its receipt already (group {self.finalised[rollout_id]}); it is given once. "
                f"Next: workbench inspect {as_word(self._run_dir)} {rollout_id}"
            )
        manifest = await self._control.manifest(rollout_id)
        if not manifest.records and not manifest.failures:
            known = self.open_rollouts()
            some = f"those without a receipt: {', '.join(known[:_SHOWN])}{', …' if len(known) > _SHOWN else ''}"
            what = some if known else "no rollout waits for a receipt"
            raise RunStoreError(f"Rollout {rollout_id} has no call in this run; {what}")
        responses = [record.response_id for record in manifest.records]
        named = None if terminal is None else response_id_of(manifest.records, terminal)
        if named is not None and named not in responses and not manifest.failures:
            # Every call was captured, so this can only be a slip, and a receipt is for good.
            raise RunStoreError(
                f"--terminal {terminal} names no call of rollout {rollout_id}; its last response is {responses[-1]}"
            )

    async def _close(self, index: int, rollout_id: str, asked: ReceiptAsked) -> RolloutOutcome:
        closed = await self._control.freeze(rollout_id)
        manifest = RolloutManifest.model_validate(closed["manifest"])
        named = asked.terminals[index] if asked.terminals else None
        reward = asked.rewards[index] if asked.rewards else None
        receipt = assemble_receipt(
            manifest,
            rollout_id=rollout_id,
            reward=reward,
            declared_response_id=None if named is None else response_id_of(manifest.records, named),
        )
        return RolloutOutcome(
            rollout_id=rollout_id, index=index, receipt=receipt, failures=manifest.failures, reward=reward
        )


def response_id_of(records: Sequence[CallRecord], named: str) -> str:
    """The response id that `--terminal` means: itself, or that of the one call whose id it is or begins.

    What names no call is returned as it is: the receipt then says that it was not captured.
    """
    if any(record.response_id == named for record in records):
        return named
    calls = [record for record in records if record.model_call_id.startswith(named)]
    return calls[0].response_id if len(calls) == 1 else named


def checked_group(asked: ReceiptAsked) -> str:
    """The group's id. Raises SetupError, or WireError for an id that is none, for what cannot be meant."""
    many = len(asked.rollouts)
    for rollout_id in asked.rollouts:
        check_rollout_id(rollout_id)
    if len(set(asked.rollouts)) != many:
        raise SetupError("A rollout is named twice; every rollout of a group is another one.")
    for option, given in (("--terminal", asked.terminals), ("--reward", asked.rewards)):
        if given and len(given) != many:
            raise SetupError(f"{option}: expected none, or one for each of {many} rollouts in order; got {len(given)}.")
    for reward in asked.rewards:
        if not abs(reward) <= LARGEST:  # NaN neither
            raise SetupError(f"--reward {reward:g}: expected a number between -{LARGEST:g} and {LARGEST:g}.")
    # Part of a file name as rollout ids are, so of the same characters.
    if asked.group is None:
        return check_rollout_id(asked.rollouts[0])
    try:
        return check_rollout_id(asked.group)
    except WireError as error:
        allowed = "1-200 characters of A-Z a-z 0-9 . _ - and not only dots"
        raise SetupError(f"--group {asked.group}: expected {allowed}.") from error


def _dispatch_version(outcomes: Sequence[RolloutOutcome]) -> int:
    return max((r.weight_version for o in outcomes if o.receipt is not None for r in o.receipt.manifest), default=0)


def _verdict(group_id: str, row: RowSummary, outcome: RolloutOutcome) -> Verdict:
    receipt = outcome.receipt
    assert receipt is not None
    records = {record.model_call_id: record for record in receipt.manifest}
    chain, call_id = 0, receipt.terminal_model_call_id
    while call_id in records and chain <= len(records):
        chain, call_id = chain + 1, records[call_id].parent_call_id
    terminal = records.get(receipt.terminal_model_call_id or "")
    return Verdict(
        rollout_id=row.rollout_id,
        group_id=group_id,
        verified=row.sample_mask == 1,
        cause=None if row.cause is None else row.cause.value,
        detail=row.detail,
        call_id=row.call_id,
        position=row.position,
        terminal=receipt.terminal_model_call_id,
        selection=receipt.terminal_selection,
        attribution=receipt.terminal_attribution_reason,
        digest=None if terminal is None else terminal.cumulative_hash,
        calls=len(records),
        chain=chain,
        failed_calls=len(outcome.failures),
        tokens=row.tokens,
        sampled_tokens=row.sampled_tokens,
        reward=receipt.reward,
        other_roots=sum(record.parent_call_id is None for record in records.values()) - (chain > 0),
    )
