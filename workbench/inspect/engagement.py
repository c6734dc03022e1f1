"""Engagement: is capture really on? Evidence from the records of a run, none of it from its settings.

Five things are looked for: the start-up probe read its two staged calls back; calls were acknowledged as staged; their
deltas came out of TransferQueue again when their groups were finalised; no finished rollout has an empty manifest; and
of the first verified rollout the trained row's tokens hash to what its terminal call promised.
Invariant: the verdict is `engaged` only when all of them hold that a run has something to measure of, and `NOT on` only
where one speaks against it; it names no row under another mark than the row's own. What holds for some of the calls or
rollouts is `partly`, never `yes`: capture works, and something was still lost. Calls are those of finalised rollouts
(of a served run all of them), as in the summary; how many others there are is said.
Beside it stands what may not be as one thinks (`remarks`): the first thing after the run's line on its page.
Not here: verifying every digest (campaign.verify).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import orjson
import polars as pl

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.custody import guessed_words
from workbench.inspect.ids import check_run, short_id
from workbench.inspect.rejected import rejected_words
from workbench.inspect.snapshot import StaticView
from workbench.runs.early import MANY, count_early, early_remark
from workbench.runs.gradient import nothing_learned
from workbench.runs.shelf import counted_calls, finished_rollouts, guessed
from workbench.wire import Cause, hash_token_ids

_ECHO_CHARACTERS = 160
NONE_VERIFIED = "no rollout was verified"


@dataclass(frozen=True)
class Evidence:
    """One thing looked for. `holds` is None where it cannot be told; `whole` is False where it holds for some of what
    was counted and not for all; `measurable` is False where the run has nothing that it could be told of."""

    what: str
    found: str
    holds: bool | None
    whole: bool = True
    measurable: bool = True

    @property
    def mark(self) -> str:
        """`yes`, `partly`, `NO`, `not shown` or `nothing to measure`."""
        if not self.measurable:
            return "nothing to measure"
        if not self.holds:
            return "not shown" if self.holds is None else "NO"
        return "yes" if self.whole else "partly"


class Engagement(StaticView):
    """`evidence`: what was found, in order; `echo`: what the policy said in the first verified chain, a line a call."""

    def __init__(self, run: Any) -> None:
        check_run(run, "Engagement", "campaign")
        self._run = run
        self._yet = markup.yet(run)
        self._rollouts: pl.DataFrame = finished_rollouts(run)
        self._calls_counted: pl.DataFrame = counted_calls(run)
        self.capturing = bool(run.campaign["capture_enabled"][0])
        self.echo: list[tuple[str, str]] = []
        self.evidence = (
            [self._probe(), *self._calls(), self._manifests(), self._first_chain()] if self.capturing else []
        )

    @property
    def engaged(self) -> bool:
        """Every piece of evidence is there and holds."""
        return bool(self.evidence) and not (self._marked("NO") or self._marked("not shown"))

    def _marked(self, mark: str) -> list[Evidence]:
        return [each for each in self.evidence if each.mark == mark]

    def sentence(self) -> str:
        if not self.capturing:
            return "Capture is off: this is a run of the token-echo arm, nothing is staged"
        denied, unknown = (", ".join(each.what for each in self._marked(mark)) for mark in ("NO", "not shown"))
        if denied:
            return f"Capture is NOT on: {denied}{f'; not shown: {unknown}' if unknown else ''}"
        if unknown:
            why = NONE_VERIFIED if [each.found for each in self._marked("not shown")] == [NONE_VERIFIED] else unknown
            shown = "is not shown to be on yet" if self._yet else "cannot be shown to be on"
            return f"Capture {shown}: {why}"
        if partly := self._marked("partly"):
            return f"Capture is on, but not for everything: {_found(partly)}"
        unmeasured = "".join(f"; {each.what}: {each.found}" for each in self._marked("nothing to measure"))
        return f"Capture is on: {_found([each for each in self.evidence[1:4] if each.measurable])}{unmeasured}"

    def html(self) -> str:
        rows: list[list[markup.Cell | str]] = [
            [each.what, markup.Cell(each.mark, strong=each.mark in ("NO", "partly")), each.found]
            for each in self.evidence
        ]
        parts = [markup.line(self.sentence(), strong=True)]
        parts += [markup.line(words, strong=loud) for words, loud in self.remarks()]
        if rows:
            parts.append(markup.table(("evidence", "holds", "found"), rows))
            parts += [markup.line(words) for words in (self._not_staged(), self._not_counted()) if words]
        if self.echo:
            parts.append(markup.table(("call of that chain", "what the policy said"), self.echo, mono=True))
        return markup.block(*parts)

    def remarks(self) -> list[tuple[str, bool]]:
        """What may not be as one thinks: steps that taught nothing, many rollouts without a vote, guessed last calls,
        rollouts that ended early; each with whether it is about many of them."""
        rollouts = self._rollouts
        told = []
        if words := nothing_learned(self._run.steps, rollouts, self._run.recipe.get("train") or {}):
            told.append((f"NOTHING LEARNED: {words}.", True))
        rejected = rollouts.filter(pl.col("cause").is_not_null()).select("cause", "detail", "rollout_id").to_dicts()
        if len(rejected) > MANY * rollouts.height:
            told.append((f"Rejected: {rejected_words(rejected, rollouts.height)[0]}.", True))
        if (words := guessed_words(rollouts, self._run.calls)) is not None:
            share = guessed(rollouts).height / int((rollouts["sample_mask"] == 1).sum())
            told.append((f"Guessed: {words}.", share > MANY))
        early = count_early(rollouts["ended_early"])
        if early:
            share = sum(early.values()) / rollouts.height
            told.append((f"Ended early: {early_remark(early, rollouts.height)}.", share > MANY))
        return told

    def _probe(self) -> Evidence:
        started = self._run.events.filter(pl.col("kind").is_in(["started", "serving"]))
        if started.is_empty():
            found = "the run has not started yet" if self._yet else "no record of it"
            return Evidence("start-up probe", found, None)
        probe = orjson.loads(started["fields"][-1]).get("probe") or {}
        if not probe.get("capture_enabled"):
            return Evidence("start-up probe", "it captured nothing", False)
        plain = "as a plain rendering has it" if probe.get("equals_plain_rendering") else "spliced, unlike a plain one"
        found = f"2 calls staged and read back, {probe.get('sampled_tokens')} sampled ids; second prompt {plain}"
        return Evidence("start-up probe", found, True)

    def _calls(self) -> list[Evidence]:
        calls = self._calls_counted
        staged = int((calls["disposition"] == "staged").sum())
        asked = calls.filter(pl.col("staging").is_not_null())
        fetched = int((asked["staging"] == "fetched").sum())
        return [
            Evidence(
                "calls staged",
                f"{staged:,} of {calls.height:,}",
                staged > 0 if calls.height else None,
                staged == calls.height,
            ),
            Evidence(
                "writes seen in TransferQueue",
                f"{fetched:,} of {asked.height:,} deltas read back",
                fetched > 0 if asked.height else None,
                fetched == asked.height,
            ),
            self._rate(),
        ]

    def _rate(self) -> Evidence:
        what, calls = "token_in_rate", self._calls_counted
        token_in, roots = (int((calls["mode"] == mode).sum()) for mode in ("token_in", "text"))
        after = calls.height - roots
        if not calls.height:
            return Evidence(what, f"no call{self._yet}", None)
        if not after:
            every = f"each of the {calls.height:,} calls begins" if calls.height > 1 else "the only call begins"
            return Evidence(what, f"{every} a conversation, none could continue an earlier one", None, measurable=False)
        found = f"{token_in / calls.height:.4g}, after roots {token_in / after:.4g} ({token_in:,} of {after:,})"
        return Evidence(what, found, token_in > 0, token_in == after)

    def _not_staged(self) -> str:
        """Why calls were not staged, by their codes, the most frequent first; empty where all were."""
        left = self._calls_counted.filter(pl.col("disposition") != "staged")
        counts = Counter(left["failure_reason"].fill_null("no reason on record").to_list()).most_common()
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in counts)
        return f"{markup.count(left.height, 'call')} not staged: {reasons}. They are in no row." if counts else ""

    def _not_counted(self) -> str:
        """The calls that no number here is about; empty where there are none."""
        if getattr(self._run, "served", False):
            return self._counted_without_receipt()
        rest = self._run.calls.join(self._calls_counted, on=["rollout_id", "model_call_id"], how="anti")
        if rest.is_empty():
            return ""
        of = markup.count(rest["rollout_id"].n_unique(), "rollout")
        state = "still played" if self._yet else "never finalised, as the run was stopped or failed"
        counted = markup.count(self._calls_counted.height, "call")
        return (
            f"Counted, here and in the summary: {counted} of finalised rollouts. {rest.height:,} more, of {of} "
            f"{state}, are in no number: how they end is not known."
        )

    def _counted_without_receipt(self) -> str:
        """The calls of a served run that its groups and `workbench verify` do not count; empty where there are none."""
        calls = self._calls_counted
        without = calls.join(self._rollouts, on="rollout_id", how="anti")
        if without.is_empty():
            return ""
        return (
            f"Counted, here and in the list of runs: all {markup.count(calls.height, 'call')}, {without.height:,} of "
            f"{markup.count(without['rollout_id'].n_unique(), 'rollout')} without a receipt, which no group has."
        )

    def _manifests(self) -> Evidence:
        rollouts = self._rollouts
        empty = bool((rollouts["cause"] == Cause.EMPTY_MANIFEST.value).any())
        with_calls = int((rollouts["calls"] > 0).sum())
        found = f"{with_calls:,} of {rollouts.height:,}"
        holds = False if empty else True if with_calls else None
        return Evidence("rollouts with captured calls", found, holds, with_calls == rollouts.height)

    def _first_chain(self) -> Evidence:
        what = "first verified chain"
        verified = self._rollouts.filter(pl.col("verified"))
        if verified.is_empty():
            none = f"no rollout was finalised{self._yet}" if self._rollouts.is_empty() else NONE_VERIFIED
            return Evidence(what, none, None)
        rollout = verified.row(0, named=True)
        tokens: pl.DataFrame = self._run.tokens(rollout["rollout_id"])
        terminal = self._run.calls.filter(pl.col("model_call_id") == rollout["terminal_model_call_id"])
        promised = terminal["cumulative_hash"][0] if terminal.height else None
        same = hash_token_ids(tokens["token_id"].to_list()) == promised
        self.echo = self._said(tokens, rollout["rollout_id"])
        sampled = int(tokens["sampled"].sum())
        found = (
            f"{rollout['rollout_id']}: {markup.count(len(self.echo), 'call')}, {tokens.height:,} tokens, {sampled:,} "
        )
        digest = short_id(str(promised), rollout["rollout_id"])
        found += f"sampled; hashed again they {'are' if same else 'are NOT'} {digest}"
        return Evidence(what, found, same)

    def _said(self, tokens: pl.DataFrame, rollout_id: str) -> list[tuple[str, str]]:
        """(call, decoded sampled tokens), a row a call of the chain; ids where the run has no vocabulary."""
        try:
            vocabulary = self._run.vocabulary()
        except RunStoreError:
            vocabulary = None
        said = []
        for (call_id,), rows in tokens.filter(pl.col("sampled")).group_by("model_call_id", maintain_order=True):
            ids = rows["token_id"].to_list()
            text = " ".join(map(str, ids)) if vocabulary is None else _decoded(vocabulary, ids)
            said.append((short_id(str(call_id), rollout_id), _cut(text)))
        return said


def _found(evidence: list[Evidence]) -> str:
    return ", ".join(f"{each.what} {each.found}" for each in evidence)


def _cut(text: str) -> str:
    return text if len(text) <= _ECHO_CHARACTERS else f"{text[: _ECHO_CHARACTERS - 1]}…"


def _decoded(vocabulary: Any, ids: list[int]) -> str:
    parts = [vocabulary.special[i].encode() if i in vocabulary.special else vocabulary.pieces.get(i, b"?") for i in ids]
    return b"".join(parts).decode("utf-8", "replace")
