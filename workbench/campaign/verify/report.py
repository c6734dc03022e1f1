"""Verify report: what was recomputed of a stored run, and everything that differs.

Invariant: the report claims no more than was done: a run without a finished group, without receipts or without its
ledgers says so in its one line.
Not here: the recomputing (run, ledger).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.inspect.html import count

_SHOWN = 20
NOT_COVERED = (
    "not recomputed: the trainer's log-probs, loss, KL penalty, gradient norm and router agreement, which need the "
    "model (tools/recompute_run.py does the first two), and what has no second record: times, proofs, error texts, "
    "environment.json, campaign.ipynb, campaign.html, weights, a ledger's context_digest after the first request (and "
    "its context_len without items.jsonl), most of a recipe without a digest in the events, a vocabulary without "
    "weights/*/tokenizer.json"
)


@dataclass(frozen=True)
class Difference:
    """One thing that is not what the run says it is."""

    file: str
    rollout_id: str | None
    call_id: str | None
    what: str

    def __str__(self) -> str:
        place = "".join(
            f", {name} {value}" for name, value in (("rollout", self.rollout_id), ("call", self.call_id)) if value
        )
        return f"{self.file}{place}: {self.what}"


@dataclass
class VerifyReport:
    """What was recomputed, and every difference that was found. `ok` when there is none.

    `not_compared` names what the run does not have, and what therefore nothing was held against; `remarks` are what
    else is worth knowing and no difference.
    """

    run: str
    groups: int = 0
    rollouts: int = 0
    rows_valid: int = 0
    calls: int = 0
    """Of finalised rollouts, as their summary counts them."""
    calls_not_captured: int = 0
    tokens: int = 0
    receipts: int = 0
    ledger_rows: int = 0
    steps: int = 0
    """Of which advantages, votes and the line were recomputed."""
    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def empty(self) -> bool:
        """Nothing was there that could be verified, which is no proof of anything."""
        return not self.groups and self.ok

    def differs(self, file: str, rollout_id: str | None, call_id: str | None, what: str) -> None:
        """Note one difference; the advice of an error, which is to verify, is left out."""
        what = " ".join(what.split()).partition(". Next: workbench verify")[0]
        self.differences.append(Difference(file, rollout_id, call_id, what))

    def __repr__(self) -> str:
        if self.empty:
            return f"Nothing to verify in {self.run}: no group was finished"
        many = "S" if len(self.differences) != 1 else ""
        # Without capture there is nothing that vouches for a token; only the joining of the turns can be repeated.
        holds = "every row joins again; no receipts, so no digests"
        if self.receipts:
            holds = "every digest, row and step holds" if self.steps else "every digest and row holds"
        remarks = [count(len(self.remarks), "remark")] if self.remarks else []
        verdict = holds if self.ok else f"{len(self.differences):,} DIFFERENCE{many}"
        uncaptured = f" ({self.calls_not_captured:,} not captured)" if self.calls_not_captured else ""
        found = "Verified" if self.ok else "NOT as recorded:"
        return (
            f"{found} {self.run} · {count(self.groups, 'group')} · {count(self.rollouts, 'rollout')} "
            f"({self.rows_valid:,} valid) · {count(self.calls, 'call')}{uncaptured} · {count(self.tokens, 'token')} · "
            f"{' · '.join([verdict, *self.not_compared, *remarks])}"
        )

    def __str__(self) -> str:
        lines = [repr(self), *([f"  {NOT_COVERED}"] if self.steps else [])]
        for what, all_of_it in (("differences", self.differences), ("remarks", self.remarks)):
            lines += [f"  {'remark: ' * (what == 'remarks')}{each}" for each in all_of_it[:_SHOWN]]
            if len(all_of_it) > _SHOWN:
                lines.append(f"  showing {_SHOWN} of {len(all_of_it):,} {what}; all: .{what}")
        return "\n".join(lines)
