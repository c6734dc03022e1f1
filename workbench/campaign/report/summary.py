"""Summary: a run in one screen, every number a query over its store.

In: a run directory. Out: `Summary`, as JSON (`summary.json`) and as text for the terminal: the notebook, how calls were
captured, every rejected rollout with its cause, rows a group, versions and their proofs, the log-prob difference, the
reward. Invariant: what was not recorded is null and shown as a dash. Not here: deciding anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from workbench import runs
from workbench.campaign.report.learned import reward_rise
from workbench.campaign.report.notebook_file import Outcome
from workbench.inspect.causes import in_words
from workbench.inspect.custody import guessed_words
from workbench.inspect.html import dash
from workbench.inspect.rejected import rejected_words
from workbench.places import as_word
from workbench.runs.early import MANY, count_early, early_remark
from workbench.runs.gradient import nothing_learned, unchanged
from workbench.runs.refused import refused_words
from workbench.runs.shelf import counted_calls, finished_rollouts, guessed, token_in_rates
from workbench.runs.tokens import Deltas, count_deltas

_SHOWN_REJECTIONS = 12
_LETTERS = 160
"""Of a line about rejected rollouts; summary.json has all of it."""


@dataclass(frozen=True)
class Summary:
    """The run in numbers. Log-prob differences in nat, times in s."""

    run: str
    status: str
    error: str | None
    notebook: str
    html: str
    steps: int
    unrecorded_steps: int
    """Taken, but stopped before their weights were out and their line written; `resume` does both."""
    weight_version: int | None
    groups: int
    rows_per_group: list[int]
    rollouts: int
    valid_rollouts: int
    calls: int
    """Of finalised rollouts, of a served run all; the rates are about these, as everywhere on the page."""
    unfinished_calls: int
    """Recorded calls of rollouts that were still played when the run ended."""
    token_in_rate: float | None
    token_in_rate_after_roots: float | None
    echo_wrong_rows: int | None
    """Token-echo arm: valid rows that are not what the engine ran at their last call. None where capture is on."""
    heuristic_fraction: float | None
    """Of the valid rollouts, those whose last call nobody named, so that the parent links chose it."""
    guessed: str | None
    """The same in words, with the next step; None for none."""
    nothing_learned: str | None
    """That no step had a gradient from a reward, and why, in words; None where one may have had."""
    ended_early: dict[str, int]
    """Reason -> finalised rollouts whose agent stopped before the end."""
    untrained_rollouts: int
    """Valid, in a step that was taken, and no token of them in its loss; `Optimisation(run)` says why."""
    refused: list[dict[str, Any]]
    """Requests that gateway or engine refused, an entry a rollout and reason; its agent may have gone on."""
    refused_words: str | None
    """The same in one line; None for none."""
    rejected: list[dict[str, Any]]
    proofs: list[dict[str, Any]]
    trained_tokens: int
    mean_abs_logprob_delta: float | None
    """Over all trained tokens: number formats, and the steps between sampling and training."""
    on_policy_tokens: int
    mean_abs_logprob_delta_on_policy: float | None
    """Over tokens that were sampled from the very weights that then scored them: number formats alone."""
    resumed: int
    """How often the run was stopped and gone on with; `seconds` is about the last time only."""
    reward_first_step: float | None
    """`reward_mean` of the first step that has one."""
    reward_last_step: float | None
    reward_rise: dict[str, Any] | None
    """Last quarter of the steps against the first, with one-sided 95 % bounds; null for fewer than eight steps."""
    seconds: float

    @property
    def nothing_trained(self) -> bool:
        """Steps were taken, and none of them had a token to learn from."""
        return self.steps > 0 and (self.valid_rollouts == 0 or self.trained_tokens == 0)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def text(self) -> str:
        """What the terminal shows when a run has ended."""
        rows = "/".join(str(n) for n in sorted(set(self.rows_per_group))) or "–"
        proofs = [proof["mean_abs_delta"] for proof in self.proofs if proof["mean_abs_delta"] is not None]
        agreed = f"{len(proofs)} passed, worst mean |Δ| {max(proofs):.4f} nat" if proofs else "–"
        told = ", but nothing was trained" if self.status == "done" else ", and nothing was trained"
        lines = [
            f"Run {self.run}: {self.status}{told * self.nothing_trained} ({_minutes(self.seconds)})",
            *(self._why_nothing_was_trained() if self.nothing_trained else []),
            *([f"  error                      {self.error}"] if self.error else []),
            *([f"  resumed                    {self.resumed} × (the time is since then)"] if self.resumed else []),
            *self._remarks(),
            f"  notebook                   {self.notebook}",
            f"  page                       {self.html}",
            f"  optimiser steps            {self.steps}{' taken on no row' * self.nothing_trained}"
            f"{self._taken_without_a_line()}, weight version {dash(self.weight_version)}",
            f"  groups                     {self.groups}, rows in every group: {rows}",
            f"  rollouts                   {self.valid_rollouts} of {self.rollouts} valid, {self.calls} calls"
            + (f", and {self.unfinished_calls} of unfinished rollouts, in no rate" if self.unfinished_calls else ""),
            *self._left_out(),
            *self._what_was_refused(),
            f"  token_in_rate              {dash(self.token_in_rate, '.4g')}",
            f"  token_in_rate_after_roots  {dash(self.token_in_rate_after_roots, '.4g')}",
            *(
                []
                if self.echo_wrong_rows is None
                else [f"  token-echo arm             {self.echo_wrong_rows} of {self.valid_rollouts} valid rows wrong"]
            ),
            f"  sampler–trainer proofs     {agreed}",
            f"  mean |Δ log-prob|          {_mean(self.mean_abs_logprob_delta, self.trained_tokens)}",
            f"    at equal weights         {_mean(self.mean_abs_logprob_delta_on_policy, self.on_policy_tokens)}",
            f"  reward at first step       {dash(self.reward_first_step, '.3f')}",
            f"  reward at last step        {dash(self.reward_last_step, '.3f')}",
            *([f"  last − first quarter       {_rise(self.reward_rise)}"] if self.reward_rise else []),
            f"  rejected rollouts          {len(self.rejected)}",
        ]
        lines += self._what_was_rejected()
        return "\n".join(lines)

    def _what_was_rejected(self) -> list[str]:
        """A line a rejected rollout; those with one cause and detail are one line with their number and the first."""
        alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.rejected:
            alike.setdefault((row["cause"], in_words(row["detail"], row["cause"])), []).append(row)
        lines = []
        for (cause, words), rows in list(alike.items())[:_SHOWN_REJECTIONS]:
            first = rows[0]
            place = f" at call {first['call_id'][:8]}" if first["call_id"] else ""
            place += f", token {first['position']}" if first["position"] is not None else ""
            who = first["rollout_id"] if len(rows) == 1 else f"{first['rollout_id']} and {len(rows) - 1} more"
            lines.append(_cut(f"    {who}  {cause}{place * (len(rows) == 1)}  {words}".rstrip()))
        rest = Counter(row["cause"] for rows in list(alike.values())[_SHOWN_REJECTIONS:] for row in rows)
        if rest:
            more = ", ".join(f"{cause} {count}" for cause, count in rest.most_common())
            lines.append(f"    and {rest.total()} more ({more}), all in summary.json")
        return lines

    def _left_out(self) -> list[str]:
        if not self.untrained_rollouts:
            return []
        return [f"  left out of their step     {self.untrained_rollouts} valid; Optimisation(run) says why"]

    def _what_was_refused(self) -> list[str]:
        if self.refused_words is None:
            return []
        said = next((row for row in self.refused if row["message"] and row["rollout_id"]), None)
        example = [f"                             {said['rollout_id']}: {said['message']}"] if said else []
        return [f"  refused requests           {self.refused_words}", *example]

    def _remarks(self) -> list[str]:
        """What a reader must know before the numbers; in capitals where it is about many rollouts."""
        told = []
        if self.nothing_learned and not self.nothing_trained:
            told.append(("nothing learned", self.nothing_learned, True))
        if len(self.rejected) > MANY * self.rollouts and not self.nothing_trained:
            words, rollout_id = rejected_words(self.rejected, self.rollouts)
            told.append(("rejected", f"{words}. Next: {self._inspect(rollout_id)}", True))
        if self.guessed:
            told.append(("last calls guessed", self.guessed, (self.heuristic_fraction or 0.0) > MANY))
        if early := sum(self.ended_early.values()):
            words = early_remark(self.ended_early, self.rollouts)
            told.append(("ended early", words, early > MANY * self.rollouts))
        return [f"  {label.upper() if loud else label:<27}{words}" for label, words, loud in told]

    def _taken_without_a_line(self) -> str:
        return f", and {self.unrecorded_steps} more whose weights were not out yet" if self.unrecorded_steps else ""

    def _why_nothing_was_trained(self) -> list[str]:
        words, rollout_id = rejected_words(self.rejected, self.rollouts)
        look = self._inspect(rollout_id)
        return [f"  nothing was trained        {words}", f"                             Next: {look}"]

    def _inspect(self, rollout_id: str | None) -> str:
        return f"workbench inspect {as_word(Path(self.notebook).parent)}{f' {rollout_id}' if rollout_id else ''}"


def summarise(run_dir: Path, *, notebook: Path, outcome: Outcome, seconds: float) -> Summary:
    """The summary of the run in `run_dir`, which took `seconds` with start and stop of all its parts.

    Raises RunStoreError when no run was begun there, or a part of it is damaged: its numbers would be of another run.
    """
    return summary_of(runs.open(run_dir), notebook=notebook, outcome=outcome, seconds=seconds)


def summary_of(
    run: runs.Run, *, notebook: Path, outcome: Outcome, seconds: float, deltas: Deltas | None = None
) -> Summary:
    """As `summarise`. `deltas`: those of the run, for who has counted them; else its tokens are read for it."""
    for damaged in run.damaged_parts().values():
        raise damaged
    steps, rollouts, campaign = run.steps, finished_rollouts(run), run.campaign.row(0, named=True)
    taken = rollouts.drop_nulls("taken_step")
    rewards = steps.sort("step")["reward_mean"].to_list()
    calls = counted_calls(run)
    rates = token_in_rates(calls)
    refused = run.refused
    valid = int((rollouts["sample_mask"] == 1).sum())
    deltas = count_deltas(run.logprobs()) if deltas is None else deltas
    train = run.recipe.get("train") or {}
    trained_tokens, mean_abs = deltas.mean_abs()
    equal_tokens, equal_mean_abs = deltas.mean_abs(unchanged(steps, train))
    return Summary(
        run=run.name,
        status=outcome.status,
        error=outcome.told,
        notebook=str(notebook),
        html=str(notebook.with_suffix(".html")),
        steps=steps.height,
        unrecorded_steps=len(deltas.steps - set(steps["step"].to_list())),
        weight_version=campaign["weight_version"],
        groups=rollouts["group_id"].n_unique(),
        rows_per_group=rollouts.group_by("group_id").len().sort("group_id")["len"].to_list(),
        rollouts=rollouts.height,
        valid_rollouts=valid,
        calls=calls.height,
        untrained_rollouts=taken.filter(pl.col("sample_mask") == 1, pl.col("trained_step").is_null()).height,
        unfinished_calls=run.calls.height - calls.height,
        token_in_rate=rates["token_in_rate"],
        token_in_rate_after_roots=rates["token_in_rate_after_roots"],
        echo_wrong_rows=None if campaign["capture_enabled"] else int(run.groups["echo_wrong_rows"].sum()),
        heuristic_fraction=guessed(rollouts).height / valid if valid else None,
        guessed=guessed_words(rollouts, calls),
        nothing_learned=nothing_learned(steps, rollouts, train),
        ended_early=count_early(rollouts["ended_early"]),
        refused=refused.sort("requests", descending=True, maintain_order=True).to_dicts(),
        refused_words=refused_words(refused, cut=run.refused_cut),
        rejected=rollouts.filter(pl.col("cause").is_not_null())
        .sort("group_id", "index")
        .select("rollout_id", pl.col("taken_step").alias("step"), "cause", "detail", "call_id", "position", "reward")
        .to_dicts(),
        proofs=[
            {
                "step": row["step"],
                "weight_version": row["weight_version"],
                "mean_abs_delta": row["proof_mean_abs_delta"],
            }
            for row in steps.iter_rows(named=True)
        ],
        trained_tokens=trained_tokens,
        mean_abs_logprob_delta=mean_abs,
        on_policy_tokens=equal_tokens,
        mean_abs_logprob_delta_on_policy=equal_mean_abs,
        resumed=int(run.status.get("resumed") or 0),
        reward_first_step=rewards[0] if rewards else None,
        reward_last_step=rewards[-1] if rewards else None,
        reward_rise=asdict(rise) if (rise := reward_rise(steps["reward_mean"].to_list())) else None,
        seconds=round(seconds, 1),
    )


def _mean(mean_abs: float | None, tokens: int) -> str:
    return f"{dash(mean_abs, '.4f')} nat over {tokens:,} tokens" if tokens else "–, no token"


def _rise(rise: dict[str, Any]) -> str:
    return f"{rise['difference']:+.3f}, one-sided 95 % bounds {rise['lower']:+.3f} and {rise['upper']:+.3f}"


def _cut(line: str) -> str:
    return line if len(line) <= _LETTERS else line[: _LETTERS - 1].rstrip() + "…"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
