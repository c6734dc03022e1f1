"""CampaignBoard: a campaign as it runs, read from its run store and nothing else.

In: a run that somebody else writes (or that has ended), or a ledger. Out: state and phase, what is in flight, rates,
causes, the last rejection and error, and the steps as small curves; of a served run its rollouts and calls instead. The
live view asks again once a second while it is in sight, at most twice a second altogether; opened again, it reads
again. The last frame it showed stays in the notebook.
Invariants: actors print nothing and are asked nothing; only files are read. Not here: what is read (board_frame).
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from workbench.inspect import html as markup
from workbench.inspect.board_frame import RATE, board_frame, clock
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import LiveView
from workbench.inspect.style import BLUE, REJECTED, SAMPLED, bar_list, panels, say_nothing_to_show, step_ticks

if TYPE_CHECKING:
    from workbench.inspect.live.board import BoardWidget

KEEP_EVERY_S = 5.0
NONE_IN_STEPS = "no step has one"


class CampaignBoard(LiveView):
    """What `run` is doing. `frame` is what was read last; `refresh()` reads again."""

    def __init__(self, run: Any) -> None:
        check_run(run, "CampaignBoard", "rollouts")
        self.run = run
        self.frame: dict[str, Any] = board_frame(run, time.time())
        self._display_id = uuid.uuid4().hex
        self._kept: dict[str, Any] | None = None
        self._kept_at = float("-inf")

    def refresh(self) -> dict[str, Any]:
        """Read the run again; gives the new frame."""
        self.frame = board_frame(self.run, time.time())
        self._snapshot = None
        return self.frame

    def sentence(self) -> str:
        f = self.frame
        kind = {"campaign": "Campaign", "served": "Served run", "ledger": "Ledger"}[f["what"]]
        parts = [f"{kind} {f['run']}"] + ([f["state"]] if f["what"] != "ledger" else [])
        if f["state"] == "running" and f["phase"]:
            parts.append(f["phase"])
        if f["what"] == "campaign":
            parts.append(f"step {f['step']:,}" + (f" of {f['steps']:,}" if f["steps"] is not None else ""))
        wanted: tuple[str, ...] = (
            "rollouts valid",
            "rollouts rejected",
            "reward, last step",
            RATE,
        )
        if f["what"] == "served":
            wanted = ("rollouts", "calls", "rollouts valid")
        parts += [f"{t['label']} {t['value']}" for t in f["tiles"] if t["label"] in wanted and t["value"] is not None]
        return " · ".join(parts)

    def draw(self) -> Figure:
        if self.frame["what"] == "ledger":
            return _draw_causes(self.frame["causes"])
        if self.frame["what"] == "served":
            return _draw_calls(self.frame["calls"])
        series = self.frame["series"]
        steps = series["step"]
        if not steps:
            figure, (empty,) = panels(0.9)
            say_nothing_to_show(empty, self.frame["no_step"])
            return figure
        figure, axes = panels(5.2, rows=3)
        names = (
            ("reward_mean", "reward", BLUE, "o"),
            ("token_in_rate_after_roots", "token_in rate after roots", SAMPLED, "s"),
            ("valid_row_rate", "valid rows / rows", REJECTED, "^"),
        )
        for ax, (name, title, colour, marker) in zip(axes, names, strict=True):
            ax.set_title(title)
            if all(value is None for value in series[name]):
                say_nothing_to_show(ax, NONE_IN_STEPS)
                continue
            values = [np.nan if value is None else value for value in series[name]]
            ax.plot(steps, values, color=colour, marker=marker, ms=4, lw=1.8)
            if name != "reward_mean":
                ax.set_ylim(-0.04, 1.08)  # shares: an axis of its own would reach above 1
            step_ticks(ax, steps)
            ax.set_xlabel("optimiser step" if ax is axes[-1] else "")
        return figure

    def html(self) -> str:
        f = self.frame
        rows = [[t["label"], _tile_cell(t)] for t in f["tiles"]]
        parts = [markup.line(self.sentence(), strong=True), markup.table(("what", "now"), rows)]
        if f["flying"]:
            header = ("group in flight", "step", "rollouts", "for")
            shown = [[g["group"], f"{g['step']}", f"{g['rollouts']}", clock(g["age_s"])] for g in f["flying"]]
            parts.append(markup.table(header, shown))
            if len(shown) < f["in_flight"]:
                parts.append(markup.line(f"Showing {len(shown)} of {f['in_flight']:,} groups in flight", muted=True))
        if f["calls"]:
            counted = [[c["how"], markup.Cell(f"{c['calls']:,}", right=True)] for c in f["calls"]]
            parts.append(markup.table(("call", "calls"), counted))
        if f["causes"]:
            rejected = [[c["cause"], markup.Cell(f"{c['rollouts']:,}", right=True)] for c in f["causes"]]
            parts.append(markup.table(("rejected for", "rollouts"), rejected))
        if f["rejection"]:
            parts.append(markup.line(f"Last rejection: {f['rejection']}", muted=True))
        parts.append(markup.line(f"Last error: {f['error'] or 'none'}", muted=f["error"] is None))
        if f["damage"]:
            parts.append(markup.line(damage_words(f["damage"]), strong=True))
        return markup.block(*parts)

    def make_live(self) -> BoardWidget:
        from workbench.inspect.live.board import BoardWidget

        return BoardWidget.of(self)

    def show_snapshot(self) -> None:
        self._publish(update=False)
        self._kept, self._kept_at = self.frame, time.monotonic()

    def _publish(self, *, update: bool) -> None:
        from IPython.display import publish_display_data

        for part, (data, metadata) in enumerate(self.snapshot().outputs()):
            transient = {"display_id": f"{self._display_id}-{part}"}
            publish_display_data(data, metadata, transient=transient, update=update)

    def keep(self) -> bool:
        """Put the present frame in the place of the snapshot under the live view, now and then and at the end."""
        if self._kept is None or self._kept == self.frame:
            return False
        ended = self.frame["state"] != "running"
        if not ended and time.monotonic() - self._kept_at < KEEP_EVERY_S:
            return False
        self._kept, self._kept_at = self.frame, time.monotonic()
        self._publish(update=True)
        return True


def _draw_causes(causes: list[dict[str, Any]]) -> Figure:
    """What a ledger has instead of curves: rejected rollouts by cause."""
    shown = causes[:12]
    figure, (ax,) = panels(0.9 + 0.32 * max(1, len(shown)))
    if not shown:
        say_nothing_to_show(ax, "no rollout was rejected; a ledger has no steps")
        return figure
    more = "" if len(shown) == len(causes) else f", {len(shown)} of {len(causes)} causes"
    bar_list(ax, [row["cause"] for row in shown], [row["rollouts"] for row in shown], f"rollouts rejected for{more}")
    return figure


def _draw_calls(calls: list[dict[str, Any]]) -> Figure:
    """What a served run has instead of curves: its calls, those that were not captured hatched."""
    shown = calls[:12]
    figure, (ax,) = panels(0.9 + 0.32 * max(1, len(shown)))
    if not shown:
        say_nothing_to_show(ax, "no call yet; a served run has no steps")
        return figure
    bar_list(ax, [row["how"] for row in shown], [row["calls"] for row in shown], "calls")
    for bar, row in zip(ax.patches, shown, strict=True):
        if row["captured"]:
            bar.set(facecolor=BLUE, hatch="")
    return figure


def damage_words(told: list[str]) -> str:
    """What of a run's files could not be read, the first few places by name."""
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return f"Left out, {markup.count(len(told), 'place')} that cannot be read: {'; '.join(told[:3])}{more}"


def _tile_cell(tile: dict[str, Any]) -> markup.Cell:
    if tile["value"] is None:
        return markup.Cell(f"– ({tile['why']})", muted=True)
    return markup.Cell(tile["value"], strong=True)
