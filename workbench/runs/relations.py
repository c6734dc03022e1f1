"""Relations: what each call is to the chain that ends in the rollout's terminal call.

In: the calls of one rollout in ledger order. Out: one word a call:
`chain` (on the terminal chain), `earliest` (no terminal was chosen; on the earliest path there is), `retry` (the same
request after the same call as a sibling), `branch` (another request after a call that went on otherwise), `side_root`
(a root that is not the chain's), `failed`, `unresolved`.
Invariant: every call has exactly one word; a descendant of a retry or a branch has its ancestor's word.
Not here: whether a step trained the row (the rollouts frame's `trained_step`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.ledger.heuristic import select_terminal
from workbench.wire import Cause

UNRESOLVED = "unresolved_parent"
_NAMED = re.compile(r"(declared|response_id|content)=([^;\]]+)")


class _Link(NamedTuple):
    model_call_id: str
    parent_call_id: str | None
    admitted_at: float | None


def contenders(calls: Sequence[dict[str, Any]], cause: str | None, witnesses: str | None) -> dict[str, str]:
    """Call id → why it could have been the terminal one, for a rollout that was rejected because that was undecided.

    `witnesses` is the receipt's attribution reason. Empty for every other cause, and where no call can be named.
    """
    if cause == Cause.WITNESS_DISAGREEMENT.value:
        named: dict[str, list[str]] = {}
        for witness, call_id in _NAMED.findall((witnesses or "").partition("witness_disagreement[")[2]):
            named.setdefault(call_id, []).append(witness)
        return {call_id: f"the last call, says {' and '.join(who)}" for call_id, who in named.items()}
    if cause != Cause.AMBIGUOUS_TERMINAL.value:
        return {}
    captured = [call for call in calls if not call.get("failure_reason")]
    links = [_Link(c["model_call_id"], c.get("parent_call_id"), c.get("admitted_at")) for c in captured]
    alike = select_terminal(links).candidates
    return dict.fromkeys(alike, f"one of {len(alike)} that could be the last call")


def relate(calls: Sequence[dict[str, Any]], on_chain: set[str]) -> list[str]:
    """One word a call, in the order given. `on_chain` holds the call ids of the terminal chain (empty: none known).

    Without a chain the earliest root's first path stands in for it in telling what a sibling is, and is called
    `earliest`. Two requests count as the same where their `context_digest` is known and equal.
    """
    by_id = {call["model_call_id"]: call for call in calls if not call.get("failure_reason")}
    first_child: dict[str | None, dict[str, Any]] = {}
    for call in by_id.values():
        parent = call.get("parent_call_id")
        chosen = first_child.get(parent)
        if chosen is None or (call["model_call_id"] in on_chain and chosen["model_call_id"] not in on_chain):
            first_child[parent] = call

    stand_in: set[str] = set()
    at = None if on_chain else first_child.get(None)
    while at is not None and at["model_call_id"] not in stand_in:
        stand_in.add(at["model_call_id"])
        at = first_child.get(at["model_call_id"])

    words: dict[str, str] = {}
    for call in calls:
        call_id = call["model_call_id"]
        if call.get("failure_reason"):
            words[call_id] = "unresolved" if call["failure_reason"] == UNRESOLVED else "failed"
        elif call_id in on_chain:
            words[call_id] = "chain"
        elif call_id in stand_in:
            words[call_id] = "earliest"
        else:
            words[call_id] = _apart(call, by_id, first_child, words)
    return [words[call["model_call_id"]] for call in calls]


def _apart(
    call: dict[str, Any],
    by_id: dict[str, dict[str, Any]],
    first_child: dict[str | None, dict[str, Any]],
    words: dict[str, str],
) -> str:
    parent_id = call.get("parent_call_id")
    inherited = words.get(parent_id) if parent_id is not None else None
    if inherited in ("retry", "branch", "side_root"):
        return inherited
    sibling = first_child.get(parent_id)
    if sibling is not None and sibling is not call and _same_request(call, sibling):
        return "retry"
    return "side_root" if parent_id is None or parent_id not in by_id else "branch"


def _same_request(one: dict[str, Any], other: dict[str, Any]) -> bool:
    digest = one.get("context_digest")
    return digest is not None and digest == other.get("context_digest")
