"""Optimisation: what every optimiser step did to the policy, by step.

In: a run's `steps` frame, and the bounds that its recipe sets (clip range, gradient norm, lag). Out: a small picture a
signal, a row a step, and a sentence wherever a value reached one of those bounds, with what that means.
Invariant: nothing is called unusual but by the recipe's own bounds or by what a value is defined as. Which loss,
entropy or divergence is healthy depends on the task, and no number here says so. A signal that no step recorded is
greyed, with the reason. Not here: single tokens (logprobs), rewards and capture (figures).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.inspect import html as markup
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import (
    BLUE,
    CARRY,
    FAINT,
    REJECTED,
    SAMPLED,
    legend_under_title,
    panels,
    say_nothing_to_show,
    step_ticks,
)
from workbench.runs.gradient import had_gradient, other_movers, unchanged

_SHOWN = 40
_NO_TOKEN = "no step had a token in the loss"
_SMALL = 1e-3
"""An axis that ends below is marked in one format, 4.0e-05 and 1.0e-04, throughout."""
_TICKS, _WORDS = 6, 24
"""Steps that are named under a panel of half the width, and characters of a line in it."""
_RATIO = tuple(f"probs_ratio_p{q:02d}" for q in (1, 5, 50, 95, 99))
_COLUMNS = (
    ("loss", "loss", ".4f"),
    ("grad_norm", "gradient norm", ".3f"),
    ("clip_fraction", "clipped", ".2%"),
    ("probs_ratio_p01", "ratio p01", ".3f"),
    ("probs_ratio_p50", "median", ".3f"),
    ("probs_ratio_p99", "p99", ".3f"),
    ("approx_entropy", "entropy (nat)", ".3f"),
    ("advantage_abs_mean", "mean |A|", ".3f"),
    ("token_lag_mean", "lag, mean", ".2f"),
    ("token_lag_max", "lag, most", "d"),
    ("gen_kl_error", "KL to sampler", ".4f"),
    ("kl_penalty", "KL to reference", ".4f"),
    ("loss_tokens", "tokens in the loss", ",d"),
)
"""Column of `run.steps`, its head in the table, its format."""
_MEANINGS = {
    "clip_fraction": ("clipped", "share of the tokens in the loss that clipping left without a policy gradient"),
    "probs_ratio_p50": (
        "ratio",
        "probability of a sampled token, trainer over sampler; 1% of the tokens lie below p01, and 1% above p99",
    ),
    "approx_entropy": (
        "entropy",
        "mean of −log-prob over the sampled tokens; it moves with the tasks of a step too, and one that falls "
        "throughout means that the policy narrows",
    ),
    "advantage_abs_mean": (
        "|A|",
        "size of the advantages; 0: equal rewards, or one vote, in each group, nothing is taught",
    ),
    "token_lag_mean": ("lag", "weight versions between the sampling of a token and the step that trains it"),
    "gen_kl_error": (
        "KL to sampler",
        "estimate of KL(sampler ‖ trainer) over the sampled tokens (gen_kl_error); 0 where both agree",
    ),
    "kl_penalty": ("KL to reference", "estimate of KL(policy ‖ reference), which the loss is charged with"),
}
"""Column of `run.steps`, the word that needs one, its meaning: what stands under the table."""
_SIZES = ("gen_kl_error", "kl_penalty")
"""Columns whose numbers may be of any size: one format that shows all of them."""
_LEFT_OUT = ("off_policy_rows", "disagreeing_rows", "other_component_rows")
_OTHERS = ("optimizer_stepped", *_LEFT_OUT, "probs_ratio_p05", "probs_ratio_p95")


class Optimisation(StaticView):
    """Loss, gradient, ratio and clip, entropy, advantages and lag of every optimiser step of `run`."""

    def __init__(self, run: Any) -> None:
        self.train: dict[str, Any] = (getattr(run, "recipe", None) or {}).get("train") or {}
        """The recipe's section; a bound that it does not say is not compared with."""
        held = getattr(run, "steps", None)
        if held is None:
            check_run(run, "Optimisation", "rollouts")
        self.why_empty = markup.why_no_step(run)
        if held is None:
            self.why_empty = "a ledger has no optimiser steps"
        elif held.is_empty() and (trained := run.rollouts["trained_step"].drop_nulls()).len():
            self.why_empty = (
                f"no line of steps.jsonl{markup.yet(run)}; {markup.count(trained.len(), 'rollout')} trained in "
                f"{markup.steps(sorted(set(trained)))}"
            )
        names = [name for name, _, _ in _COLUMNS] + list(_OTHERS)
        frame = pl.DataFrame(schema={"step": pl.Int64}) if held is None else held
        lacking = [pl.lit(None, pl.Float64).alias(name) for name in names if name not in frame.columns]
        self.steps = frame.with_columns(lacking).select("step", *names).sort("step")

    def sentence(self) -> str:
        if self.steps.is_empty():
            return f"Optimisation · {self.why_empty}"
        parts = [f"Optimisation over {markup.count(self.steps.height, 'step')}"]
        for name, words, spec in (
            ("clip_fraction", "clipped at most {} of tokens", ".1%"),
            ("probs_ratio_p99", "ratio p99 at most {}", ".3f"),
            ("grad_norm", "gradient norm at most {}", ".3f"),
        ):
            if (name in _RATIO and self._tis) or (most := self._most(name)) is None:
                continue
            none = {"clip_fraction": "nothing clipped", "grad_norm": "no gradient"}.get(name) if most[0] == 0 else None
            parts.append(none or f"{words.format(format(most[0], spec))} (step {most[1]})")
        if entropy := self._known("approx_entropy").select("step", "approx_entropy").rows():
            (first, begun), (last, ended) = entropy[0], entropy[-1]
            to = f" (step {first}), {ended:.2f} (step {last})" if len(entropy) > 1 else ""
            parts.append(f"entropy {begun:.2f} nat{to}")
        return " · ".join(parts)

    @property
    def _tis(self) -> bool:
        return (self.train.get("loss") or {}).get("tis_cap") is not None

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The ratios between which nothing is clipped; None where the run's recipe cannot be read."""
        low, high = self.train.get("clip_low"), self.train.get("clip_high")
        return None if low is None or high is None else (1.0 - low, 1.0 + high)

    @property
    def max_lag(self) -> int | None:
        given = (self.train.get("off_policy") or {}).get("max_lag")
        return self.train.get("max_staleness") if given is None else given

    def _known(self, name: str) -> pl.DataFrame:
        return self.steps.drop_nulls(name)

    def _most(self, name: str) -> tuple[float, int] | None:
        known = self._known(name).sort(name, descending=True, maintain_order=True)
        return None if known.is_empty() else (known[name][0], known["step"][0])

    def _where(self, condition: pl.Expr) -> list[int]:
        return self.steps.filter(condition)["step"].to_list()

    def missing(self, name: str) -> str | None:
        """Why a signal is in no step; None for one that is."""
        if self.steps[name].count():
            return None
        if name == "kl_penalty" and not (self.train.get("kl") or {}).get("coefficient"):
            return "no KL penalty (train.kl.coefficient is 0)"
        if self._where(pl.col("loss_tokens") > 0) or not self.steps["loss_tokens"].count():
            return "not in the lines of the run's steps.jsonl"
        return _NO_TOKEN

    def notes(self) -> list[str]:
        """A sentence for every bound that a step reached, and for every signal that means nothing as it is."""
        return [*self._of_ratio(), *self._of_gradient(), *self._of_rows()]

    def _of_ratio(self) -> list[str]:
        told = []
        clip, clipped = self.clip_range, self._most("clip_fraction")
        if clipped is not None and clipped[0] > 0:
            between = f" of {clip[0]:g} to {clip[1]:g} (train.clip_low, train.clip_high)" if clip else ""
            told.append(
                f"Clipped: {clipped[0]:.1%} of the tokens in the loss at most, in step {clipped[1]}. Their ratio had "
                f"left the range{between} to the side to which their advantage pushes, so they gave the policy loss no "
                "gradient; what is learned is learned from the others."
            )
        if self._tis:
            return [
                *told,
                "The ratio is 1 throughout by definition: under train.loss.tis_cap it is against the trainer's own "
                "pass. How far the sampler is, LogprobDelta shows.",
            ]
        if clip is not None:
            far = (pl.col("probs_ratio_p01") < clip[0]) | (pl.col("probs_ratio_p99") > clip[1])
            if steps := self._where(far):
                told.append(
                    f"Ratio: at least 1% of the tokens lie outside of the clip range on one side in "
                    f"{markup.steps(steps)}. One optimiser step is taken on each batch, so what moves the ratio is the "
                    "weights between sampling and training (the lag) and number formats: see LogprobDelta, all tokens "
                    "against those at equal weights."
                )
        return told

    def _of_gradient(self) -> list[str]:
        told = []
        bound, most = self.train.get("max_grad_norm"), self._most("grad_norm")
        if bound is not None and most is not None and (steps := self._where(pl.col("grad_norm") > bound)):
            told.append(
                f"Gradient: scaled down to train.max_grad_norm = {bound:g} in {markup.steps(steps)} (largest norm "
                f"{most[0]:.3f}): the direction stays, the size is bounded."
            )
        if steps := self._where(pl.col("optimizer_stepped") == 0):
            told.append(f"No optimiser step in {markup.steps(steps)}: no row had a vote, so no weight was changed.")
        if steps := self._where((pl.col("advantage_abs_mean") == 0) & (pl.col("optimizer_stepped") != 0)):
            told.append(
                f"Advantages: all 0 in {markup.steps(steps)}, as where the rewards of each group are equal, or one "
                f"rollout of it alone has a vote: they gave no gradient.{self._moved_all_the_same(steps)}"
            )
        return told

    def _moved_all_the_same(self, steps: list[int]) -> str:
        """What else moved weights in `steps`, whose rewards gave no gradient; nothing where that is not known."""
        still = [step for step in steps if step in unchanged(self.steps, self.train)]
        if still == steps:
            return " Nothing else moves weights, and none was changed."
        pushed = [row["step"] for row in self.steps.to_dicts() if had_gradient(row)]
        moved = other_movers(self.train, before=bool(pushed) and min(pushed) < max(steps))
        but = f" (in {markup.steps(still)} nothing, and none was changed)" if still else ""
        return f" What moves weights there all the same: {', '.join(moved)}{but}." if moved else ""

    def _of_rows(self) -> list[str]:
        told = []
        policy, lag = (self.train.get("off_policy") or {}).get("policy", "allow"), self.max_lag
        if lag is not None and policy == "allow" and (steps := self._where(pl.col("token_lag_max") > lag)):
            told.append(
                f"Lag: tokens more than {markup.count(lag, 'version')} old in {markup.steps(steps)}, trained like the "
                "others (train.off_policy.policy: allow)."
            )
        why = (
            f"lost tokens, or their vote, for being too old (train.off_policy.policy: {policy})",
            "left out: trainer and sampler disagree by more than train.loss.max_mult_prob_error",
            "left out: their rewards have other components than most (events of kind other_components say which)",
        )
        for name, words in zip(_LEFT_OUT, why, strict=True):
            rows = int(self.steps[name].sum() or 0)
            if rows:
                told.append(f"{markup.count(rows, 'row')} {words}, {markup.steps(self._where(pl.col(name) > 0))}.")
        return told

    def draw(self) -> Figure:
        untrained = self._known("loss_tokens").height == self.steps.height and not self._where(
            pl.col("loss_tokens") > 0
        )
        if self.steps.is_empty() or untrained:
            figure, (empty,) = panels(0.9)
            say_nothing_to_show(empty, _NO_TOKEN if self.steps.height else self.why_empty)
            return figure
        figure, axes = panels(8.2, rows=4, columns=2)
        drawn: tuple[tuple[str, str, Callable[[Axes], None]], ...] = (
            ("ratio trainer / sampler", "probs_ratio_p50", self._draw_ratio),
            ("clipped tokens", "clip_fraction", self._draw_clip),
            ("gradient norm", "grad_norm", self._draw_gradient),
            ("loss", "loss", lambda ax: self._line(ax, "loss")),
            ("entropy (nat)", "approx_entropy", lambda ax: self._line(ax, "approx_entropy")),
            ("mean |advantage|", "advantage_abs_mean", lambda ax: self._line(ax, "advantage_abs_mean", least=1e-3)),
            ("lag of tokens (versions)", "token_lag_mean", self._draw_lag),
            ("KL (nat)", "gen_kl_error", self._draw_kl),
        )
        for ax, (title, needed, draw) in zip(axes, drawn, strict=True):
            ax.set_title(title)
            why = self.missing(needed)
            if why is None and needed in _RATIO and self._tis:
                why = "1 throughout by definition (train.loss.tis_cap)"
            if why is not None:
                say_nothing_to_show(ax, textwrap.fill(why, _WORDS))
                continue
            draw(ax)
            if ax.get_legend_handles_labels()[0]:
                legend_under_title(ax, columns=2)
            step_ticks(ax, self.steps["step"].to_list(), most=_TICKS if self.steps.height < 100 else 4)
        for ax in axes[-2:]:
            ax.set_xlabel("optimiser step")
        return figure

    def _values(self, name: str) -> np.ndarray:
        return self.steps[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()

    def _line(
        self, ax: Axes, name: str, *, least: float | None = None, second: bool = False, label: str | None = None
    ) -> None:
        """A signal by step; `least`: of a size, whose axis begins at 0 and reaches at least so far."""
        look: dict[str, Any] = (
            {"color": SAMPLED, "marker": "s", "ls": "--"} if second else {"color": BLUE, "marker": "o"}
        )
        values = self._values(name)
        # A mark at the edge of its panel is drawn whole.
        size = 4 if self.steps.height <= _SHOWN else 0  # of many steps the marks would hide the line
        ax.plot(self.steps["step"].to_list(), values, lw=1.8, ms=size, label=label, clip_on=False, **look)
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}".replace("-", "−", 1)))
        if least is not None:
            ax.set_ylim(0, max(least, float(np.nanmax(values)) * 1.1))

    def _draw_ratio(self, ax: Axes) -> None:
        at = self.steps["step"].to_list()
        p01, p05, _, p95, p99 = (self._values(name) for name in _RATIO)
        ax.fill_between(at, p01, p99, color=FAINT, alpha=0.6, lw=0, label="p01 to p99")
        ax.fill_between(at, p05, p95, facecolor=CARRY, hatch="....", edgecolor="white", lw=0, label="p05 to p95")
        self._line(ax, "probs_ratio_p50", label="median")
        if self.clip_range is not None:
            for bound, label in zip(self.clip_range, ("clip range", None), strict=True):
                ax.axhline(bound, color=REJECTED, lw=1.2, ls=":", label=label)

    def _draw_clip(self, ax: Axes) -> None:
        self._line(ax, "clip_fraction", least=0.01)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))

    def _draw_gradient(self, ax: Axes) -> None:
        self._line(ax, "grad_norm", least=1e-3)
        bound, most = self.train.get("max_grad_norm"), self._most("grad_norm")
        if bound is not None and most is not None and most[0] > bound / 2:  # else it would press the curve flat
            ax.axhline(bound, color=REJECTED, lw=1.2, ls=":", label=f"bound {bound:g}")
            ax.set_ylim(top=max(most[0], bound) * 1.1)

    def _draw_lag(self, ax: Axes) -> None:
        self._line(ax, "token_lag_mean", label="mean")
        self._line(ax, "token_lag_max", second=True, label="most")
        ax.set_ylim(-0.1, max(1.0, float(self.steps["token_lag_max"].max() or 0)) * 1.15)  # type: ignore[arg-type]

    def _draw_kl(self, ax: Axes) -> None:
        self._line(ax, "gen_kl_error", least=1e-6, label="to sampler")
        if self.missing("kl_penalty") is None:
            self._line(ax, "kl_penalty", second=True, label="to reference")
            ax.autoscale(axis="y")
        if ax.get_ylim()[1] < _SMALL:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))

    def html(self) -> str:
        parts = [markup.line(self.sentence(), strong=True)]
        if self.steps.is_empty():
            return markup.block(*parts)
        parts += [markup.line(words) for words in self.notes()]
        if len(parts) == 1 and self._known("grad_norm").height:
            parts.append(markup.line("No step reached a bound of its recipe."))
        unknown = [] if self.train else ["the bounds, since the run's recipe cannot be read"]
        columns = [column for column in _COLUMNS if self.missing(column[0]) is None]
        missing: dict[str, list[str]] = {}
        for name, head, _ in _COLUMNS:
            if (why := self.missing(name)) is not None:
                missing.setdefault(why, []).append(head)
        unknown += [f"{', '.join(heads)}: {why}" for why, heads in missing.items()]
        shown = self.steps.tail(_SHOWN)
        columns = [
            (name, head, markup.one_format(shown[name], spec) if name in _SIZES else spec)
            for name, head, spec in columns
        ]
        rows = [
            [markup.Cell(str(row["step"]), right=True), *(_cell(row[name], spec) for name, _, spec in columns)]
            for row in shown.to_dicts()
        ]
        parts.append(markup.table(("step", *(head for _, head, _ in columns)), rows))
        parts.append(markup.legend(dict(_MEANINGS[name] for name, _, _ in columns if name in _MEANINGS)))
        if self.steps.height > _SHOWN:
            parts.append(markup.line(f"The last {_SHOWN} of {self.steps.height:,} steps", muted=True))
        if unknown:
            parts.append(markup.line(f"Not known: {'; '.join(unknown)}.", muted=True))
        return markup.block(*parts)


def _cell(value: float | int | None, spec: str) -> markup.Cell:
    if value is None:
        return markup.Cell("–", right=True, muted=True)
    return markup.Cell(markup.number(int(value) if spec.endswith("d") else value, spec), right=True)
