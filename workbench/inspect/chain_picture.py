"""Chain picture: cards for calls, lines for prefixes, one row a root-to-leaf path.

In: call rows and their places. Out: a matplotlib figure of one width. A path longer than a band of three cards goes on
in the next band, as text wraps. Channels: the terminal chain has a thick blue frame and a thick link, side calls
thin grey ones, failed and unresolved calls a dashed frame, calls that could be the last a double one and a word. The
bar in a card is the call's delta, hatched where it was carried, solid where it was sampled, to one scale over the
rollout. Not here: which call stands where.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from workbench.inspect.ids import short_id
from workbench.inspect.layout import Place
from workbench.inspect.style import (
    BLUE,
    CARRY,
    FAINT,
    FIGURE_WIDTH_IN,
    INK,
    MUTED,
    PAPER,
    REJECTED,
    SAMPLED,
    SMALL,
    new_figure,
)

BAND = 3
_MARGIN = 0.12
_PITCH_X = (FIGURE_WIDTH_IN - 2 * _MARGIN) / BAND
_CARD_W = _PITCH_X - 0.24
_CARD_H = 1.02
_PITCH_Y = 1.36
_BAND_GAP = 0.1
_LEGEND_H = 0.56
_LINE_H = 0.15
_WORDS = 22
"""Characters that a card is wide."""

_LABELS = {
    "chain": "terminal chain",
    "earliest": "no terminal call chosen",
    "retry": "retry",
    "branch": "side branch",
    "side_root": "conversation of its own",
    "failed": "failed",
    "unresolved": "unresolved",
}


@dataclass(frozen=True)
class _Spot:
    """A card's lower left corner in inches from the figure's lower left."""

    x: float
    y: float


def draw_chain(
    rows: Sequence[dict[str, Any]],
    places: Sequence[Place],
    *,
    total: int,
    chain_name: str,
    contenders: Collection[str] = (),
) -> Figure:
    """The picture of `places`; `total` calls exist, those not drawn are counted in the legend line.

    `chain_name` is what the terminal chain is called: trained, rejected, or guessed; `contenders` are the ids of calls
    between which no terminal could be chosen.
    """
    tracks = sorted({(place.column // BAND, place.row) for place in places})
    track_of = {track: i for i, track in enumerate(tracks)}
    bands = len({band for band, _ in tracks})
    height = _LEGEND_H + len(tracks) * _PITCH_Y + (bands - 1) * _BAND_GAP + 0.1
    figure = new_figure(height)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_xlim(0, FIGURE_WIDTH_IN)
    ax.set_ylim(0, height)
    ax.axis("off")

    spots: dict[int, _Spot] = {}
    for place in places:
        band = place.column // BAND
        y = height - _LEGEND_H - (track_of[(band, place.row)] + 1) * _PITCH_Y - band * _BAND_GAP + 0.06
        spots[place.call] = _Spot(_MARGIN + (place.column % BAND) * _PITCH_X, y)

    scale = max((row["delta_len"] or 0 for row in rows), default=0) or 1
    by_index = {place.call: place for place in places}
    heads: set[tuple[int, int]] = set()
    for place in places:
        row = rows[place.call]
        if place.parent is not None and place.parent in spots:
            _draw_link(ax, rows, by_index[place.parent], place, spots)
        _draw_card(ax, row, spots[place.call], scale)
        if row["model_call_id"] in contenders:
            _draw_contender(ax, spots[place.call])
        track = (place.column // BAND, place.row)
        if track not in heads:
            heads.add(track)
            _draw_head(ax, rows, place, spots[place.call], by_index, chain_name)
    _draw_legend(ax, rows, height, len(places), total, chain_name)
    return figure


def _draw_link(ax: Axes, rows: Sequence[dict[str, Any]], parent: Place, child: Place, spots: dict[int, _Spot]) -> None:
    on_chain = rows[child.call]["relation"] == "chain"
    colour, width, z = (BLUE, 2.6, 2) if on_chain else (MUTED, 1.1, 1)
    lost = bool(rows[child.call].get("failure_reason"))
    style: Any = (0, (3, 2)) if lost else "-"
    colour = REJECTED if lost else colour
    start, end = spots[parent.call], spots[child.call]
    y0, y1 = start.y + _CARD_H / 2, end.y + _CARD_H / 2
    if parent.column // BAND != child.column // BAND:
        stub = 0.13
        right = start.x + _CARD_W
        ax.plot([right, right + stub], [y0, y0], color=colour, lw=width, ls=(0, (1, 1)), zorder=z)
        ax.plot([end.x - stub, end.x], [y1, y1], color=colour, lw=width, ls=(0, (1, 1)), zorder=z)
        return
    x0, x1 = start.x + _CARD_W, end.x
    knee = x0 + 0.13
    if y0 == y1:
        ax.plot([x0, x1], [y0, y1], color=colour, lw=width, ls=style, solid_capstyle="butt", zorder=z)
    else:
        ax.plot(
            [x0, knee, knee, x1], [y0, y0, y1, y1], color=colour, lw=width, ls=style, solid_joinstyle="round", zorder=z
        )


def _draw_head(
    ax: Axes,
    rows: Sequence[dict[str, Any]],
    place: Place,
    spot: _Spot,
    by_index: dict[int, Place],
    chain_name: str,
) -> None:
    row = rows[place.call]
    label = _LABELS.get(row["relation"], row["relation"])
    if row["relation"] == "chain":
        label = chain_name
    if row.get("failure_reason") and place.parent is None:
        label = "not captured: no place in the tree"
    if place.parent is not None and place.parent in by_index:
        parent = rows[place.parent]
        went_on = by_index[place.parent].row == place.row
        label = (
            f"{label}, continued"
            if went_on
            else f"{label} {'near' if row.get('failure_reason') else 'after'} #{parent['order']}"
        )
    colour = BLUE if row["relation"] == "chain" else REJECTED if row.get("failure_reason") else INK
    weight = "bold" if row["relation"] == "chain" else "normal"
    ax.text(spot.x + 0.02, spot.y + _CARD_H + 0.05, label, fontsize=SMALL, color=colour, weight=weight, va="bottom")


def _draw_card(ax: Axes, row: dict[str, Any], spot: _Spot, scale: int) -> None:
    on_chain, failed = row["relation"] == "chain", bool(row.get("failure_reason"))
    frame = FancyBboxPatch(
        (spot.x, spot.y),
        _CARD_W,
        _CARD_H,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor="#faf3f6" if failed else PAPER if on_chain else "#f7f9fb",
        edgecolor=BLUE if on_chain else REJECTED if failed else MUTED,
        linewidth=2.4 if on_chain else 1.0,
        linestyle=(0, (3, 2)) if failed else "-",
        zorder=3,
    )
    ax.add_patch(frame)
    left, right, top = spot.x + 0.08, spot.x + _CARD_W - 0.08, spot.y + _CARD_H - 0.08
    text_colour = INK if on_chain or failed else "#52606d"
    title = f"#{row['order']}  {short_id(row['model_call_id'], row['rollout_id'])}"
    weight = "bold" if on_chain else "normal"
    ax.text(left, top, title, fontsize=9, weight=weight, color=text_colour, va="top", zorder=5)
    version = "" if row["weight_version"] is None else f"v{row['weight_version']}"
    side = " · ".join(part for part in (row["mode"], version) if part)
    if failed:
        _draw_failure(ax, row, left, top, side)
        return
    _draw_bar(ax, row, left, top - 0.27, right - left, scale)
    for i, words in enumerate((*_tokens(row), side)):
        at = top - 0.32 - _LINE_H * i
        ax.text(left, at, words, fontsize=SMALL, color=text_colour, va="top", zorder=5)
    end = " · ".join(part for part in (row["finish_reason"], (row["digest"] or "")[:8]) if part)
    ax.text(left, spot.y + 0.06, end, fontsize=SMALL, color=MUTED, va="bottom", zorder=5)


def _draw_contender(ax: Axes, spot: _Spot) -> None:
    inner = FancyBboxPatch(
        (spot.x + 0.035, spot.y + 0.035),
        _CARD_W - 0.07,
        _CARD_H - 0.07,
        boxstyle="round,pad=0,rounding_size=0.045",
        facecolor="none",
        edgecolor=REJECTED,
        linewidth=1.0,
        zorder=6,
    )
    ax.add_patch(inner)
    right, beside_sampled = spot.x + _CARD_W - 0.08, spot.y + _CARD_H - 0.4 - _LINE_H
    ax.text(right, beside_sampled, "last call?", fontsize=SMALL, color=REJECTED, va="top", ha="right", zorder=6)


def _draw_bar(ax: Axes, row: dict[str, Any], x: float, y: float, width: float, scale: int) -> None:
    delta = row["delta_len"] or 0
    sampled = row["sampled_tokens"] or 0
    known = row["sampled_tokens"] is not None
    carry_w = width * (delta - sampled) / scale
    ax.add_patch(Rectangle((x, y), width, 0.07, facecolor="#eef1f4", edgecolor="none", zorder=4))
    carry = Rectangle((x, y), carry_w, 0.07, facecolor=CARRY if known else FAINT, edgecolor=MUTED, lw=0, zorder=4)
    carry.set_hatch("//////" if known else "")
    ax.add_patch(carry)
    ax.add_patch(
        Rectangle((x + carry_w, y), width * sampled / scale, 0.07, facecolor=SAMPLED, edgecolor="none", zorder=4)
    )


def _draw_failure(ax: Axes, row: dict[str, Any], left: float, top: float, side: str) -> None:
    reason = _wrap(str(row["failure_reason"]), _WORDS)[:2]
    detail = str(row.get("detail") or "")
    detail = detail if len(detail) <= _WORDS else detail[: _WORDS - 1] + "…"
    for i, words in enumerate([*reason, detail, side]):
        colour = REJECTED if i < len(reason) else MUTED
        ax.text(left, top - 0.22 - _LINE_H * i, words, fontsize=SMALL, color=colour, va="top", zorder=5)


def _draw_legend(ax: Axes, rows: Sequence[dict[str, Any]], height: float, drawn: int, total: int, chain: str) -> None:
    """Tokens in one line, calls in the next, and only what occurs: marks that no card shows are not explained."""
    split = any(row["sampled_tokens"] is not None for row in rows)
    marks: list[tuple[bool, str, dict[str, Any]]] = [
        (split, "carried into the prompt", {"facecolor": CARRY, "edgecolor": MUTED, "hatch": "//////"}),
        (split, "sampled by the policy", {"facecolor": SAMPLED, "edgecolor": "none"}),
        (not split, "tokens added", {"facecolor": FAINT, "edgecolor": "none"}),
    ]
    y, x = height - 0.18, _MARGIN
    for occurs, words, look in marks:
        if occurs:
            ax.add_patch(Rectangle((x, y), 0.3, 0.09, lw=0, **look))
            x = _explain(ax, x, y, words)
    lines = [
        (any(row["relation"] == "chain" for row in rows), chain, BLUE, "-", 2.6),
        (any(row.get("failure_reason") for row in rows), "not captured", REJECTED, (0, (3, 2)), 1.2),
    ]
    y, x = height - 0.38, _MARGIN
    for occurs, words, colour, style, width in lines:
        if occurs:
            ax.plot([x, x + 0.3], [y + 0.045] * 2, color=colour, lw=width, ls=style)
            x = _explain(ax, x, y, words)
    if drawn < total:
        note = f"showing {drawn:,} of {total:,} calls"
        ax.text(FIGURE_WIDTH_IN - _MARGIN, y + 0.045, note, fontsize=SMALL, va="center", ha="right", color=REJECTED)


def _explain(ax: Axes, x: float, y: float, words: str) -> float:
    """What the mark at `x` means; returns where the next one may stand."""
    ax.text(x + 0.36, y + 0.045, words, fontsize=SMALL, va="center")
    return x + 0.66 + 0.068 * len(words)


def _tokens(row: dict[str, Any]) -> tuple[str, str]:
    """Two lines of a card."""
    if row["delta_len"] is None:
        return "no tokens recorded", ""
    if row["sampled_tokens"] is None:
        return f"+{row['delta_len']:,} tokens", f"{row['cum_len']:,} in all"
    return f"+{row['delta_len'] - row['sampled_tokens']:,} carried", f"+{row['sampled_tokens']:,} sampled"


def _wrap(text: str, width: int) -> list[str]:
    """Break a snake_case cause at its underscores so that no line is longer than `width`."""
    lines, current = [], ""
    for i, word in enumerate(text.split("_")):
        piece = word if i == 0 else f"_{word}"
        if current and len(current) + len(piece) > width:
            lines.append(current)
            current = piece
        else:
            current += piece
    return [*lines, current]
