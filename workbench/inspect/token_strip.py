"""TokenStrip: the tokens of one rollout as text, the recorded ids being the truth.

In: a token frame (or a run and a rollout id) and a vocabulary. Out: text in which every id is its own span (special
tokens visible, split characters joined, what the policy sampled underlined), and a ribbon of the whole row: roles by
call, the sampler's log-prob, the trainer's difference and, where routes were replayed, how far its routers agree. The
live view scrolls through the whole row; the snapshot writes out at most `max_tokens` ids and counts the rest.
Not here: the chain that the calls form (prefix_chain), how the live view packs a row (strip_columns).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.custody import Custody, custody_of, custody_of_call, rollout_row
from workbench.inspect.ids import call_name, check_counts, check_rollout_id, check_source
from workbench.inspect.roles import roles_of
from workbench.inspect.routes import route_spans
from workbench.inspect.snapshot import LiveView
from workbench.inspect.strip_columns import strip_columns
from workbench.inspect.style import BLUE, CARRY, MUTED, SAMPLED, SERIES, SMALL, panels, say_nothing_to_show
from workbench.inspect.text import Piece, pieces_of
from workbench.runs.vocabulary import Vocabulary

if TYPE_CHECKING:
    from workbench.inspect.live.strip import StripWidget

_SPECIAL = "border:1px solid rgba(128,128,128,.7);border-radius:3px;padding:0 2px;font-size:11px;opacity:.85"
_FLAGGED = "border:2px dashed currentColor;border-radius:3px;padding:0 2px;font-weight:700;font-size:11px"
_BYTES = "background:rgba(138,28,74,.18);border-radius:2px"
_SAMPLED = (
    f"text-decoration-color:{SAMPLED};text-decoration-thickness:2px;text-underline-offset:3px;"
    "background:rgba(232,135,43,.13)"
)
_MARKED = "border:3px double currentColor;border-radius:3px;padding:0 2px"
_BODY = (
    "font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12.5px;line-height:1.9;"
    "white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid rgba(128,128,128,.35);border-radius:6px;"
    "padding:8px 12px"
)
_RIBBON = 1_200
_NEEDED = ("rollout_id", "model_call_id", "token_id", "sampled", "logprob", "delta", "weight_version")
_CALL = "display:block;font-size:10.5px;opacity:.6;line-height:1.3;margin-top:6px"


class TokenStrip(LiveView):
    """The tokens of one rollout, or of the path from its root to `call_id`.

    `source` is a run (anything with `.tokens()` and `.vocabulary()`) or a token frame, which then needs a
    `vocabulary` to be shown as text; without one the ids themselves are shown. `start` is the first token that the
    snapshot writes out. Raises RunStoreError for an unknown rollout, for one without staged tokens, for a ledger, which
    holds none, and for a `start` beyond the row.
    """

    def __init__(
        self,
        source: Any,
        rollout_id: str | None = None,
        *,
        call_id: str | None = None,
        vocabulary: Vocabulary | None = None,
        start: int = 0,
        max_tokens: int = 1_500,
    ) -> None:
        check_source(source, "TokenStrip")
        self.why_ids = ""
        check_rollout_id(rollout_id, "TokenStrip")
        check_counts("TokenStrip", max_tokens=max_tokens)
        if isinstance(source, pl.DataFrame):
            self.tokens = _of_one_rollout(source, rollout_id)
        elif rollout_id is None:
            if source.calls.is_empty():
                raise RunStoreError(f"Run {getattr(source, 'name', '?')} has no calls yet; there are no tokens to show")
            raise RunStoreError("Expected a rollout id beside the run: TokenStrip(run, rollout_id)")
        else:
            self.tokens = source.tokens(rollout_id, call_id)
            if vocabulary is None:
                try:
                    vocabulary = source.vocabulary()
                except RunStoreError as error:
                    self.why_ids = f" {error}"
        self.rollout_id: str = self.tokens["rollout_id"][0] if self.tokens.height else str(rollout_id)
        self.vocabulary = vocabulary
        calls = None if isinstance(source, pl.DataFrame) else source.calls.filter(rollout_id=self.rollout_id)
        self.order_of: dict[str, int] = {} if calls is None else dict(calls.select("model_call_id", "order").rows())
        self.custody = _custody(source, calls, self.rollout_id, call_id)
        self.routes = route_spans(source, self.rollout_id, self.tokens)
        if not 0 <= start < max(1, self.tokens.height):
            raise RunStoreError(
                f"Rollout {self.rollout_id} has {self.tokens.height:,} tokens, 0 to {self.tokens.height - 1:,}; "
                f"start={start:,} is none of them"
            )
        self.start = start
        self.stop = min(self.tokens.height, self.start + max_tokens)

    @cached_property
    def flagged(self) -> np.ndarray:
        """bool[T]: control ids inside a span of content (see `roles`)."""
        if self.vocabulary is None:
            return np.zeros(self.tokens.height, dtype=bool)
        return roles_of(self.tokens["token_id"].to_numpy().astype(np.uint64), self.vocabulary).flagged

    def sentence(self) -> str:
        sampled = int(self.tokens["sampled"].sum())
        parts = [
            f"Tokens of {self.rollout_id}",
            f"{self.tokens.height:,} tokens ({sampled:,} sampled)",
            markup.count(self.tokens["model_call_id"].n_unique(), "call"),
        ]
        known_T = self.tokens["delta"].drop_nulls().to_numpy()
        if known_T.size:
            finite_T = known_T[np.isfinite(known_T)]
            if finite_T.size:
                parts.append(f"mean |Δ| {abs(finite_T).mean():.4f} nat")
            if finite_T.size < known_T.size:
                parts.append(f"{known_T.size - finite_T.size:,} Δ NOT FINITE")
        return " · ".join(parts)

    def first_of(self, call_id: str) -> int:
        """Position of the first token that `call_id` added; 0 where it added none."""
        found = self.tokens["model_call_id"].index_of(call_id)
        return 0 if found is None else found

    def columns(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Words and columns of the live view (see `strip_columns`)."""
        return strip_columns(self.tokens, self.vocabulary, routes=self.routes, order_of=self.order_of)

    def make_live(self) -> StripWidget:
        from workbench.inspect.live.strip import StripWidget

        return StripWidget.of(self)

    def draw(self) -> Figure:
        ribbon = _ribbon(self.tokens)
        routed = ribbon["agreement"].null_count() < ribbon.height
        heights = [0.42, 1, 1] + [0.6] * routed
        figure, (roles, likely, delta, *agree) = panels(
            3.6 if routed else 2.9, rows=len(heights), height_ratios=heights
        )
        x, size = ribbon["position"].to_numpy(), (ribbon["size"][0] if ribbon.height else 1)
        width = max(0.4, min(2.4, 360 / max(1, ribbon.height)))
        share = ribbon["sampled"].to_numpy()
        roles.fill_between(x, 0.45 * (share < 1), color=CARRY, step="mid", lw=0)
        roles.fill_between(x, share, color=SAMPLED, step="mid", lw=0)
        # Each word at the height that it explains: what was carried is low, what was sampled is high.
        roles.set_yticks([0.2, 0.78], ["carried", "sampled"], fontsize=SMALL)
        roles.tick_params(axis="y", length=0)
        roles.set_xticks([])
        roles.grid(False)
        roles.spines["left"].set_visible(False)
        roles.set_ylim(0, 1)
        calls = self.tokens["model_call_id"].to_list()
        starts = [i for i in range(len(calls)) if i == 0 or calls[i] != calls[i - 1]]
        free = 0.0  # where the last number ends: a short call's own is left out
        for at in starts if len(starts) <= 40 else []:
            roles.axvline(at - 0.5, color="black", lw=1.0)
            order = self.order_of.get(calls[at])
            if order is not None and at >= free:
                roles.text(at, 1.08, f"#{order}", fontsize=SMALL, va="bottom", transform=roles.get_xaxis_transform())
                free = at + self.tokens.height * 0.018 * (2 + len(f"{order}"))

        some = ribbon.drop_nulls("logprob")
        likely.vlines(some["position"].to_numpy(), some["logprob"].to_numpy(), 0, color=BLUE, lw=width)
        likely.set_ylabel("sampler\nlog-prob", fontsize=SMALL)
        likely.set_xticks([])
        for ax in (roles, likely, delta, *agree):
            ax.set_xlim(-0.5, max(1, self.tokens.height) - 0.5)
        known = ribbon.drop_nulls("delta")
        if known.is_empty():
            say_nothing_to_show(delta, "the trainer has not scored these tokens")
            return figure
        place_T, d_T = known["position"].to_numpy(), known["delta"].to_numpy()
        delta.vlines(place_T[d_T < 0], d_T[d_T < 0], 0, color=BLUE, lw=width)
        delta.vlines(place_T[d_T >= 0], 0, d_T[d_T >= 0], color=SAMPLED, lw=width)
        delta.axhline(0, color=MUTED, lw=0.8)
        delta.set_ylabel("Δ trainer", fontsize=SMALL)
        for ax in agree:
            # A token without a bar has no route: what was sampled last in a call was never an input.
            ax.bar(x, ribbon["agreement"].fill_null(0).to_numpy(), width=0.8 * size, color=SERIES[2])
            ax.set_ylim(0, 1.05)
            ax.set_ylabel("routers\nagree", fontsize=SMALL)
            delta.set_xticks([])
        where = "position in the row" + (f"; a line is the largest of {size} tokens" if size > 1 else "")
        (agree or [delta])[0].set_xlabel(where)
        return figure

    def html(self) -> str:
        parts = [markup.line(self.sentence(), strong=True)]
        if self.custody.state != "unknown":
            parts.append(markup.line(f"Custody: {self.custody.sentence()}"))
        if self.custody.meaning:
            parts.append(markup.line(self.custody.meaning, muted=True))
        if self.vocabulary is None:
            parts.append(markup.line(f"No vocabulary at hand: ids are shown, not text.{self.why_ids}", muted=True))
        parts.append(self.text_block())
        stray = int(self.flagged.sum())
        if stray:
            at = ", ".join(f"{position:,}" for position in np.flatnonzero(self.flagged)[:5])
            some = "at token" if stray == 1 else "at tokens"
            parts.append(
                markup.line(
                    f"{markup.count(stray, 'control id')} inside a span of content, dashed ({some} {at}"
                    f"{', …' if stray > 5 else ''}): the template would not have put it there",
                    strong=True,
                )
            )
        legend = (
            "Underlined: sampled by the policy (mask 1). Boxed: special tokens. ⟨E2 96⟩: bytes that are no character."
        )
        parts.append(markup.line(legend, muted=True))
        if self.start or self.stop < self.tokens.height:
            parts.append(
                markup.line(
                    f"Showing tokens {self.start:,} to {self.stop:,} of {self.tokens.height:,}; others: "
                    "TokenStrip(..., start=…, max_tokens=…)",
                    muted=True,
                )
            )
        return markup.block(*parts)

    def text_block(self, mark: int | None = None) -> str:
        """The tokens from `start` to `stop` as a block of text; `mark` is a position to be boxed."""
        return f'<div style="{_BODY}">{self._body(mark)}</div>'

    def _body(self, mark: int | None) -> str:
        shown = self.tokens.slice(self.start, self.stop - self.start)
        ids = shown["token_id"].to_list()
        if self.vocabulary is None:
            pieces = [Piece(i, i + 1, "unknown", f"{token_id} ") for i, token_id in enumerate(ids)]
        else:
            pieces = pieces_of(ids, self.vocabulary)
        sampled, calls = shown["sampled"].to_list(), shown["model_call_id"].to_list()
        versions = shown["weight_version"].to_list()
        out: list[str] = []
        last_call = None
        for piece in pieces:
            call = calls[piece.start]
            if call != last_call:
                name = call_name(call, self.rollout_id, self.order_of)
                version = "" if versions[piece.start] is None else f" · weights v{versions[piece.start]}"
                out.append(f'<span style="{_CALL}">call {markup.escape(name)}{version}</span>')
                last_call = call
            here = mark is not None and piece.start <= mark - self.start < piece.stop
            stray = bool(self.flagged[self.start + piece.start])
            out.append(_span(piece, sampled=bool(sampled[piece.start]), marked=here, stray=stray))
        return "".join(out)


def _of_one_rollout(frame: pl.DataFrame, rollout_id: str | None) -> pl.DataFrame:
    """A token frame, or the part of it that is `rollout_id`'s. Raises RunStoreError for any other frame."""
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise RunStoreError(f"Expected a token frame, such as run.tokens(rollout_id); it has no {', '.join(missing)}")
    ids = frame["rollout_id"].unique(maintain_order=True).to_list()
    if rollout_id is not None and rollout_id not in ids:
        raise RunStoreError(f"This frame holds no tokens of rollout {rollout_id!r}; it holds: {', '.join(ids[:3])}")
    if rollout_id is None and len(ids) > 1:
        raise RunStoreError(f"Expected tokens of one rollout, got {len(ids)}; name one: TokenStrip(frame, rollout_id)")
    return frame if len(ids) < 2 else frame.filter(pl.col("rollout_id") == rollout_id)


def _custody(source: Any, calls: pl.DataFrame | None, rollout_id: str, call_id: str | None) -> Custody:
    if calls is None:
        return custody_of(None, None, from_run=False)
    rollout = rollout_row(source, rollout_id)
    return custody_of(rollout, calls) if call_id is None else custody_of_call(rollout, calls, call_id)


def _ribbon(tokens: pl.DataFrame) -> pl.DataFrame:
    """At most `_RIBBON` lines for the whole row: each the most telling of the tokens it stands for.

    Columns: position (of the first), size (tokens a line), sampled (share), logprob (the least likely sampled one),
    delta (the largest by size, with its sign), agreement (the least); null where there is none.
    """
    size = max(1, -(-tokens.height // _RIBBON))
    agreement = pl.col("route_agreement") if "route_agreement" in tokens.columns else pl.lit(None, dtype=pl.Float32)
    seen = pl.when(pl.col("sampled")).then(pl.col("logprob"))
    return (
        tokens.lazy()
        .with_row_index("at")
        .group_by((pl.col("at") // size).alias("bin"), maintain_order=True)
        .agg(
            pl.col("at").first().cast(pl.Int64).alias("position"),
            pl.lit(size, dtype=pl.Int64).alias("size"),
            pl.col("sampled").mean().alias("sampled"),
            seen.min().alias("logprob"),
            pl.col("delta").drop_nulls().sort_by(pl.col("delta").drop_nulls().abs()).last().alias("delta"),
            agreement.min().alias("agreement"),
        )
        .collect()
    )


def _span(piece: Piece, *, sampled: bool, marked: bool = False, stray: bool = False) -> str:
    text = markup.escape(piece.shown)
    style = _FLAGGED if stray else _SPECIAL if piece.kind == "special" else _BYTES if piece.kind == "bytes" else ""
    body = f'<code style="{style}">{text}</code>' if style else text
    if sampled:
        body = f'<u style="{_SAMPLED}">{body}</u>'
    if marked:
        body = f'<b style="{_MARKED}">{body}</b>'
    return body + ("\n" if piece.breaks else "")
