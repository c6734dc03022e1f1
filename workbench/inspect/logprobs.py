"""LogprobDelta: how far the trainer's log-probabilities are from the sampler's, token by token.

In: the log-prob frame of a run (one row a sampled token that was trained on). Out: the distribution, the difference by
position and by weight version, the worst tokens in their text, and one detector. Formulas (upstream's names), with
d = trainer - sampler log-prob: `token_mult_prob_error` = mean exp|d|, `gen_kl_error` = mean (exp d - d - 1).
Not here: deciding whether a difference is too large (the campaign's proof does, after every weight sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import (
    MARKERS,
    SAMPLED,
    SERIES,
    TRAINED,
    legend_beside_title,
    panels,
    say_nothing_to_show,
)
from workbench.inspect.text import pieces_of
from workbench.runs.vocabulary import Vocabulary

WORST = 12
_CONTEXT = 8


@dataclass(frozen=True)
class DeltaNumbers:
    """Numbers of one set of tokens. Differences in nat, trainer - sampler."""

    tokens: int
    mean: float
    mean_abs: float
    median_abs: float
    p99_abs: float
    max_abs: float
    token_mult_prob_error: float
    gen_kl_error: float


def delta_numbers(delta_T: np.ndarray) -> DeltaNumbers:
    """The numbers of a float array of differences; all NaN for an empty one."""
    if delta_T.size == 0:
        return DeltaNumbers(0, *([float("nan")] * 7))
    d = delta_T.astype(np.float64)
    size = np.abs(d)
    return DeltaNumbers(
        tokens=int(d.size),
        mean=float(d.mean()),
        mean_abs=float(size.mean()),
        median_abs=float(np.median(size)),
        p99_abs=float(np.quantile(size, 0.99)),
        max_abs=float(size.max()),
        token_mult_prob_error=float(np.exp(size).mean()),
        gen_kl_error=float((np.exp(d) - d - 1).mean()),
    )


def shift_of_best_fit(tokens: pl.DataFrame, *, reach: int = 2) -> int:
    """By how many sampled tokens the trainer's log-probs must be moved to fit the sampler's best (0: in place).

    Compares the mean |difference| at every shift from -reach to reach within each rollout; another shift than 0 is
    only reported when it is less than half as far off.
    """
    errors: dict[int, tuple[float, int]] = {shift: (0.0, 0) for shift in range(-reach, reach + 1)}
    for _, part in tokens.group_by("step", "rollout_id", maintain_order=True):
        sampler = part["logprob"].to_numpy().astype(np.float64)
        trainer = part["trainer_logprob"].to_numpy().astype(np.float64)
        for shift, (total, count) in errors.items():
            if sampler.size <= abs(shift):
                continue
            moved = trainer[shift:] if shift >= 0 else trainer[:shift]
            still = sampler[: sampler.size - shift] if shift >= 0 else sampler[-shift:]
            errors[shift] = (total + float(np.abs(moved - still).sum()), count + moved.size)
    means = {shift: total / count for shift, (total, count) in errors.items() if count}
    if 0 not in means:
        return 0
    best = min(means, key=lambda shift: (means[shift], abs(shift)))
    return best if means[best] < 0.5 * means[0] else 0


class LogprobDelta(StaticView):
    """Trainer - sampler log-prob per sampled token. `source` is a run (anything with `.logprobs()`) or such a frame."""

    def __init__(self, source: Any, *, vocabulary: Vocabulary | None = None) -> None:
        frame: pl.DataFrame = source if isinstance(source, pl.DataFrame) else source.logprobs()
        self.tokens = frame.drop_nulls(["logprob", "trainer_logprob"])
        if vocabulary is None and not isinstance(source, pl.DataFrame):
            try:
                vocabulary = source.vocabulary()
            except RunStoreError:
                vocabulary = None
        self.vocabulary = vocabulary
        self.delta_T = self.tokens["delta"].to_numpy()
        self.numbers = delta_numbers(self.delta_T)
        self.shift = shift_of_best_fit(self.tokens)

    def sentence(self) -> str:
        n = self.numbers
        if n.tokens == 0:
            return "Log-prob delta · no token has been trained on yet"
        found = "in place" if self.shift == 0 else f"SHIFTED BY {self.shift:+d}"
        return (
            f"Log-prob delta · {n.tokens:,} sampled tokens · mean |Δ| {n.mean_abs:.4f} · p99 {n.p99_abs:.3f} · "
            f"max {n.max_abs:.3f} nat · positions {found}"
        )

    def draw(self) -> Figure:
        figure, (spread, place) = panels(3.2, columns=2, width_ratios=[1.15, 1])
        if self.numbers.tokens == 0:
            say_nothing_to_show(spread, "no token has been trained on yet")
            say_nothing_to_show(place, "nothing by position")
            return figure
        limit = max(float(np.quantile(np.abs(self.delta_T), 0.995)), 1e-6) * 1.25
        edges = np.linspace(-limit, limit, 62)
        counts, _ = np.histogram(np.clip(self.delta_T, -limit, limit), bins=edges)
        centres = (edges[:-1] + edges[1:]) / 2
        width = edges[1] - edges[0]
        below = centres < 0
        spread.bar(centres[below], counts[below], width=width, color=TRAINED)
        spread.bar(
            centres[~below],
            counts[~below],
            width=width,
            color=SAMPLED,
            hatch="....",
            edgecolor="white",
            lw=0,
        )
        spread.set_yscale("symlog", linthresh=1)
        spread.set_ylim(0, counts.max() * 4)
        spread.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        spread.axvline(self.numbers.mean, color="black", lw=1.2, ls="--")
        spread.set_title("Δ = trainer − sampler")
        spread.set_xlabel("nat; both ends gather what lies beyond")
        spread.set_ylabel("tokens (log scale)")
        for x, side, words in ((0.02, "left", "← trainer less likely"), (0.98, "right", "trainer more likely →")):
            spread.text(x, 0.97, words, transform=spread.transAxes, ha=side, va="top", fontsize=8.5)

        lines = [("all", self.tokens)]
        versions = self.tokens["weight_version"].drop_nulls().unique().sort().to_list()
        if len(versions) > 1:
            lines += [(f"v{v}", self.tokens.filter(pl.col("weight_version") == v)) for v in (versions[0], versions[-1])]
        for k, (label, part) in enumerate(lines):
            at, mean_abs = self._by_place(part)
            place.plot(
                at,
                mean_abs,
                color=SERIES[k],
                marker=MARKERS[k],
                ms=4.5,
                lw=2.2 if k == 0 else 1.3,
                ls="-" if k == 0 else "--",
                label=label,
            )
        place.set_title("mean |Δ| by place")
        place.set_xlabel("sampled token of the row")
        place.set_ylabel("nat")
        place.set_ylim(bottom=0)
        legend_beside_title(place)
        return figure

    def _by_place(self, tokens: pl.DataFrame, bins: int = 8) -> tuple[list[float], list[float]]:
        """Mean |Δ| in equal ranges of sampled positions: (middle of the range, mean)."""
        last = max(self.tokens["sampled_position"].to_list(), default=0)
        size = max(1, -(-(last + 1) // bins))
        grouped = (
            tokens.group_by((pl.col("sampled_position") // size).alias("bin"))
            .agg(pl.col("delta").abs().mean().alias("mean_abs"))
            .sort("bin")
        )
        return [bin_ * size + (size - 1) / 2 for bin_ in grouped["bin"].to_list()], grouped["mean_abs"].to_list()

    def html(self) -> str:
        n = self.numbers
        parts = [markup.line(self.sentence(), strong=True)]
        if n.tokens == 0:
            return markup.block(*parts)
        rows = [self._numbers_row("all", n)]
        versions = self.tokens["weight_version"].unique().sort().to_list()
        for version in versions if len(versions) > 1 else []:
            part = self.tokens.filter(pl.col("weight_version").eq_missing(version))
            rows.append(self._numbers_row(f"version {version}", delta_numbers(part["delta"].to_numpy())))
        header = (
            "tokens of",
            "count",
            "mean Δ",
            "mean |Δ|",
            "median",
            "p99",
            "max",
            "token_mult_prob_error",
            "gen_kl_error",
        )
        parts.append(markup.table(header, rows))
        if self.shift:
            parts.append(
                markup.line(
                    f"The trainer's log-probs fit the sampler's best when moved by {self.shift:+d} tokens: they are "
                    "shifted, the loss is about the wrong tokens.",
                    strong=True,
                )
            )
        parts.append(markup.line(f"The {min(WORST, n.tokens)} largest differences, of {n.tokens:,} tokens"))
        parts.append(
            markup.table(("Δ", "sampler", "trainer", "rollout", "position", "token", "before it"), self._worst())
        )
        return markup.block(*parts)

    @staticmethod
    def _numbers_row(name: str, n: DeltaNumbers) -> list[markup.Cell | str]:
        cells: list[markup.Cell | str] = [name, markup.Cell(f"{n.tokens:,}", right=True)]
        values = (n.mean, n.mean_abs, n.median_abs, n.p99_abs, n.max_abs, n.token_mult_prob_error, n.gen_kl_error)
        return [*cells, *(markup.Cell(f"{value:.5f}", right=True) for value in values)]

    def _worst(self) -> list[list[markup.Cell | str]]:
        ranked = (
            self.tokens.with_row_index("at")
            .with_columns(pl.col("delta").abs().alias("size"))
            .sort(["size", "rollout_id", "position"], descending=[True, False, False])
            .head(WORST)
        )
        rows: list[list[markup.Cell | str]] = []
        for row in ranked.to_dicts():
            before = self.tokens.slice(max(0, row["at"] - _CONTEXT), min(_CONTEXT, row["at"])).filter(
                pl.col("rollout_id") == row["rollout_id"]
            )
            rows.append(
                [
                    markup.Cell(f"{row['delta']:+.3f}", right=True, strong=True),
                    markup.Cell(f"{row['logprob']:.3f}", right=True),
                    markup.Cell(f"{row['trainer_logprob']:.3f}", right=True),
                    row["rollout_id"],
                    markup.Cell(str(row["position"]), right=True),
                    self._text([row["token_id"]]),
                    markup.Cell(self._text(before["token_id"].to_list()), muted=True),
                ]
            )
        return rows

    def _text(self, token_ids: list[int]) -> str:
        if self.vocabulary is None:
            return " ".join(str(i) for i in token_ids)
        return "".join(piece.shown for piece in pieces_of(token_ids, self.vocabulary))
