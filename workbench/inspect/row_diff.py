"""RowDiff: two rollouts token by token, or two runs rollout by rollout and then token by token.

    RowDiff(arm_a, arm_b)                                two runs, paired by task and seed
    RowDiff(run, run)                                    best and worst rollout of a group
    RowDiff(run, run, rollouts=("r.0.1.0", "r.0.2.0"))   two rollouts of one run, or of two
    RowDiff(tokens_a, tokens_b, vocabulary=…)            two token frames

Out: differences of the arms with intervals, the pairs whose verdict flips, and both token strips with the first
diverging id in the middle. Invariant: tokens are compared as ids; two rows with the same text and other ids differ, and
the view says where. Not here: how rows are aligned (`align`), how pairs are made and averaged (`arms`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.errors import RunStoreError
from workbench.inspect import html as markup
from workbench.inspect.align import Stretch, equal_stretches, first_difference
from workbench.inspect.arms import Difference, differences, flips, pair_up
from workbench.inspect.choose import telling_pair
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import LiveView
from workbench.inspect.style import CARRY, REJECTED, SERIES, SMALL, legend_under_title, panels
from workbench.inspect.token_strip import TokenStrip
from workbench.runs.vocabulary import Vocabulary

if TYPE_CHECKING:
    from workbench.inspect.live.diff import DiffWidget

AROUND = 60
_OWN = SERIES[4]
"""Not the orange of sampled tokens: own ids may be carried ones."""
_TRIES = 100


class RowDiff(LiveView):
    """Two rollouts side by side; with two runs also what differs between the arms.

    Without `rollouts` the pair shown first is the first flip that has tokens on both sides, else the first such pair
    whose rewards or lengths differ, else the first; of one run against itself the best and the worst rollout of
    `group`, else of the group whose rewards lie furthest apart. A rollout counts
    as solved from a reward of `solved` on. Raises RunStoreError where nothing can be paired.
    """

    def __init__(
        self,
        one: Any,
        other: Any,
        *,
        rollouts: tuple[str, str] | None = None,
        group: str | None = None,
        vocabulary: Vocabulary | None = None,
        solved: float = 0.5,
        max_flips: int = 20,
    ) -> None:
        for source in (one, other):
            if not isinstance(source, pl.DataFrame):
                check_run(source, "RowDiff", "rollouts", "a run or a frame")
        self.sources = (one, other)
        self.vocabulary = vocabulary
        self.solved = solved
        self.max_flips = max_flips
        self.pairs: pl.DataFrame | None = None
        self.flips: pl.DataFrame | None = None
        self.differences: list[Difference] = []
        self.unpaired = (0, 0)
        self.names: tuple[str, str]
        self.strips: tuple[TokenStrip, TokenStrip]
        frames = isinstance(one, pl.DataFrame), isinstance(other, pl.DataFrame)
        if any(frames) and not all(frames):
            raise RunStoreError("Expected two runs or two token frames, got one of each")
        if rollouts is not None and len(rollouts) != 2:
            raise RunStoreError(f"Expected two rollout ids, one of each side: rollouts=(…, …), got {rollouts!r}")
        if not all(frames) and rollouts is None and one is other:
            rollouts = telling_pair(one, group)
        if not all(frames) and (rollouts is None or one is not other):
            self._compare_arms(one.rollouts, other.rollouts, needed=rollouts is None)
        if rollouts is None and self.pairs is not None:
            self.names, self.strips = self._first_shown()
        else:
            self.names = rollouts or ("A", "B")
            self.strips = self.strips_of(*(rollouts or (None, None)))
        self.stretches, self.first = self.alignment(*self.strips)

    def _compare_arms(self, one: pl.DataFrame, other: pl.DataFrame, *, needed: bool) -> None:
        pairs = pair_up(one, other)
        if pairs.is_empty():
            if needed:
                raise RunStoreError(
                    f"No rollout of {one.height:,} and {other.height:,} has a partner: the arms share no task; run "
                    "both with the same seed and environment, or name two rollouts: RowDiff(a, b, rollouts=(…, …))"
                )
            return
        self.pairs, self.flips = pairs, flips(pairs, self.solved)
        self.differences = differences(pairs)
        self.unpaired = (one.height - pairs.height, other.height - pairs.height)

    def _first_shown(self) -> tuple[tuple[str, str], tuple[TokenStrip, TokenStrip]]:
        """The first flip, else the first pair that differs in numbers, else the first, of which both sides have tokens
        (a rejected rollout may have none)."""
        assert self.pairs is not None and self.flips is not None
        differ = pl.any_horizontal(
            pl.col(name).ne_missing(pl.col(f"{name}_other")) for name in ("reward", "tokens", "sampled_tokens")
        )
        votes = pl.col("valid") + pl.col("valid_other")
        both = self.pairs.sort(votes, differ, descending=True, maintain_order=True)
        candidates = pl.concat(frame.select("rollout_id", "rollout_id_other") for frame in (self.flips, both))
        problem: RunStoreError | None = None
        for one, other in candidates.head(_TRIES).rows():
            try:
                return (one, other), self.strips_of(one, other)
            except RunStoreError as error:
                problem = error
        raise RunStoreError(f"None of {candidates.height:,} pairs has tokens on both sides; the last one: {problem}")

    def strips_of(self, one: str | None, other: str | None) -> tuple[TokenStrip, TokenStrip]:
        """The strips of two rollouts, `one` of the first source; None for the only one of a token frame. Raises
        RunStoreError where one has no tokens."""
        first, second = self.sources
        return (
            TokenStrip(first, one, vocabulary=self.vocabulary),
            TokenStrip(second, other, vocabulary=self.vocabulary),
        )

    @staticmethod
    def alignment(one: TokenStrip, other: TokenStrip) -> tuple[list[Stretch], int | None]:
        """Equal stretches of two strips and the first diverging position; None for equal rows."""
        ids_one, ids_other = (strip.tokens["token_id"].to_numpy().astype(np.uint64) for strip in (one, other))
        return equal_stretches(ids_one, ids_other), first_difference(ids_one, ids_other)

    def diverging(self) -> pl.DataFrame:
        """The first diverging token of both rows, one row a side; none for equal rows, nulls where a row has ended.

        Columns: side (A or B), rollout_id, position, token_id, sampled, logprob.
        """
        columns = ("token_id", "sampled", "logprob")
        sides = []
        for letter, strip in zip("AB", self.strips, strict=True):
            if self.first is None:
                continue
            found = strip.tokens.slice(self.first, 1).select(columns)
            told = found.row(0, named=True) if found.height else dict.fromkeys(columns)
            sides.append({"side": letter, "rollout_id": strip.rollout_id, "position": self.first} | told)
        dtypes = {"side": pl.String, "rollout_id": pl.String, "position": pl.Int64, "token_id": pl.UInt64}
        return pl.DataFrame(sides, schema=dtypes | {"sampled": pl.Boolean, "logprob": pl.Float32})

    def sentence(self) -> str:
        one, other = self.strips
        parts = []
        if self.pairs is not None and self.flips is not None:
            parts.append(f"{markup.count(self.pairs.height, 'pair')} by task and seed")
            reward = self.differences[0]
            if reward.mean is not None:
                parts.append(f"reward {reward.mean:+.3f}{_interval(reward)}")
            parts.append(markup.count(self.flips.height, "flip"))
        parts.append(f"{one.rollout_id} against {other.rollout_id}")
        parts.append(f"{one.tokens.height:,} and {other.tokens.height:,} tokens")
        parts.append("equal" if self.first is None else f"first diverging id at {self.first:,}")
        return " · ".join(parts)

    def draw(self) -> Figure:
        """Both rows as bands on one scale: equal stretches hatched, own ids solid, the divergence a line."""
        figure, (ax,) = panels(2.2)
        longest = 1
        for y, strip, side in ((1, self.strips[0], 0), (0, self.strips[1], 1)):
            size = strip.tokens.height
            longest = max(longest, size)
            ax.barh(y, size, height=0.55, color=_OWN, lw=0)
            shown = sorted(self.stretches, key=lambda s: -s[2])[:400]
            spans = [(s[side], s[2]) for s in shown]
            ax.broken_barh(spans, (y - 0.275, 0.55), facecolor=CARRY, edgecolor="white", hatch="////", lw=0)
        if self.first is not None:
            ax.axvline(self.first, color=REJECTED, lw=1.6, ls="--")
        ax.set_yticks([1, 0], [f"A {self.strips[0].rollout_id}", f"B {self.strips[1].rollout_id}"], fontsize=SMALL)
        ax.set_xlim(0, longest)
        ax.grid(visible=False)
        ax.set_xlabel("position in the row")
        marks: list[Any] = [
            Patch(facecolor=CARRY, edgecolor="white", hatch="////", lw=0, label="the same ids in both"),
            Patch(facecolor=_OWN, lw=0, label="only in this row"),
        ]
        if self.first is not None:
            marks.append(Line2D([], [], color=REJECTED, lw=1.6, ls="--", label=f"first diverging id: {self.first:,}"))
        ax.set_title("A against B, id for id")
        legend_under_title(ax, columns=2, handles=marks)
        return figure

    def html(self) -> str:
        parts = [markup.line(self.sentence(), strong=True)]
        if self.pairs is not None and self.flips is not None:
            parts += self._arms_html(self.flips)
        for letter, strip in zip("AB", self.strips, strict=True):
            start = 0 if self.first is None else max(0, min(self.first, strip.tokens.height) - AROUND // 2)
            strip.start, strip.stop = start, min(strip.tokens.height, start + AROUND)
            words = f"{letter}: {strip.rollout_id} · {strip.custody.sentence()} · from token {start:,}"
            mark = None if self.first is None or self.first >= strip.tokens.height else self.first
            parts += [markup.line(words), strip.text_block(mark)]
        if self.first is not None:
            parts.append(markup.line(f"Boxed twice: the first diverging id, position {self.first:,}.", muted=True))
        return markup.block(*parts)

    def _arms_html(self, flipped: pl.DataFrame) -> list[str]:
        parts = [
            markup.table(
                ("metric", "pairs", "A", "B", "B − A", "95 % interval", "what it is"),
                [_difference_row(difference) for difference in self.differences],
            )
        ]
        if any(self.unpaired):
            parts.append(
                markup.line(f"Without a partner: {self.unpaired[0]:,} of A, {self.unpaired[1]:,} of B", muted=True)
            )
        shown = flipped.head(self.max_flips)
        if shown.height:
            header = ("task", "index", "A", "B", "reward A", "reward B", "what flipped")
            parts.append(markup.table(header, [_flip_row(row) for row in shown.to_dicts()]))
        if shown.height < flipped.height:
            parts.append(markup.line(f"Showing {shown.height} of {flipped.height:,} flips; all: .flips", muted=True))
        return parts

    def make_live(self) -> DiffWidget:
        from workbench.inspect.live.diff import DiffWidget

        return DiffWidget.of(self)


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return " (one task: no interval)"
    return f" [{difference.low:+.3f}, {difference.high:+.3f}]"


def _difference_row(d: Difference) -> list[markup.Cell | str]:
    if d.one is None or d.other is None or d.mean is None:
        return [d.metric, markup.Cell("0", right=True), *[markup.Cell("–", muted=True)] * 4, d.meaning]
    numbers = (f"{d.one:,.4g}", f"{d.other:,.4g}", f"{d.mean:+,.4g}")
    cells = [markup.Cell(text, right=True) for text in (f"{d.pairs:,}", *numbers)]
    return [d.metric, *cells, _interval(d).strip(), d.meaning]


def _flip_row(row: dict[str, Any]) -> list[markup.Cell | str]:
    rewards = ("–" if row[name] is None else f"{row[name]:g}" for name in ("reward", "reward_other"))
    left, right = (markup.Cell(text, right=True) for text in rewards)
    return [
        row["task_id"] or "–",
        markup.Cell(str(row["index"]), right=True),
        row["rollout_id"],
        row["rollout_id_other"],
        left,
        right,
        markup.Cell(row["what"], strong=True),
    ]
