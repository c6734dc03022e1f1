"""LogprobDelta: how far the trainer's log-probabilities are from the sampler's, token by token.

In: the log-prob frame of a run (one row a sampled token that was trained on). Out: the distribution, the difference by
position and by weight version, the worst tokens in their text, and what the detectors say. Formulas (upstream's names)
with d = trainer - sampler log-prob: `token_mult_prob_error` = mean exp|d|, `gen_kl_error` = mean (exp d - d - 1).
Not here: deciding whether a difference is too large (the campaign's proof does, after every weight sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import LiveView
from workbench.inspect.style import (
    BLUE,
    MARKERS,
    SAMPLED,
    SERIES,
    SMALL,
    legend_under_title,
    panels,
    say_nothing_to_show,
)
from workbench.inspect.text import pieces_of
from workbench.runs.agreement import Verdict, examine
from workbench.runs.gradient import unchanged
from workbench.runs.tokens import LOGPROB_DTYPES, at_equal_weights
from workbench.runs.vocabulary import Vocabulary

if TYPE_CHECKING:
    from workbench.inspect.live.delta import DeltaAndTokens

WORST = 12
WORST_LIVE = 300
_CONTEXT = 8
_ABOVE = 20
"""Points between a panel and its title, for a line of words."""
_REACH = 2
"""Sampled tokens by which a shift is looked for."""
LABELS = {"shift_by_one": "shift", "temperature": "temperature", "truncated_support": "truncated support"}
"""Detectors, as a reader finds them named."""
_CAN_DIFFER = "can differ by the optimiser steps in between as well"
_NUMBERS = ("mean", "mean_abs", "median_abs", "p99_abs", "max_abs", "token_mult_prob_error", "gen_kl_error")
_MEANINGS = {
    "Δ": "trainer's − sampler's log-prob of a sampled token, in nat",
    "median, p99, max": "of |Δ|; 99 of 100 tokens lie below p99",
    "token_mult_prob_error": "mean of exp |Δ|: the difference as a factor, 1 at best",
    "gen_kl_error": "mean of exp Δ − Δ − 1: an estimate of KL(sampler ‖ trainer), 0 at best",
}
"""What stands under the table."""
SUSPICIONS = {
    "shift_by_one": "The trainer found its log-probs shifted by one token against the sampler's",
    "temperature": "The trainer found the sampler sharper or flatter than itself: one of them scaled its logits by a "
    "temperature, the other not",
    "truncated_support": "The trainer found the sampler speaking of a part of the vocabulary only (top-p, top-k, "
    "min-p, or a grammar that the agent asked for)",
}
"""What a detector's name in a step's `agreement_suspect` says."""


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


def by_rollout(tokens: pl.DataFrame) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Trainer log-probs, sampler log-probs, a mask of all ones: one array each a row of a step, sampled tokens only."""
    changes = tokens.select(pl.struct("step", "rollout_id").rle_id().diff().fill_null(0) != 0).to_series()
    at = np.flatnonzero(changes.to_numpy())
    trainer = np.split(tokens["trainer_logprob"].to_numpy().astype(np.float64), at)
    sampler = np.split(tokens["logprob"].to_numpy().astype(np.float64), at)
    return trainer, sampler, [np.ones(values.size, dtype=bool) for values in sampler]


def _suspects(source: Any) -> dict[str, list[int]]:
    """Detector → steps in which the trainer's detectors found something; {} for a frame, which has no steps."""
    steps = getattr(source, "steps", None)
    found: dict[str, list[int]] = {}
    if steps is not None and "agreement_suspect" in steps.columns:
        for row in steps.drop_nulls("agreement_suspect").iter_rows(named=True):
            for name in row["agreement_suspect"].split(", "):
                found.setdefault(name, []).append(row["step"])
    return found


def _still(source: Any) -> set[int]:
    """The steps that certainly changed no weight."""
    steps = getattr(source, "steps", None)
    return set() if steps is None else unchanged(steps, (getattr(source, "recipe", None) or {}).get("train") or {})


class LogprobDelta(LiveView):
    """Trainer - sampler log-prob per sampled token. `source` is a run (anything with `.logprobs()`) or such a frame.

    A ledger has no log-probs and gives an empty view that says so.
    """

    def __init__(self, source: Any, *, vocabulary: Vocabulary | None = None) -> None:
        self.source = None if isinstance(source, pl.DataFrame) else source
        served = getattr(source, "served", False)
        self.why_empty = "a served run trains nothing, so nothing is scored again"
        self.why_empty = self.why_empty if served else f"no token has been trained on{markup.yet(source)}"
        if isinstance(source, pl.DataFrame):
            frame = source
        elif hasattr(source, "logprobs"):
            frame = source.logprobs()
        else:
            check_run(source, "LogprobDelta", "calls", "a run or a frame")
            frame, self.why_empty = pl.DataFrame(schema=LOGPROB_DTYPES), "a ledger holds no tokens and no log-probs"
        self.tokens = frame.drop_nulls(["logprob", "trainer_logprob"])
        if vocabulary is None and hasattr(source, "vocabulary"):
            try:
                vocabulary = source.vocabulary()
            except RunStoreError:
                vocabulary = None
        self.vocabulary = vocabulary
        self.finite = self.tokens.filter(pl.all_horizontal(pl.col("logprob", "trainer_logprob", "delta").is_finite()))
        self.nonfinite = self.tokens.height - self.finite.height
        """Tokens of which one side said NaN or infinity: named, listed first, and in none of the numbers."""
        if self.nonfinite == self.tokens.height > 0:
            self.why_empty = f"none of {self.tokens.height:,} sampled tokens has a finite log-prob on both sides"
        self.delta_T = self.finite["delta"].to_numpy()
        self.equal = at_equal_weights(self.finite, _still(source))
        """Tokens that were scored by the very weights that sampled them: like compared with like."""
        self.numbers = delta_numbers(self.delta_T)
        self.verdicts: list[Verdict] = examine(*by_rollout(self.finite), reach=_REACH)
        self.shift = int(self.verdicts[0].evidence.get("shift", 0))
        self.suspects = _suspects(source)
        self.unrecorded = _unrecorded(source, self.tokens)
        self.left_out = _left_out(source)

    def sentence(self) -> str:
        n = self.numbers
        if n.tokens == 0:
            return f"Log-prob delta · {self.why_empty}{f' · {self.left_out}' if self.left_out else ''}"
        found = "in place" if self.shift == 0 else f"SHIFTED BY {self.shift:+d}"
        equal = f"{delta_numbers(self.equal['delta'].to_numpy()).mean_abs:.4f}" if self.equal.height else "none"
        equal = "all" if self.equal.height == n.tokens else equal
        lost = f" · {self.nonfinite:,} more NOT FINITE" if self.nonfinite else ""
        lost += f" · {self.left_out}" if self.left_out else ""
        return (
            f"Log-prob delta · {n.tokens:,} sampled tokens · mean |Δ| {n.mean_abs:.4f} ({equal} at equal weights) · "
            f"p99 {n.p99_abs:.3f} · max {n.max_abs:.3f} nat · positions {found}{lost}"
        )

    def draw(self) -> Figure:
        if self.numbers.tokens == 0:
            figure, (empty,) = panels(0.9)
            say_nothing_to_show(empty, self.why_empty)
            return figure
        figure, (spread, place) = panels(5.6, rows=2)
        edges, counts = self.histogram(self.delta_T)
        centres = (edges[:-1] + edges[1:]) / 2
        width = edges[1] - edges[0]
        below = centres < 0
        spread.bar(centres[below], counts[below], width=width, color=BLUE)
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
        spread.set_title("Δ = trainer − sampler", pad=_ABOVE)
        spread.set_xlabel("nat; both ends gather what lies beyond; dashed: the mean")
        spread.set_ylabel("tokens (log scale)")
        for x, side, words in ((0.0, "left", "← trainer less likely"), (1.0, "right", "trainer more likely →")):
            spread.text(x, 1.02, words, transform=spread.transAxes, ha=side, va="bottom", fontsize=SMALL)

        parts = self.by_version()
        # As many as can be told apart; of more, the oldest and the newest ones.
        drawn = parts if len(parts) <= len(SERIES) else [*parts[:3], *parts[3 - len(SERIES) :]]
        for k, (label, part) in enumerate(drawn):
            at, mean_abs = self.by_place(part)
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
        some = "" if len(drawn) == len(parts) else f"; {len(drawn) - 1} of {len(parts) - 1:,} weight versions"
        place.set_title(f"mean |Δ| by place{some}")
        place.set_xlabel(
            "sampled token of the row; v: weight version" if len(parts) > 1 else "sampled token of the row"
        )
        place.set_ylabel("nat")
        place.set_ylim(0, place.get_ylim()[1] * 1.05)  # whole marks, also of the highest
        legend_under_title(place, columns=len(SERIES))
        return figure

    def histogram(self, delta_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """61 equal ranges (62 edges, nat) about 0 and the tokens in each; the two ends gather what lies beyond."""
        limit = max(float(np.quantile(np.abs(self.delta_T), 0.995)), 1e-6) * 1.25
        edges = np.linspace(-limit, limit, 62)
        # In float64 as the edges are: a limit that is rounded to float32 may lie beyond the last of them.
        counts, _ = np.histogram(np.clip(delta_T.astype(np.float64), -limit, limit), bins=edges)
        return edges, counts

    def by_version(self) -> list[tuple[str, pl.DataFrame]]:
        """All tokens, then (where there are several) those of each weight version, oldest first."""
        versions = self.finite["weight_version"].unique().sort().to_list()
        parts = [("all", self.finite)]
        if len(versions) > 1:
            parts += [(f"v{v}", self.finite.filter(pl.col("weight_version").eq_missing(v))) for v in versions]
        return parts

    def parts(self) -> list[tuple[str, pl.DataFrame]]:
        """What has numbers of its own: all tokens, those at equal weights where there are others too, and versions."""
        every, *versions = self.by_version()
        equal = [("equal weights", self.equal)] if 0 < self.equal.height < self.finite.height else []
        return [every, *equal, *versions]

    def by_place(self, tokens: pl.DataFrame, bins: int = 8) -> tuple[list[float], list[float]]:
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
        rows = self._numbers_rows()
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
        parts.append(markup.legend(_MEANINGS))
        parts.append(markup.line(self._said_of_equal(), muted=True))
        parts += [markup.line(self.unrecorded, muted=True)] if self.unrecorded else []
        for verdict in self.verdicts:
            words = f"{LABELS[verdict.name]}: {verdict.words}"
            parts.append(markup.line(words, strong=verdict.found, muted=verdict.state == "unknown"))
        for name, steps in self.suspects.items():
            parts.append(markup.line(f"{SUSPICIONS.get(name, name)} ({markup.steps(steps)}).", strong=True))
        count = self.tokens.height
        parts.append(markup.line(f"The {min(WORST, count)} largest differences, of {count:,} tokens"))
        parts.append(
            markup.table(("Δ", "sampler", "trainer", "rollout", "position", "token", "before it"), self._worst())
        )
        return markup.block(*parts)

    def _said_of_equal(self) -> str:
        meaning = "scored by the very weights that sampled them, so that number formats alone are left"
        others = self.finite.height - self.equal.height
        older = self.equal.height - at_equal_weights(self.equal).height
        same = f" {older:,} of them were sampled a version or more earlier, and no step in between changed a weight."
        same *= older > 0
        if not others:
            return f"All tokens are at equal weights: {meaning}.{same}"
        steps = f"{markup.count(others, 'token')} {_CAN_DIFFER}"
        if not self.equal.height:
            return f"No token is at equal weights ({meaning}): {steps}."
        return f"At equal weights: {markup.count(self.equal.height, 'token')}, {meaning}.{same} The other {steps}."

    def _numbers_rows(self) -> list[list[markup.Cell | str]]:
        rows = [(name, delta_numbers(part["delta"].to_numpy())) for name, part in self.parts()]
        specs = {name: markup.one_format((getattr(n, name) for _, n in rows), ".5f") for name in _NUMBERS}
        return [
            [
                label,
                markup.Cell(f"{n.tokens:,}", right=True),
                *(markup.Cell(markup.number(getattr(n, name), spec), right=True) for name, spec in specs.items()),
            ]
            for label, n in rows
        ]

    def _worst(self) -> list[list[markup.Cell | str]]:
        return [
            [
                markup.Cell(f"{row['delta']:+.3f}", right=True, strong=True),
                markup.Cell(f"{row['logprob']:.3f}", right=True),
                markup.Cell(f"{row['trainer_logprob']:.3f}", right=True),
                row["rollout_id"],
                markup.Cell(str(row["position"]), right=True),
                row["text"],
                markup.Cell(row["before"], muted=True),
            ]
            for row in self.worst(WORST)
        ]

    def worst(self, count: int) -> list[dict[str, Any]]:
        """The `count` tokens with the largest |Δ|, those that have none in front: the frame's columns, `text`, and
        `before`, what precedes it in the row (in a bare frame, which holds sampled tokens only, as far as it goes)."""
        ranked = (
            self.tokens.with_row_index("at")
            .with_columns(pl.col("delta").abs().alias("size"))
            .sort(["size", "rollout_id", "position"], descending=[True, False, False])
            .head(count)
        )
        rows = ranked.to_dicts()
        if self.source is not None and hasattr(self.source, "ids_before"):
            preceding = self.source.ids_before([(row["rollout_id"], row["position"]) for row in rows], _CONTEXT)
        else:
            preceding = [self._sampled_before(row["at"]) for row in rows]
        for row, before in zip(rows, preceding, strict=True):
            text = self._text([row["token_id"]])
            row["text"], row["before"] = text if text.strip() else f'"{text}"', self._text(before)
        return rows

    def _sampled_before(self, at: int) -> list[int]:
        """The sampled ids that precede row `at` of the frame without a gap."""
        near = self.tokens.slice(max(0, at - _CONTEXT), min(at, _CONTEXT) + 1)
        rollouts, positions, ids = (near[name].to_list() for name in ("rollout_id", "position", "token_id"))
        last, end = near.height - 1, positions[-1]
        return [ids[k] for k in range(last) if rollouts[k] == rollouts[last] and positions[k] == end - last + k]

    def _text(self, token_ids: list[int]) -> str:
        if self.vocabulary is None:
            return " ".join(str(i) for i in token_ids)
        return "".join(piece.shown for piece in pieces_of(token_ids, self.vocabulary))

    def make_live(self) -> DeltaAndTokens:
        from workbench.inspect.live.delta import DeltaAndTokens

        return DeltaAndTokens(self)


def _unrecorded(source: Any, tokens: pl.DataFrame) -> str:
    """How many of the tokens are of steps that the other views do not show, since they have no line; empty for none."""
    steps = getattr(source, "steps", None)
    lines = tokens["step"] if steps is None else steps["step"]
    rest = tokens.filter(~pl.col("step").is_in(lines.unique().implode()))
    if rest.is_empty():
        return ""
    taken = markup.steps(sorted(rest["step"].unique()))
    return (
        f"Of all tokens {rest.height:,} are of {taken}, of which steps.jsonl has no line: they are in no view by step."
    )


def _left_out(source: Any) -> str:
    """The damaged parts whose tokens are in none of the numbers, by file; empty for none."""
    damaged = source.damaged_parts() if hasattr(source, "damaged_parts") else ()
    files = [f"{path.parent.name}/{path.name}" for path in damaged if path.parent.name in ("rows", "train")]
    if not files:
        return ""
    some = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
    return f"{markup.count(len(files), 'damaged part')} LEFT OUT ({some})"
