"""Figures: a campaign over its steps, read from the run store.

`CaptureRate`: did the calls continue recorded prefixes, and how many rows of each step could be trained on.
`RewardCurve`: what the policy earned, every valid rollout a dot, the step's mean a line. Of a run that trained nothing,
as a served one, both show what was finalised.
Invariant: a rollout stands at the step that took it (`taken_step`), not at the one that it was sampled for.
Every number in a picture also stands in the table under it. Not here: causes (tables), log-probs (logprobs).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from workbench.inspect import html as markup
from workbench.inspect.ids import check_run
from workbench.inspect.snapshot import StaticView
from workbench.inspect.style import (
    BLUE,
    FAINT,
    INK,
    MUTED,
    REJECTED,
    SAMPLED,
    SMALL,
    legend_under_title,
    panels,
    say_nothing_to_show,
    step_ticks,
)
from workbench.runs.shelf import counted_calls

_SHOWN = 40
_LINE = 64
"""Characters that stand beside one another in a panel."""


class CaptureRate(StaticView):
    """token_in rate and valid rows over steps. `run` is anything with `.steps`, `.rollouts` and `.calls` frames."""

    def __init__(self, run: Any) -> None:
        check_run(run, "CaptureRate", "steps")
        rollouts: pl.DataFrame = run.rollouts
        self.unplaced = _unplaced(rollouts)
        calls = counted_calls(run)
        self.token_in = int((calls["mode"] == "token_in").sum())
        self.after_roots = calls.height - int((calls["mode"] == "text").sum())
        """Calls of the run's finalised rollouts that are no roots; `token_in` of them continue a recorded one."""
        self.only_roots = calls.height > 0 and not self.after_roots
        self.why_empty = markup.why_no_step(run)
        self.finalised, self.valid = rollouts.height, int((rollouts["sample_mask"] == 1).sum())
        rows = rollouts.group_by(pl.col("taken_step").alias("step")).agg(
            pl.len().cast(pl.Int64).alias("rows_seen"), (pl.col("sample_mask") == 1).sum().cast(pl.Int64).alias("valid")
        )
        self.steps = (
            run.steps.select("step", "token_in_rate", "token_in_rate_after_roots")
            .join(rows.drop_nulls("step"), on="step", how="left")
            .sort("step")
            .with_columns(pl.col("rows_seen", "valid").fill_null(0))
        )

    def sentence(self) -> str:
        if self.steps.is_empty():
            said = f" · {self.valid:,} of {markup.count(self.finalised, 'rollout')} valid" if self.finalised else ""
            return f"Capture over steps · {self.unplaced or self.why_empty}{said}"
        if self.unplaced:
            return f"Capture over {markup.count(self.steps.height, 'step')} · {self.unplaced}"
        rows, valid = int(self.steps["rows_seen"].sum()), int(self.steps["valid"].sum())
        recorded = self.after_roots and self.steps["token_in_rate_after_roots"].count()
        said = f"{self.token_in / self.after_roots:.4g} of the whole run" if recorded else "not recorded"
        if self.only_roots:
            said = "has nothing to measure: no call could continue an earlier one"
        return (
            f"Capture over {markup.count(self.steps.height, 'step')} · token_in_rate_after_roots {said} · "
            f"{valid:,} of {rows:,} rows valid"
        )

    def draw(self) -> Figure:
        steps = self.steps["step"].to_list()
        if not steps:
            figure, (empty,) = panels(0.9)
            say_nothing_to_show(empty, self.why_empty)
            return figure
        figure, (rates, rows) = panels(4.6, rows=2, height_ratios=[1.1, 1])
        for name, label, colour, marker, style in (
            ("token_in_rate_after_roots", "after roots", BLUE, "o", "-"),
            ("token_in_rate", "all calls (roots are text)", SAMPLED, "s", "--"),
        ):
            values = [np.nan if v is None else v for v in self.steps[name].to_list()]
            rates.plot(steps, values, color=colour, marker=marker, ls=style, lw=1.8, ms=5, label=label)
        rates.set_title("token_in rate: calls on an exact recorded prefix")
        rates.set_ylim(-0.04, 1.08)
        legend_under_title(rates)
        step_ticks(rates, steps)

        valid = np.array(self.steps["valid"].to_list())
        rejected = np.array(self.steps["rows_seen"].to_list()) - valid
        rows.bar(steps, valid, width=0.62, color=BLUE, label="valid row")
        thrown = rejected > 0  # a bar of no height would still have its red edge
        rows.bar(
            np.array(steps)[thrown],
            rejected[thrown],
            width=0.62,
            bottom=valid[thrown],
            facecolor="#faf3f6",
            edgecolor=REJECTED,
            hatch="////",
            label="placeholder, no vote" if thrown.any() else None,
            lw=0.8,
        )
        said = [f"{ok}/{ok + bad}" for ok, bad in zip(valid, rejected, strict=True)]
        if len(steps) * (1 + max(map(len, said))) <= _LINE:
            for step, count, words in zip(steps, valid + rejected, said, strict=True):
                rows.text(step, count, words, ha="center", va="bottom", fontsize=SMALL)
        rows.set_title("training rows")
        rows.set_xlabel("optimiser step")
        rows.set_ylim(0, max(1, int((valid + rejected).max())) * 1.18)
        legend_under_title(rows)
        step_ticks(rows, steps)
        return figure

    def html(self) -> str:
        rows = [
            [
                _number(row["step"], "d"),
                _number(row["token_in_rate"], ".4g"),
                _number(row["token_in_rate_after_roots"], ".4g"),
                _number(row["valid"], ",d"),
                _number(row["rows_seen"], ",d"),
            ]
            for row in self.steps.to_dicts()
        ]
        header = ("step", "token_in_rate", "after roots", "valid rows", "rows")
        table = [markup.table(header, rows)] if rows else []
        return markup.block(markup.line(self.sentence(), strong=True), *table)


class RewardCurve(StaticView):
    """Reward over steps: one dot a valid rollout, the mean as a line, one standard deviation as a band."""

    def __init__(self, run: Any) -> None:
        check_run(run, "RewardCurve", "rollouts")
        valid: pl.DataFrame = run.rollouts.filter(pl.col("sample_mask") == 1)
        self.unplaced = _unplaced(valid)
        taken = valid.drop_nulls("taken_step").with_columns(step=pl.col("taken_step"))
        self.rollouts = taken.drop_nulls("reward").sort("step", "group_id", "index")
        self.yet = markup.yet(run)
        self.untrained = valid.clear() if taken.height or self.unplaced else valid.select("rollout_id", "reward")
        """Valid rollouts of a run of which no step has trained any; their reward is null where none was given."""
        placed, self.waiting = taken.height, valid.height - taken.height
        self.unrewarded = f"{markup.count(placed, 'valid rollout')}, and no reward was given" if placed else ""
        """What is said of a run that trained rollouts none of which has a reward."""
        self.taken_steps = taken["step"].unique().to_list()
        """Steps that were taken, with a reward or without: those with a line, and where there are no lines those that
        took a valid rollout."""
        self.steps = (
            self.rollouts.group_by("step")
            .agg(
                pl.col("reward").mean().alias("mean"),
                pl.col("reward").std(ddof=0).alias("std"),
                pl.col("reward").max().alias("best"),
                pl.len().cast(pl.Int64).alias("rows"),
            )
            .sort("step")
        )
        if (lines := getattr(run, "steps", None)) is not None:
            # The step's own mean leaves out who had no vote in it.
            known = lines.select("step", voted="reward_mean")
            self.taken_steps = sorted({*self.taken_steps, *lines["step"].to_list()})
            self.steps = self.steps.join(known, on="step", how="left", maintain_order="left")
            self.steps = self.steps.with_columns(pl.coalesce("voted", "mean").alias("mean")).drop("voted")

    def sentence(self) -> str:
        if self.untrained.height:
            rewards = self.untrained["reward"].drop_nulls().to_numpy()
            mean = f"mean {rewards.mean():.3f} of {rewards.size:,} with a reward" if rewards.size else "no reward given"
            return f"Reward · {markup.count(self.untrained.height, 'valid rollout')}, none trained · {mean}"
        if self.steps.is_empty():
            return f"Reward over steps · {self.unplaced or self.unrewarded or f'no valid rollout{self.yet}'}"
        rewarded, every = self.steps["step"].to_list(), self.taken_steps
        without = [step for step in every if step not in rewarded]
        over = f"{len(rewarded)} of {markup.count(len(every), 'step')}" if without else markup.count(len(every), "step")
        told = [
            f"{mean:.3f} {words if step == end else f'in step {step}'}"
            for step, mean, end, words in (
                (rewarded[0], self.steps["mean"][0], every[0], "at the first"),
                (rewarded[-1], self.steps["mean"][-1], every[-1], "at the last"),
            )
        ]
        means = ", ".join(told) if len(rewarded) > 1 else f"{self.steps['mean'][0]:.3f}"
        means += f" in step {rewarded[0]}" * (len(rewarded) == 1 and bool(without))
        none = f" · no valid reward in {markup.steps(without)}" if without else ""
        waiting = f", {self.waiting:,} more in no recorded step" if self.waiting else ""
        return (
            f"Reward over {over} · mean {means}{none} · {markup.count(self.rollouts.height, 'valid rollout')}{waiting}"
        )

    def draw(self) -> Figure:
        steps = self.steps["step"].to_list()
        if not steps:
            return self._draw_untrained()
        figure, (ax,) = panels(3.1)
        mean, std = self.steps["mean"].to_numpy(), self.steps["std"].to_numpy()
        xs: list[float] = []
        for rows in self.steps["rows"].to_list():
            xs.extend(np.linspace(-0.24, 0.24, rows) if rows > 1 else [0.0])
        base = np.repeat(steps, self.steps["rows"].to_list())
        ax.fill_between(steps, mean - std, mean + std, color=FAINT, alpha=0.35, lw=0, label="± one std")
        ax.scatter(
            base + np.array(xs),
            self.rollouts["reward"].to_numpy(),
            s=13,
            facecolor="none",
            edgecolor=MUTED,
            lw=0.7,
            label="one rollout",
        )
        ax.plot(steps, mean, color=BLUE, marker="o", lw=2.2, ms=5.5, label="mean of valid rows")
        for step, value in ((steps[0], mean[0]), (steps[-1], mean[-1])):
            ax.annotate(
                f"{value:.3f}",
                (step, value),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=SMALL,
                weight="bold",
                color=INK,
            )
        ax.set_title("reward")
        ax.set_xlabel("optimiser step")
        legend_under_title(ax)
        step_ticks(ax, steps)
        return figure

    def _draw_untrained(self) -> Figure:
        """A dot a valid rollout, in their order; a sentence where there is none with a reward."""
        rewards = self.untrained["reward"].to_list()
        if all(reward is None for reward in rewards):
            figure, (ax,) = panels(0.9)
            said = f"{markup.count(len(rewards), 'valid rollout')}, and no reward was given" if rewards else ""
            nothing = self.unplaced or self.unrewarded or f"no valid rollout has been finalised{self.yet}"
            say_nothing_to_show(ax, said or nothing)
            return figure
        figure, (ax,) = panels(3.1)
        at = list(range(1, len(rewards) + 1))
        values = [np.nan if reward is None else reward for reward in rewards]
        ax.scatter(at, values, s=22, facecolor="none", edgecolor=BLUE, lw=1.2)
        ax.set_title("reward of each valid rollout; none was trained")
        ax.set_xlabel("rollout, in the order of the table")
        step_ticks(ax, at)
        return figure

    def html(self) -> str:
        if self.untrained.height:
            shown = [
                [row["rollout_id"], _number(row["reward"], ".3f")] for row in self.untrained.head(_SHOWN).to_dicts()
            ]
            parts = [markup.line(self.sentence(), strong=True), markup.table(("rollout", "reward"), shown)]
            if self.untrained.height > _SHOWN:
                parts.append(markup.line(f"The first {_SHOWN} of {self.untrained.height:,}", muted=True))
            return markup.block(*parts)
        rows = [
            [
                _number(row["step"], "d"),
                _number(row["mean"], ".3f"),
                _number(row["std"], ".3f"),
                _number(row["best"], ".3f"),
                _number(row["rows"], ",d"),
            ]
            for row in self.steps.to_dicts()
        ]
        header = ("step", "mean", "std", "best", "valid rows")
        table = [markup.table(header, rows)] if rows else []
        return markup.block(markup.line(self.sentence(), strong=True), *table)


def _unplaced(rollouts: pl.DataFrame) -> str:
    """What is said instead of numbers by step where rollouts were trained and steps.jsonl names none of them, as where
    a step was cut short; else empty."""
    trained = 0 if "trained_step" not in rollouts.columns else int(rollouts["trained_step"].count())
    if not trained or rollouts["taken_step"].count():
        return ""
    return f"no line of steps.jsonl names any of {markup.count(trained, 'trained rollout')}"


def _number(value: float | int | None, spec: str) -> markup.Cell:
    """A number cell; a value that nobody recorded is a grey dash, not a zero."""
    if value is None:
        return markup.Cell("–", right=True, muted=True)
    return markup.Cell(markup.number(value, spec), right=True)
