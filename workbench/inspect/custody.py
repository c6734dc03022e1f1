"""Custody: what is proved about one rollout, in a few words that every inspector shows alike.

In: a run, a ledger, or frames of one. Out: a state, a sentence (for a rejected rollout its cause, the call and the
token position) and the first eight characters of the digest that vouches for the sequence. Invariant: nothing is called
verified that the verifier has not passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from workbench.inspect.causes import explain, in_words
from workbench.inspect.ids import short_id
from workbench.runs.shelf import guessed

State = Literal["verified", "rejected", "open", "unknown"]


RELATION_WORDS = {
    "chain": "on the terminal chain",
    "earliest": "the earliest path; no terminal call was chosen",
    "retry": "retry: the same request again",
    "branch": "side branch: another request after the same call",
    "side_root": "a conversation of its own",
    "failed": "failed",
    "unresolved": "unresolved",
}
"""What a call is to the terminal chain, in words."""


@dataclass(frozen=True)
class Custody:
    """`digest` is the cumulative hash of the terminal call, shortened; None where there is no terminal. `meaning` is
    what the vocabulary says of the cause of a rejected one."""

    state: State
    words: str
    digest: str | None = None
    meaning: str = ""

    def sentence(self) -> str:
        """State, reason and digest in one line."""
        return self.words if self.digest is None else f"{self.words} · digest {self.digest}"


def rollout_row(source: Any, rollout_id: str) -> dict[str, Any] | None:
    """The rollout's row of `source.rollouts`; None for a bare frame, or where it is not finalised.

    `unread` in it says why nobody knows whether a step trained it. Raises RunStoreError where the part that holds its
    row or its calls is damaged.
    """
    rollouts: pl.DataFrame | None = None if isinstance(source, pl.DataFrame) else getattr(source, "rollouts", None)
    if rollouts is None:
        return None
    unread = source.unread(rollout_id) if hasattr(source, "unread") else {}
    for table in ("rows", "calls"):
        if table in unread:
            raise unread[table]
    found = rollouts.filter(pl.col("rollout_id") == rollout_id)
    return found.row(0, named=True) | {"unread": unread.get("train")} if found.height else None


def custody_of(rollout: dict[str, Any] | None, calls: pl.DataFrame | None, *, from_run: bool = True) -> Custody:
    """Custody of the rollout in a row of the rollouts frame; `calls` (of that rollout) give the digest."""
    digest = _digest(rollout, calls)
    if rollout is None:
        words = "not finalised yet: nothing is verified" if from_run else "custody not shown: made from a bare frame"
        return Custody("open" if from_run else "unknown", words, digest)
    if rollout.get("cause"):
        return Custody("rejected", rejection(rollout), digest, explain(rollout["cause"]))
    if rollout.get("verified"):
        words = f"verified, terminal by {rollout.get('terminal_selection')}, {trained_words(rollout)}"
        return Custody("verified", words, digest)
    if rollout.get("sample_mask") == 1:
        at = rollout.get("position")
        wrong = "" if at is None else f"; from token {at:,} on not what the engine ran"
        return Custody("open", f"token echo: ids came with the responses, nothing vouches for them{wrong}", digest)
    chosen = rollout.get("terminal_selection") or "nobody"
    return Custody("open", f"custody rows only, not verified; terminal by {chosen}", digest)


def custody_of_call(rollout: dict[str, Any] | None, calls: pl.DataFrame, call_id: str) -> Custody:
    """Custody of the path that ends at one call; of a call beside the chain, that it is not in the training row."""
    found = calls.filter(pl.col("model_call_id") == call_id)
    if not found.height or found["relation"][0] == "chain":
        return custody_of(rollout, calls)
    words = RELATION_WORDS.get(found["relation"][0], found["relation"][0])
    digest = found["cumulative_hash"][0] if "cumulative_hash" in found.columns else None
    return Custody("open", f"not in the training row: {words}", None if digest is None else str(digest)[:8])


def guessed_words(rollouts: pl.DataFrame, calls: pl.DataFrame) -> str | None:
    """How many valid rollouts have a terminal call by heuristic, what that means and what to do; None for none."""
    chosen = guessed(rollouts)
    if chosen.is_empty():
        return None
    roots = calls.filter((pl.col("mode") == "text") & (pl.col("relation") != "chain"))
    several = chosen.join(roots, on="rollout_id", how="semi").height
    valid = int((rollouts["sample_mask"] == 1).sum())
    left_out = (
        f"; {several:,} of them had other conversations too, which were left out, so that what was trained may not be "
        "what the reward was for"
    ) * bool(several)
    share = f"heuristic_fraction {chosen.height / valid:.3g}"
    return (
        f"the last call of {chosen.height:,} of {valid:,} valid rollouts was named by nobody and chosen by heuristic "
        f"from the parent links ({share}){left_out}. Next: return the served response (AgentResult.response), or name "
        "it (workbench receipt --terminal)"
    )


def trained_words(rollout: dict[str, Any]) -> str:
    """Whether a step trained the row; only then is anything called trained."""
    step = rollout.get("trained_step")
    if step is None and rollout.get("unread"):
        return f"whether a step trained it is not known: {rollout['unread']}"
    return "no step has trained it" if step is None else f"trained in step {step}"


def standing(rollout: dict[str, Any]) -> str:
    """What became of a rollout, for a headline or a list."""
    if rollout.get("cause"):
        return f"rejected: {rollout['cause']}"
    if rollout.get("verified"):
        how = ", terminal by heuristic" if rollout.get("terminal_selection") == "heuristic" else ""
        return f"verified{how}, {trained_words(rollout)}"
    if rollout.get("terminal_selection"):
        return f"terminal by {rollout['terminal_selection']}, not verified"
    return "token echo, not verified" if rollout.get("sample_mask") == 1 else "not finalised"


def rejection(rollout: dict[str, Any]) -> str:
    """Why a rollout was thrown away: cause, call, token position, detail."""
    place = f" at call {short_id(rollout['call_id'], rollout['rollout_id'])}" if rollout.get("call_id") else ""
    place += f", token {rollout['position']:,}" if rollout.get("position") is not None else ""
    detail = in_words(rollout.get("detail"), rollout["cause"])
    return f"rejected, {rollout['cause']}{place}{detail and f': {detail}'}"


def _digest(rollout: dict[str, Any] | None, calls: pl.DataFrame | None) -> str | None:
    terminal = (rollout or {}).get("terminal_model_call_id")
    if terminal is None or calls is None or "cumulative_hash" not in calls.columns:
        return None
    found = calls.filter(pl.col("model_call_id") == terminal)["cumulative_hash"].drop_nulls()
    return str(found[0])[:8] if found.len() else None
