"""RouterAgreement: would the trainer's own routers have chosen the experts that sampled a token? Layer by layer.

In: runs with `.steps`; the table's columns `router_agreement_by_layer`, `replay_coverage` and `mean_abs_logprob_delta`.
Out: a curve a layer over steps, or over layers where there is one step, and under it each run's numbers, so that a run
without replay stands beside one with.
Invariant: a run that replayed nothing has no agreement, and says so; it is never 0 or 1.
Not here: single tokens (TokenStrip, colour "router agreement").
"""

from __future__ import annotations

from typing import Any

import orjson
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.inspect import html as markup
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import MARKERS, SERIES, legend_under_title, panels, say_nothing_to_show, step_ticks


class RouterAgreement(StaticView):
    """`RouterAgreement(run)`, or of several runs by name: `RouterAgreement(replay=run_a, none=run_b)`."""

    def __init__(self, run: Any = None, **runs: Any) -> None:
        self.runs: dict[str, Any] = ({getattr(run, "name", "run"): run} if run is not None else {}) | runs
        for held in self.runs.values():
            check_run(held, "RouterAgreement", "steps")
        rows = [
            {"arm": arm, "step": step["step"], "layer": int(layer), "agreement": share}
            for arm, held in self.runs.items()
            for step in held.steps.iter_rows(named=True)
            for layer, share in orjson.loads(step.get("router_agreement_by_layer") or "{}").items()
        ]
        dtypes = {"arm": pl.String, "step": pl.Int64, "layer": pl.Int64, "agreement": pl.Float64}
        self.frame = pl.DataFrame(rows, schema=dtypes).sort("arm", "layer", "step")
        """One row an arm, step and layer with experts."""

    def sentence(self) -> str:
        if self.frame.is_empty():
            return "Router agreement · no routes were replayed (train.router_replay.mode)"
        layers = self.frame.group_by("layer").agg(pl.col("agreement").mean()).sort("agreement")
        worst, mean = layers.row(0, named=True), _mean(layers, "agreement") or 0.0
        return (
            f"Router agreement over {markup.count(layers.height, 'layer')} · {mean:.1%} of "
            f"tokens would go to the same experts · least in layer {worst['layer']}, {worst['agreement']:.1%}"
        )

    def draw(self) -> Figure:
        if self.frame.is_empty():
            figure, (axes,) = panels(0.9)
            say_nothing_to_show(axes, "no routes were replayed")
            return figure
        figure, (axes,) = panels(2.6 + 0.18 * (self.frame.select("arm", "layer").n_unique() // 3))
        axes.set_title("tokens whose own router agrees with the replayed route")
        axes.set_ylim(-0.04, 1.08)
        if self.frame["step"].n_unique() == 1:
            self._draw_layers(axes)
            return figure
        for place, ((arm, layer), part) in enumerate(self.frame.group_by("arm", "layer", maintain_order=True)):
            colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
            name = f"layer {layer}" if len(self.runs) == 1 else f"{arm}, layer {layer}"
            axes.plot(part["step"], part["agreement"], color=colour, marker=marker, lw=1.6, ms=5, label=name)
        axes.set_xlabel("optimiser step")
        legend_under_title(axes)
        step_ticks(axes, sorted(set(self.frame["step"].to_list())))
        return figure

    def _draw_layers(self, axes: Axes) -> None:
        """The one step there is: a layer beside the other."""
        for place, ((arm,), part) in enumerate(self.frame.group_by("arm", maintain_order=True)):
            colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
            axes.plot(part["layer"], part["agreement"], color=colour, marker=marker, lw=1.6, ms=5, label=arm)
        axes.set_xlabel(f"layer, in optimiser step {self.frame['step'][0]}")
        axes.set_xticks(sorted(set(self.frame["layer"].to_list())))
        if len(self.runs) > 1:
            legend_under_title(axes)

    def html(self) -> str:
        rows = []
        for arm, run in self.runs.items():
            own = self.frame.filter(pl.col("arm") == arm)
            delta, coverage = (_mean(run.steps, name) for name in ("mean_abs_logprob_delta", "replay_coverage"))
            rows.append([arm, _said(coverage, ".1%"), _said(_mean(own, "agreement"), ".1%"), _said(delta, ".4f")])
        header = ("run", "positions replayed", "router agreement", "mean |Δ| (nat)")
        return markup.block(markup.line(self.sentence(), strong=True), markup.table(header, rows))


def _mean(frame: pl.DataFrame, name: str) -> float | None:
    values = frame[name].drop_nulls() if name in frame.columns else pl.Series([], dtype=pl.Float64)
    return float(values.mean()) if values.len() else None  # type: ignore[arg-type]


def _said(value: float | None, style: str) -> str:
    return "none" if value is None else format(value, style)
