"""Tables: why rollouts were thrown away.

`PoisonTable`: every cause by count and share over steps, its explanation, an example with call and token position, and
below it the calls that were not captured at all. Invariant: the counts add up to the rejected rollouts; a cause that is
not in the vocabulary is shown under its own name, not dropped.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.figure import Figure

from workbench.inspect import html as markup
from workbench.inspect.ids import short_id
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import HATCHES, REJECTED, SERIES, panels, say_nothing_to_show
from workbench.wire import Cause


class PoisonTable(StaticView):
    """Rejected rollouts by cause. `run` is anything with `.rollouts` and `.calls` frames."""

    def __init__(self, run: Any) -> None:
        rollouts: pl.DataFrame = run.rollouts
        self.total = rollouts.height
        rejected = rollouts.filter(pl.col("cause").is_not_null()).sort("step", "group_id", "index")
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
            )
            .sort(["rollouts", "cause"], descending=[True, False])
        )
        self.failures = (
            run.calls.filter(pl.col("failure_reason").is_not_null())
            .group_by("failure_reason", "detail")
            .agg(
                pl.len().cast(pl.Int64).alias("calls"),
                pl.col("rollout_id").n_unique().cast(pl.Int64).alias("rollouts"),
                pl.col("rollout_id").min().alias("example"),
            )
            .sort(["calls", "failure_reason", "detail"], descending=[True, False, False], nulls_last=True)
        )
        self.by_step = (
            rejected.drop_nulls("step").group_by("cause", "step").agg(pl.len().cast(pl.Int64).alias("rollouts"))
        )

    def sentence(self) -> str:
        rejected = int(self.causes["rollouts"].sum())
        if self.total == 0:
            return "Causes · no rollout has been finalised yet"
        if rejected == 0:
            return f"Causes · none of {self.total:,} rollouts was rejected"
        top = self.causes.row(0, named=True)
        return (
            f"Causes · {rejected:,} of {self.total:,} rollouts rejected ({rejected / self.total:.1%}) · "
            f"{markup.count(self.causes.height, 'cause')}, most often {top['cause']} ({top['rollouts']:,})"
        )

    def figure(self) -> Figure | None:
        names = self.causes["cause"].to_list()
        figure, (ax,) = panels(1.5 + 0.42 * max(1, min(len(names), 12)))
        if not names:
            say_nothing_to_show(ax, self.sentence())
            return figure
        steps = sorted(self.by_step["step"].unique().to_list())
        count = {(row["cause"], row["step"]): row["rollouts"] for row in self.by_step.to_dicts()}
        shown = names[:12]
        ax.grid(axis="x", linewidth=0.8)
        ax.grid(visible=False, axis="y")
        if len(steps) <= len(HATCHES):
            left = [0] * len(shown)
            for k, step in enumerate(steps):
                widths = [count.get((name, step), 0) for name in shown]
                ax.barh(
                    range(len(shown)), widths, left=left, height=0.6, color=SERIES[k], edgecolor="white",
                    hatch=HATCHES[k], label=f"step {step}", lw=0.8,
                )
                left = [a + b for a, b in zip(left, widths, strict=True)]
            if len(steps) > 1:
                ax.legend(loc="lower right", ncols=3, fontsize=8)
        else:
            ax.barh(range(len(shown)), self.causes["rollouts"].to_list()[:12], height=0.6, color=REJECTED, hatch="////",
                    edgecolor="white")
        totals = self.causes["rollouts"].to_list()[:12]
        for y, value in enumerate(totals):
            ax.text(value, y, f"  {value} ({value / self.total:.1%})", va="center", fontsize=8.5)
        ax.set_yticks(range(len(shown)), shown)
        ax.set_ylim(len(shown) - 0.5, -0.5)
        ax.set_xlim(0, max(totals) * 1.22)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel(f"rejected rollouts, of {self.total:,} finalised")
        ax.set_title("why rollouts were rejected")
        return figure

    def html(self) -> str:
        parts = [markup.line(self.sentence(), strong=True)]
        if self.causes.height:
            header = ("cause", "rollouts", "share", "steps", "what it means", "example", "where", "detail")
            parts.append(markup.table(header, [self._cause_row(row) for row in self.causes.to_dicts()]))
        if self.failures.height:
            calls = int(self.failures["calls"].sum())
            parts.append(
                markup.line(
                    f"{markup.count(calls, 'call')} left no tokens; only those that bear on the trained chain reject "
                    "their rollout."
                )
            )
            header = ("reason", "detail", "calls", "rollouts", "what it means", "example")
            shown = self.failures.head(30).to_dicts()
            parts.append(markup.table(header, [self._failure_row(row) for row in shown]))
            if self.failures.height > len(shown):
                parts.append(markup.line(f"Showing {len(shown)} of {self.failures.height:,}; all: .failures", muted=True))
        return markup.block(*parts)

    def _cause_row(self, row: dict[str, Any]) -> list[markup.Cell | str]:
        first, last = row["first_step"], row["last_step"]
        steps = "–" if first is None else str(first) if first == last else f"{first}–{last}"
        where = "–" if row["call_id"] is None else f"call {short_id(row['call_id'], row['example'])}"
        if row["position"] is not None:
            where += f", token {row['position']}"
        return [
            markup.Cell(row["cause"], strong=True),
            markup.Cell(f"{row['rollouts']:,}", right=True),
            markup.Cell(f"{row['rollouts'] / self.total:.1%}", right=True),
            steps,
            explain(row["cause"]),
            row["example"],
            where,
            markup.Cell(row["detail"] or "", muted=True),
        ]

    @staticmethod
    def _failure_row(row: dict[str, Any]) -> list[markup.Cell | str]:
        return [
            markup.Cell(row["failure_reason"], strong=True),
            row["detail"] or "–",
            markup.Cell(f"{row['calls']:,}", right=True),
            markup.Cell(f"{row['rollouts']:,}", right=True),
            explain(row["detail"]) if row["detail"] in _CAUSES else explain(row["failure_reason"]),
            row["example"],
        ]


_CAUSES = {cause.value: cause for cause in Cause}


def explain(cause: str) -> str:
    """The vocabulary's one line for a cause; a foreign one says that it is not in the vocabulary."""
    known = _CAUSES.get(cause)
    return known.explanation if known is not None else "Not in the vocabulary of causes."
