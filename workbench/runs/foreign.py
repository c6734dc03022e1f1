"""Foreign: a custody ledger without a run around it, as the same frames.

    ledger = open_ledger("path/to/ledger")     ledger.rollouts  ledger.calls  ledger.receipt(rollout_id)

In: a directory of `<rollout_id>.lineage.jsonl` files, written by a NeMo Gym run or by a gateway of ours. Out: the calls
and rollouts frames that a run has; token columns are null, because a ledger holds no tokens. Nobody bears witness to
which call ended a rollout, so the heuristic says it, and the frame says that it did.
Invariants: the directory is only read; a file that cannot be read is one rollout with its cause, not the end.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from workbench.errors import RunStoreError, WorkbenchError
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.runs.custody import broken_events, holds_records, is_ledger, ledger_files, ledger_rows, rollout_of
from workbench.runs.damage import in_short, torn_lines
from workbench.runs.finding import find
from workbench.runs.frames import frame_of
from workbench.runs.reader import Run, open
from workbench.runs.relations import relate
from workbench.wire import Cause, RolloutReceipt


def open_ledger(path: str | PathLike[str]) -> ForeignLedger:
    """The ledgers in a directory, looked for as a run is. Raises RunStoreError where there are none."""
    directory = find(path, is_ledger)
    if not ledger_files(directory):
        raise RunStoreError(f"No ledger in {directory}: expected files named <rollout_id>.lineage.jsonl there")
    return ForeignLedger(directory)


def open_any(path: str | PathLike[str]) -> Run | ForeignLedger:
    """The run in a directory, or the ledgers where it holds no run. Raises RunStoreError where it holds neither."""
    directory = find(path, holds_records)
    return open_ledger(directory) if is_ledger(directory) else open(directory)


class ForeignLedger:
    """Custody without tokens. Frames are built when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = LedgerStore(path)
        self._receipts: dict[str, RolloutReceipt] = {}
        self._frames: dict[str, pl.DataFrame] = {}
        self._broken: list[str] = []

    def __reduce__(self) -> tuple[type[ForeignLedger], tuple[Path]]:
        return ForeignLedger, (self.path,)  # read again where it is opened; its locks cannot travel

    def __repr__(self) -> str:
        calls, rollouts = self.calls, self.rollouts
        return (
            f"Ledger {self.path.name} · {rollouts.height:,} rollouts, {rollouts['cause'].count():,} of them rejected · "
            f"{calls.height:,} calls, {calls['failure_reason'].count():,} of them failed or unresolved · no tokens"
            f"{in_short(self.damage, self.path)}"
        )

    @property
    def damage(self) -> list[str]:
        """One sentence for each ledger line that could not be read, with its file and place; usually none."""
        self._build()
        return [*self._broken, *broken_events(self.path), *torn_lines(ledger_files(self.path))]

    @property
    def calls(self) -> pl.DataFrame:
        """One row a call, the columns of a run's calls frame."""
        self._build()
        return self._frames["calls"]

    @property
    def rollouts(self) -> pl.DataFrame:
        """One row a rollout: its terminal call and how that was chosen, or the cause why there is none."""
        self._build()
        return self._frames["rollouts"]

    def receipt(self, rollout_id: str) -> RolloutReceipt:
        """The receipt that this ledger supports: no reward, terminal by the heuristic. Raises LedgerCorrupt."""
        if rollout_id not in self._receipts:
            if not (self.path / f"{rollout_id}.lineage.jsonl").exists():
                raise RunStoreError(f"No ledger of rollout {rollout_id!r} in {self.path}")
            self._receipts[rollout_id] = assemble_receipt(
                self._store.manifest(rollout_id), rollout_id=rollout_id, reward=None, on_no_witness="heuristic"
            )
        return self._receipts[rollout_id]

    def tokens(self, rollout_id: str, call_id: str | None = None) -> pl.DataFrame:
        """Always raises RunStoreError: tokens are in the staging store of the run that wrote the ledger."""
        raise RunStoreError(f"Ledger {self.path} is custody only; it holds no tokens of {rollout_id!r}")

    def _build(self) -> None:
        if self._frames:
            return
        rollouts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for path in ledger_files(self.path):
            rollout_id = rollout_of(path)
            try:
                receipt = self.receipt(rollout_id)
                recorded = ledger_rows(path)
            except (WorkbenchError, OSError) as error:
                # Without its ledger nothing can be received of the rollout; the detail names file and line.
                cause = Cause.MISSING_RECEIPT.value
                rollouts.append({"rollout_id": rollout_id, "cause": cause, "detail": str(error)})
                self._broken.append(str(error))
                continue
            chain = _chain(receipt)
            for call, word in zip(recorded, relate(recorded, chain), strict=True):
                call |= {
                    "relation": word,
                    "on_chain": call["model_call_id"] in chain,
                    "terminal": call["model_call_id"] == receipt.terminal_model_call_id,
                }
            calls.extend(recorded)
            rollouts.append(_rollout(receipt, recorded))
        self._frames = {"calls": frame_of("calls", calls), "rollouts": frame_of("rollouts", rollouts)}


def _rollout(receipt: RolloutReceipt, calls: list[dict[str, Any]]) -> dict[str, Any]:
    terminal = next((r for r in receipt.manifest if r.model_call_id == receipt.terminal_model_call_id), None)
    failed = [call for call in calls if call.get("failure_reason")]
    return {
        "rollout_id": receipt.rollout_id,
        "cause": receipt.failure_reason,
        "terminal_model_call_id": receipt.terminal_model_call_id,
        "terminal_selection": receipt.terminal_selection,
        "terminal_attribution_reason": receipt.terminal_attribution_reason,
        "capture_poisoned": receipt.capture_poisoned,
        "failure_reason": receipt.failure_reason,
        "calls": len(receipt.manifest),
        "failed_calls": len(failed),
        "unresolved_calls": sum(call["failure_reason"] == "unresolved_parent" for call in failed),
        "tokens": terminal.cum_len if terminal is not None else None,
    }


def _chain(receipt: RolloutReceipt) -> set[str]:
    parents = {record.model_call_id: record.parent_call_id for record in receipt.manifest}
    chain: set[str] = set()
    call_id = receipt.terminal_model_call_id
    while call_id is not None and call_id not in chain:
        chain.add(call_id)
        call_id = parents.get(call_id)
    return chain
