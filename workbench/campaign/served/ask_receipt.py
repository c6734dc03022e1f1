"""Ask receipt: the client's side of `workbench receipt`, and the few lines that it prints.

In: a run directory, rollout ids. Out: verdicts, made by the process that serves the run.
Invariant: nothing is written here; without its server a run's open rollouts have no tokens left that could be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench import runs
from workbench.campaign.served.desk import ReceiptAsked, Verdict, checked_group
from workbench.campaign.served.desk_socket import ask
from workbench.errors import ComponentDied, RunStoreError
from workbench.inspect.causes import in_words
from workbench.inspect.html import count
from workbench.places import as_word
from workbench.runs.condition import broken_status, state_of

# Beside the finalizer's own deadline: the gateway's control calls, and a group that is being finalised before this one.
MORE_S = 60.0
FINALIZER_TIMEOUT_S = 60.0


def ask_receipt(
    run_dir: Path,
    rollouts: Sequence[str],
    *,
    terminals: Sequence[str] = (),
    rewards: Sequence[float] = (),
    group: str | None = None,
) -> list[Verdict]:
    """Have rollouts of a served run closed, verified and stored as one group.

    Raises RunStoreError for a directory without a run or with one that is not served, SetupError for a request that
    contradicts itself, ComponentDied where the server is gone, DeadlineExceeded, and the server's own refusals as
    WorkbenchError.
    """
    run = runs.open(run_dir)
    status = run.status
    desk = status.get("desk")
    if broken := broken_status(run.path):
        raise RunStoreError(
            f"{broken[0]}, so where a server of this run listens is not known, and no rollout of it can be closed. "
            f"Next: end the server, if it still runs, and serve again; workbench inspect "
            f"{as_word(run_dir)} shows the calls."
        )
    if not isinstance(desk, str) and run.served:
        state, error = state_of(run.path)
        if state == "running":
            raise RunStoreError(f"Run {run.name} does not serve yet ({status.get('phase')}). Next: wait for its URL.")
        raise RunStoreError(f"Run {run.name} ended before it served, so it has no rollouts: {error or state}.")
    if not isinstance(desk, str):
        raise RunStoreError(f"Run {run.name} is not served: it is a campaign's, whose rollouts have their receipts.")
    finalizer: Any = run.recipe.get("finalizer") or {}
    timeout_s = float(finalizer.get("timeout_s") or FINALIZER_TIMEOUT_S) + MORE_S
    asked = ReceiptAsked(rollouts=list(rollouts), terminals=list(terminals), rewards=list(rewards), group=group)
    checked_group(asked)
    try:
        answer = ask(desk, asked.model_dump(), timeout_s)
    except ConnectionError:
        raise ComponentDied(
            f"The server of run {run.name} is gone, and with it the tokens of rollouts that had no receipt. "
            f"What was recorded of their calls: workbench inspect {as_word(run_dir)}"
        ) from None
    return [Verdict.model_validate(verdict) for verdict in answer["verdicts"]]


def verdict_text(verdict: Verdict, run_dir: Path) -> str:
    """The verdict in a few lines."""
    reward = "none" if verdict.reward is None else f"{verdict.reward:g}"
    if verdict.verified:
        lines = [
            f"Rollout {verdict.rollout_id}: verified",
            f"  terminal  call {verdict.terminal}, {_selection(verdict)}",
            *_left_out(verdict),
            f"  calls     {_calls(verdict)}",
            f"  tokens    {verdict.tokens:,}, {verdict.sampled_tokens:,} sampled; digest {_short(verdict.digest)}",
        ]
    else:
        place = f" at call {verdict.call_id}" if verdict.call_id else ""
        place += f", token {verdict.position}" if verdict.position is not None else ""
        lines = [
            f"Rollout {verdict.rollout_id}: rejected, {verdict.cause}{place}",
            *([f"  detail    {in_words(' '.join(verdict.detail.split()))}"] if verdict.detail else []),
            f"  terminal  {'call ' + verdict.terminal if verdict.terminal else 'none'}, {_selection(verdict)}",
            f"  calls     {_calls(verdict)}",
        ]
    lines += [
        f"  reward    {reward}; stored as group {verdict.group_id}",
        f"  look      workbench inspect {as_word(run_dir)} {verdict.rollout_id}",
    ]
    return "\n".join(lines)


def _calls(verdict: Verdict) -> str:
    """As inspect counts: a call that was not captured is one too. Every call is counted once after the colon."""
    parts = [(verdict.calls, "captured")]
    if verdict.verified:
        parts = [(verdict.chain, "in the chain"), (verdict.calls - verdict.chain, "captured beside it")]
    parts.append((verdict.failed_calls, "not captured"))
    said = ", ".join(f"{number:,} {what}" for number, what in parts if number)
    return f"{verdict.calls + verdict.failed_calls:,}: {said or 'none'}"


def _selection(verdict: Verdict) -> str:
    how = {
        "declared": "declared",
        "response_id": "by the response's id",
        "content": "by the response's content",
        "heuristic": "chosen by heuristic from the parent links, nobody named one",
        None: "not attributed",
    }.get(verdict.selection, str(verdict.selection))
    return f"{how}: {in_words(verdict.attribution)}" if verdict.selection is None and verdict.attribution else how


def _left_out(verdict: Verdict) -> list[str]:
    if verdict.selection != "heuristic" or not verdict.other_roots:
        return []
    others = count(verdict.other_roots, "other conversation")
    return [f"            {others} of this rollout left out; --terminal names the call that was scored"]


def _short(digest: str | None) -> str:
    return (digest or "")[:12]
