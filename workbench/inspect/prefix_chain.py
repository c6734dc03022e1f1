"""PrefixChain: which calls make up a rollout, and which of them make its training row.

In: the calls frame (or a run) and a rollout id. Out: a picture with one row a root-to-leaf path (the terminal chain on
top, bold; retries, side branches, failed and unresolved calls below, each with the reason why it is apart) and a table
with every field of every call. Invariant: every recorded call is either drawn or counted as not shown. Not here: where
calls stand (`layout`), how the card looks (`chain_picture`), tokens (`tokens`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.chain_columns import chain_columns
from workbench.inspect.chain_picture import BAND, draw_chain
from workbench.inspect.custody import RELATION_WORDS, custody_of, rollout_row, standing
from workbench.inspect.ids import check_counts, check_rollout_id, check_source, short_id
from workbench.inspect.layout import Place, place_calls
from workbench.inspect.snapshot import LiveView
from workbench.nearest import nearest
from workbench.runs.relations import contenders

if TYPE_CHECKING:
    from workbench.inspect.live.chain import ChainAndTokens

_SHOWN = (
    "rollout_id",
    "model_call_id",
    "order",
    "parent_call_id",
    "near_call_id",
    "mode",
    "delta_len",
    "cum_len",
    "sampled_tokens",
    "weight_version",
    "finish_reason",
    "digest",
    "relation",
    "failure_reason",
    "detail",
    "drift",
)
_LINKS = ("model_call_id", "parent_call_id", "admitted_at", "failure_reason")
_MOST_TRACKS = 16
ROOTLESS = frozenset({"failed", "unresolved"})


class PrefixChain(LiveView):
    """The prefix tree of one rollout.

    `source` is a run (anything with `.calls` and `.rollouts` frames) or a calls frame; `rollout_id` may be left out
    where the frame holds one rollout. The live view has every call; in the snapshot at most `max_calls` cards are
    drawn and `max_rows` table rows written, and what is left out is said.
    Raises `RunStoreError` for a rollout without calls.
    """

    def __init__(self, source: Any, rollout_id: str | None = None, *, max_calls: int = 45, max_rows: int = 200) -> None:
        check_source(source, "PrefixChain")
        check_rollout_id(rollout_id, "PrefixChain")
        check_counts("PrefixChain", max_calls=max_calls, max_rows=max_rows)
        calls: pl.DataFrame = source if isinstance(source, pl.DataFrame) else source.calls
        self.source = None if isinstance(source, pl.DataFrame) else source
        if rollout_id is None:
            if calls.is_empty():
                raise RunStoreError(f"{_name(source)} has no calls yet; there is no rollout to show")
            ids = calls["rollout_id"].unique().sort().to_list()
            if len(ids) != 1:
                raise RunStoreError(
                    f"Expected calls of one rollout, got {len(ids)}; name one: PrefixChain(run, rollout_id)"
                )
            rollout_id = ids[0]
        self.rollout_id: str = rollout_id
        self.calls = calls.filter(pl.col("rollout_id") == rollout_id).sort("order")
        if self.calls.is_empty():
            raise RunStoreError(_no_calls(source, calls, rollout_id))
        self.rollout = rollout_row(source, rollout_id)
        self.custody = custody_of(self.rollout, self.calls, from_run=self.source is not None)
        self.contenders = self._contenders()
        self.max_calls = max_calls
        self.max_rows = max_rows
        self._rows = self.calls.select(pl.col(name) for name in _SHOWN if name in calls.columns).to_dicts()
        self.places: list[Place] = place_calls(
            [row["model_call_id"] for row in self._rows],
            [_attached_to(row) for row in self._rows],
            [row["relation"] == "chain" for row in self._rows],
            [row["relation"] in ROOTLESS and _attached_to(row) is None for row in self._rows],
        )

    def _contenders(self) -> dict[str, str]:
        """The calls between which no terminal could be chosen, each with the words for it; empty for most rollouts."""
        if self.rollout is None or self.rollout.get("cause") is None:
            return {}
        links = self.calls.select(name for name in _LINKS if name in self.calls.columns).to_dicts()
        return contenders(links, self.rollout["cause"], self.rollout.get("terminal_attribution_reason"))

    def sentence(self) -> str:
        chain = [row for row in self._rows if row["relation"] == "chain"]
        parts = [f"Rollout {self.rollout_id}", markup.count(len(self._rows), "call")]
        kinds = self._kinds()
        for kind, one, many in (
            ("retry", "retry", "retries"),
            ("branch", "side branch", "side branches"),
            ("side_root", "side conversation", None),
            ("failed", "failed", "failed"),
            ("unresolved", "unresolved", "unresolved"),
        ):
            if kinds[kind]:
                parts.append(markup.count(kinds[kind], one, many))
        if chain:
            sampled = [row["sampled_tokens"] for row in chain]
            known = f" ({sum(sampled):,} sampled)" if all(n is not None for n in sampled) else ""
            parts.append(f"{max(row['cum_len'] for row in chain):,} tokens{known}")
        parts.extend(_verdict(self.rollout))
        return " · ".join(parts)

    def _kinds(self) -> Counter[str]:
        """How many there are of each relation; a branch or side conversation of several calls counts once."""
        relation_of = {row["model_call_id"]: row["relation"] for row in self._rows}
        return Counter(
            row["relation"]
            for row in self._rows
            if row["relation"] in ROOTLESS or relation_of.get(row["parent_call_id"]) != row["relation"]
        )

    def chain_name(self) -> str:
        """What the terminal chain is: trained (only where a step did it), verified, rejected, or somebody's guess."""
        if self.rollout is None:
            return "terminal chain"
        if self.rollout.get("cause"):
            return "terminal chain, rejected"
        if self.rollout.get("trained_step") is not None:
            return "trained chain"
        if self.rollout.get("verified"):
            return "verified chain" if self.rollout.get("unread") else "verified chain, not trained"
        return f"terminal chain, by {self.rollout.get('terminal_selection') or 'nobody'}"

    def draw(self) -> Figure:
        return draw_chain(
            self._rows,
            self._drawn(),
            total=len(self.places),
            chain_name=self.chain_name(),
            contenders=self.contenders.keys(),
        )

    def _why(self, row: dict[str, Any]) -> str:
        """`why`, with the terminal chain called trained only where it was."""
        words = f"on the {self.chain_name()}" if row["relation"] == "chain" else why(row)
        contends = self.contenders.get(row["model_call_id"])
        return words if contends is None else f"{words}; {contends}"

    def _drawn(self) -> list[Place]:
        """The calls of the picture: at most `max_calls`, on at most `_MOST_TRACKS` tracks, so that it stays a page."""
        tracks: set[tuple[int, int]] = set()
        drawn: list[Place] = []
        for place in self.places[: self.max_calls]:
            tracks.add((place.column // BAND, place.row))
            if len(tracks) > _MOST_TRACKS:
                break
            drawn.append(place)
        return drawn

    def is_on_chain(self, call_id: str) -> bool:
        """Whether a call is on the terminal chain."""
        return any(row["model_call_id"] == call_id and row["relation"] == "chain" for row in self._rows)

    def columns(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Words and columns of the live view: every call, in drawing order (see `chain_columns`)."""
        return chain_columns(self._rows, self.places, self._why, self.contenders.keys())

    def make_live(self) -> ChainAndTokens:
        from workbench.inspect.live.chain import ChainAndTokens

        return ChainAndTokens(self)

    def to_text(self) -> str:
        """The tree as plain lines for a terminal, one a call, indented where a path forks."""
        lines = [self.sentence()]
        if self.custody.state == "rejected":
            lines.append(f"Custody: {self.custody.sentence()}")
        for place in self.places[: self.max_rows]:
            row = self._rows[place.call]
            mark = (
                "?"
                if row["model_call_id"] in self.contenders
                else "●"
                if row["relation"] == "chain"
                else "✗"
                if row["failure_reason"]
                else "○"
            )
            tokens = "no tokens" if row["delta_len"] is None else f"+{row['delta_len']:,} = {row['cum_len']:,} tokens"
            sampled = "" if row["sampled_tokens"] is None else f" ({row['sampled_tokens']:,} sampled)"
            parts = [
                f"{'  ' * min(place.row, 12)}{mark} #{row['order']} {short_id(row['model_call_id'], self.rollout_id)}",
                row["mode"],
                tokens + sampled,
                None if row["weight_version"] is None else f"v{row['weight_version']}",
                row["finish_reason"],
                (row["digest"] or "")[:8],
                self._why(row),
            ]
            lines.append(" · ".join(part for part in parts if part))
        if len(self.places) > self.max_rows:
            lines.append(f"showing {self.max_rows:,} of {len(self.places):,} calls")
        return "\n".join(lines)

    def html(self) -> str:
        shown = self.places[: self.max_rows]
        rows = [self._table_row(place) for place in shown]
        parts = [markup.line(self.sentence(), strong=True)]
        if self.custody.state != "unknown":
            parts.append(markup.line(f"Custody: {self.custody.sentence()}"))
        if self.custody.meaning:
            parts.append(markup.line(self.custody.meaning, muted=True))
        header = ("path", "#", "call", "mode", "carry", "sampled", "total", "version", "finish", "digest", "why here")
        parts.append(markup.table(header, rows))
        drawn = len(self._drawn())
        if drawn < len(self.places) or len(shown) < len(self.places):
            parts.append(
                markup.line(
                    f"Showing {drawn:,} of {len(self.places):,} calls drawn and {len(shown):,} listed; "
                    f"all of them: the live view, .calls, or max_rows={len(self.places)} for the list",
                    muted=True,
                )
            )
        return markup.block(*parts)

    def _table_row(self, place: Place) -> list[markup.Cell]:
        row = self._rows[place.call]
        strong, muted = row["relation"] == "chain", row["relation"] != "chain"

        def cell(value: Any, right: bool = False) -> markup.Cell:
            text = "–" if value is None else f"{value:,}" if isinstance(value, int) and right else str(value)
            return markup.Cell(text, strong=strong, muted=muted, right=right)

        carry = (
            None
            if row["sampled_tokens"] is None or row["delta_len"] is None
            else row["delta_len"] - row["sampled_tokens"]
        )
        return [
            cell(place.row + 1, right=True),
            cell(row["order"], right=True),
            cell(short_id(row["model_call_id"], self.rollout_id)),
            cell(row["mode"]),
            cell(carry, right=True),
            cell(row["sampled_tokens"], right=True),
            cell(row["cum_len"], right=True),
            cell(row["weight_version"], right=True),
            cell(row["finish_reason"]),
            cell((row["digest"] or "")[:8] or None),
            cell(self._why(row)),
        ]


def _attached_to(row: dict[str, Any]) -> str | None:
    """The call a card hangs on: its parent, or for an unresolved one the call that it nearly continues."""
    return row["parent_call_id"] or row.get("near_call_id")


def why(row: dict[str, Any]) -> str:
    """Why a call stands where it stands, one phrase; failures carry their cause and detail."""
    words = RELATION_WORDS.get(row["relation"], row["relation"])
    if row.get("failure_reason"):
        words = f"{words}: {row['failure_reason']}"
        if row.get("detail"):
            words = f"{words}, {row['detail']}"
        if row.get("drift"):
            words = f"{words}: {row['drift']}"
    return words


def _name(source: Any) -> str:
    return f"Run {source.name}" if hasattr(source, "name") else "This frame"


def _no_calls(source: Any, calls: pl.DataFrame, rollout_id: str) -> str:
    rollout = rollout_row(source, rollout_id)
    if rollout is not None:
        return f"Rollout {rollout_id} has no recorded call, so there is no chain: {custody_of(rollout, None).words}"
    for words in getattr(source, "damage", ()):
        if f"/{rollout_id}." in words:
            return f"No call of rollout {rollout_id} can be read: {words}"
    known = calls["rollout_id"].unique().sort().to_list()
    some = f"there are, for instance: {', '.join(known[:3]) or 'none'}"
    near = nearest(rollout_id, known)
    return f"No calls of rollout {rollout_id!r} here{f', did you mean {near}?' if near else ''}; {some}"


def _verdict(rollout: dict[str, Any] | None) -> list[str]:
    if rollout is None:
        return []
    parts = []
    if rollout.get("reward") is not None:
        parts.append(f"reward {rollout['reward']:g}")
    return [*parts, standing(rollout)]
