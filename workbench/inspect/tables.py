"""Tables: why rollouts were thrown away.

`PoisonTable`: every cause by count and share over steps, its explanation, an example with call and token position, and
below it the requests that were refused and the calls that were not captured at all, with what differs in those that
continued no recorded call. The live view opens the chain of any rejected rollout. Invariant: the counts add up to the
rejected rollouts; a cause that is not in the vocabulary is shown under its own name, not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.inspect import html as markup
from workbench.inspect.causes import explain, explain_failure, in_words
from workbench.inspect.ids import check_run, short_id
from workbench.inspect.snapshot import LiveView
from workbench.inspect.style import bar_list, panels, say_nothing_to_show
from workbench.runs.drift import drift_frame
from workbench.runs.early import count_early, early_words
from workbench.runs.refused import by_code, refused_words

if TYPE_CHECKING:
    from workbench.inspect.live.poison import PoisonAndChain

_DRIFTS = 10
"""Unresolved calls that are shown one by one; tokens are looked up for five times as many."""
_DETAILS = 20
"""Details of one cause that are listed."""
_CALL_COLUMNS = ("model_call_id", "near_call_id", "near_item", "drift")


class PoisonTable(LiveView):
    """Rejected rollouts by cause. `run` is anything with `.rollouts` and `.calls` frames."""

    def __init__(self, run: Any) -> None:
        check_run(run, "PoisonTable", "rollouts")
        self.source = run
        rollouts: pl.DataFrame = run.rollouts
        self.total = rollouts.height
        # By the step that took them; `step` of the frame is the one that they were sampled for.
        rejected = (
            rollouts.filter(pl.col("cause").is_not_null())
            .with_columns(step=pl.col("taken_step"))
            .sort("step", "group_id", "index", nulls_last=True)
        )
        self.causes = (
            rejected.group_by("cause", maintain_order=True)
            .agg(
                pl.len().cast(pl.Int64).alias("rollouts"),
                pl.col("step").min().alias("first_step"),
                pl.col("step").max().alias("last_step"),
                pl.col("rollout_id").first().alias("example"),
                pl.col("call_id").first(),
                pl.col("position").first(),
                pl.col("detail").first(),
                pl.col("detail").drop_nulls().n_unique().cast(pl.Int64).alias("details"),
            )
            .sort(["rollouts", "cause"], descending=[True, False])
        )
        self.early = count_early(rollouts["ended_early"])
        self.details = (
            rejected.group_by("cause", "detail", maintain_order=True)
            .agg(pl.len().cast(pl.Int64).alias("rollouts"), pl.col("rollout_id").first().alias("example"))
            .sort("rollouts", descending=True, maintain_order=True)
        )
        """One row a cause and detail, the most frequent first."""
        calls: pl.DataFrame = run.calls
        self.rejected = rejected.select("rollout_id", "step", "cause", "call_id", "position", "detail").join(
            calls.select("rollout_id", *_CALL_COLUMNS),
            left_on=["rollout_id", "call_id"],
            right_on=["rollout_id", "model_call_id"],
            how="left",
            maintain_order="left",
        )
        self.drift = drift_frame(run, limit=5 * _DRIFTS)
        # A ledger written elsewhere names unresolved calls and does not diagnose them.
        self.drift_is_known = self.drift["near_call_id"].count() + self.drift["drift"].count() > 0
        self.failures = (
            calls.filter(pl.col("failure_reason").is_not_null())
            .group_by("failure_reason", "detail")
            .agg(
                pl.len().cast(pl.Int64).alias("calls"),
                pl.col("rollout_id").n_unique().cast(pl.Int64).alias("rollouts"),
                pl.col("rollout_id").min().alias("example"),
            )
            .sort(["calls", "failure_reason", "detail"], descending=[True, False, False], nulls_last=True)
        )
        failed = calls.filter(pl.col("failure_reason").is_not_null())
        self.open_failures = failed.join(rollouts, on="rollout_id", how="anti").height
        """Calls among the failures whose rollout was not finalised, so that no other view counts them."""
        refused: pl.DataFrame | None = getattr(run, "refused", None)
        self.refused = None if refused is None else refused.filter(by="gateway")
        """Requests that the gateway refused, a row a rollout and reason (those of the engine are among the failures);
        None where the source keeps none, as a ledger."""
        said = None if self.refused is None else refused_words(self.refused, cut=run.refused_cut)
        self.refused_words = said and f"Requests that the gateway refused, and of which there is no call: {said}."
        self.last_step: int = max(rollouts["taken_step"].drop_nulls().to_list(), default=0)
        self.by_step = (
            rejected.drop_nulls("step").group_by("cause", "step").agg(pl.len().cast(pl.Int64).alias("rollouts"))
        )

    def sentence(self) -> str:
        rejected = int(self.causes["rollouts"].sum())
        if self.total == 0:
            return f"Causes · no rollout has been finalised{markup.yet(self.source)}"
        if rejected == 0:
            return f"Causes · none of {self.total:,} rollouts was rejected"
        top = self.causes.row(0, named=True)
        return (
            f"Causes · {rejected:,} of {self.total:,} rollouts rejected ({rejected / self.total:.1%}) · "
            f"{markup.count(self.causes.height, 'cause')}, most often {top['cause']} ({top['rollouts']:,})"
        )

    def draw(self) -> Figure:
        shown = self.causes.head(12)
        names = shown["cause"].to_list()
        if not names:
            figure, (only,) = panels(0.7)
            say_nothing_to_show(only, self.sentence().removeprefix("Causes · "))
            return figure
        counts, height = shown["rollouts"].to_list(), 0.95 + 0.33 * len(names)
        more = "" if len(names) == self.causes.height else f"; {len(names)} of {self.causes.height} causes"
        of = f"of {self.total:,} rollouts"
        if self.by_step.is_empty():
            figure, (only,) = panels(height)
            bar_list(only, names, counts, f"rejected, {of}{more}", self.total)
            return figure
        figure, (matrix, totals) = panels(0.2 + 2 * height, rows=2)
        self._draw_matrix(matrix, names)
        unplaced = self.rejected["step"].null_count()
        matrix.set_xlabel(f"optimiser step{f'; {unplaced:,} rejected in none' if unplaced else ''}{more}")
        bar_list(totals, names, counts, f"in all, {of}", self.total)
        return figure

    def _draw_matrix(self, ax: Axes, names: list[str]) -> None:
        """Counts by cause and step; more than 12 steps are gathered into equal ranges."""
        first, last = min([1, *self.by_step["step"].to_list()]), self.last_step
        size = max(1, -(-(last - first + 1) // 12))
        bins = (last - first) // size + 1
        counts = np.zeros((len(names), bins), dtype=np.int64)
        for row in self.by_step.to_dicts():
            if row["cause"] in names:
                counts[names.index(row["cause"]), (row["step"] - first) // size] += row["rollouts"]
        ax.imshow(counts, cmap="Purples", vmin=0, vmax=max(1, counts.max()) * 1.6, aspect="auto")
        for y, x in np.argwhere(counts > 0):
            ax.text(x, y, f"{counts[y, x]}", ha="center", va="center", fontsize=9, weight="bold")
        ax.grid(visible=False)
        ax.set_yticks(range(len(names)), names)
        labels = [f"{first + size * k}" if size == 1 else f"{first + size * k}–" for k in range(bins)]
        stride = 1 if size == 1 else 2
        ax.set_xticks(range(0, bins, stride), labels[::stride])
        ax.set_title("rejected rollouts by cause and step")

    def html(self) -> str:
        parts = [markup.line(self.sentence(), strong=True)]
        if self.causes.height:
            header = ("cause, and what it means", "rollouts", "share", "steps", "example, and where in it", "detail")
            parts.append(markup.table(header, [self._cause_row(row) for row in self.causes.to_dicts()]))
            parts += [self._details_of(row) for row in self.causes.to_dicts() if row["details"] > 1]
        if self.early:
            parts.append(markup.line(f"Ended early, which alone costs no vote: {early_words(self.early, self.total)}."))
        if self.refused is not None and self.refused_words:
            parts.append(markup.line(self.refused_words))
            told = ("refused as", "requests", "rollouts", "example", "what it was told first")
            parts.append(markup.table(told, [_refused_row(row) for row in by_code(self.refused).to_dicts()]))
        if self.failures.height:
            calls = markup.count(int(self.failures["calls"].sum()), "call")
            open_ones = f", {self.open_failures:,} of them of rollouts that were not finalised" * bool(
                self.open_failures
            )
            bearing = "only those that bear on the terminal chain reject their rollout."
            parts.append(markup.line(f"{calls} left no tokens{open_ones}; {bearing}"))
            columns = ("reason, and what it means", "detail", "calls", "rollouts", "example")
            shown = self.failures.head(30).to_dicts()
            parts.append(markup.table(columns, [self._failure_row(row) for row in shown]))
            if self.failures.height > len(shown):
                parts.append(
                    markup.line(f"Showing {len(shown)} of {self.failures.height:,}; all: .failures", muted=True)
                )
        if self.drift.height and not self.drift_is_known:
            words = f"What differed in the {markup.count(self.drift.height, 'unresolved call')} is not recorded here."
            parts.append(markup.line(words, muted=True))
        elif self.drift.height:
            places = ("drift", "rollout, and call", "nearly continues, and differs in", "was", "came", "first token")
            parts.append(markup.table(places, [self._drift_row(row) for row in self.drift.head(_DRIFTS).to_dicts()]))
            if self.drift.height > _DRIFTS:
                parts.append(markup.line(f"Showing {_DRIFTS} of {self.drift.height:,}; all: .drift", muted=True))
        return markup.block(*parts)

    @staticmethod
    def _drift_row(row: dict[str, Any]) -> list[markup.Cell | str]:
        near, item, token = row["near_call_id"], row["near_item"], row["token_position"]
        parts = (None if item is None else f"item {item} (from 0)", row["near_path"])
        return [
            markup.Cell(row["cause"] or "–", strong=True),
            markup.Cell(row["rollout_id"], under=f"call\u00a0{short_id(row['model_call_id'], row['rollout_id'])}"),
            markup.Cell(
                "–" if near is None else f"call {short_id(near, row['rollout_id'])}",
                under=", ".join(part for part in parts if part),
            ),
            row["near_was"] if row["near_was"] is not None else "–",
            row["near_came"] if row["near_came"] is not None else "–",
            "–" if token is None else f"{token} (id\u00a0{row['token_id']})",
        ]

    def make_live(self) -> PoisonAndChain:
        from workbench.inspect.live.poison import PoisonAndChain

        return PoisonAndChain(self)

    def _cause_row(self, row: dict[str, Any]) -> list[markup.Cell | str]:
        first, last = row["first_step"], row["last_step"]
        where = place_of(row["call_id"], row["position"], row["example"]).removeprefix("–").replace(" ", "\u00a0", 1)
        steps = "–" if first is None else str(first) if first == last else f"{first}–{last}"
        more = row["details"] > 1
        others = markup.count(row["details"] - 1, "other detail")
        return [
            markup.Cell(row["cause"], strong=True, under=explain(row["cause"])),
            markup.Cell(f"{row['rollouts']:,}", right=True),
            markup.Cell(f"{row['rollouts'] / self.total:.1%}", right=True),
            steps,
            markup.Cell(row["example"], under=where),
            markup.Cell(
                in_words(row["detail"], row["cause"]), muted=True, under=f"and {others}, below" if more else ""
            ),
        ]

    def _details_of(self, cause: dict[str, Any]) -> str:
        """Every detail of a cause with its count, folded; the shown ones are bounded."""
        own = self.details.filter(cause=cause["cause"])
        rows = [
            [
                markup.Cell(f"{row['rollouts']:,}", right=True),
                row["example"],
                in_words(row["detail"], cause["cause"]) or "no detail",
            ]
            for row in own.head(_DETAILS).to_dicts()
        ]
        parts = [markup.table(("rollouts", "the first of them", "detail"), rows)]
        if own.height > _DETAILS:
            rest = int(own[_DETAILS:]["rollouts"].sum())
            words = f"Showing {_DETAILS} of {own.height:,}; the others are of {markup.count(rest, 'rollout')}: .details"
            parts.append(markup.line(words, muted=True))
        words = (
            f"{cause['cause']}: {markup.count(own.height, 'detail')} of {markup.count(cause['rollouts'], 'rollout')}"
        )
        return markup.folded(words, *parts)

    @staticmethod
    def _failure_row(row: dict[str, Any]) -> list[markup.Cell | str]:
        meaning = explain_failure(row["failure_reason"], row["detail"])
        return [
            markup.Cell(row["failure_reason"], strong=True, under=meaning),
            row["detail"] or "–",
            markup.Cell(f"{row['calls']:,}", right=True),
            markup.Cell(f"{row['rollouts']:,}", right=True),
            row["example"],
        ]


def _refused_row(row: dict[str, Any]) -> list[markup.Cell | str]:
    return [
        markup.Cell(f"{row['status']} {row['code']}", strong=True),
        markup.Cell(f"{row['requests']:,}", right=True),
        markup.Cell(f"{row['rollouts']:,}", right=True),
        row["example"] or "–",
        row["message"] or "–",
    ]


def place_of(call_id: str | None, position: int | None, rollout_id: str) -> str:
    """Where verification failed, as far as it is known: "call 1a2b3c4d, token 17"."""
    where = "–" if call_id is None else f"call {short_id(call_id, rollout_id)}"
    return where if position is None else f"{where}, token {position:,}"
