"""Learning report: what several runs of one recipe and its controls show together, as three small files that are kept.

    python tools/learning_report.py reports/RUN … --control reports/RUN … --out reports/cpu_learns

In: runs that differ in their seed alone, and such whose advantages were shuffled. Out: `summary.json` (each step's mean
reward and the intervals), `README.md` (the same to read) and `learning.svg`. Exits 1 where the recipe did not learn, or
the control did. Not here: the statistics (workbench.campaign.report.learned).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from matplotlib.figure import Figure

from workbench import runs
from workbench.campaign.report.learned import SeedsRise, reward_rise, rise_over_seeds
from workbench.inspect.style import INK, MARKERS, MUTED, SERIES, house_style

SMOOTH = 5
"""Steps that a point of the picture averages; its first and last points average fewer."""


def read(folder: Path) -> dict[str, Any]:
    """One run: its seed, what it cost, and each step's mean reward. Exits where it has not come to its end."""
    run, recipe = runs.open(folder), yaml.safe_load((folder / "recipe.yaml").read_text())
    steps = run.steps
    if steps.height < recipe["train"]["steps"]:
        raise SystemExit(f"{folder} has taken {steps.height} of {recipe['train']['steps']} steps; wait for its end")
    # A step without a valid row has no reward.
    rewards = [None if value is None else round(value, 6) for value in steps["reward_mean"].to_list()]
    rise = reward_rise(rewards)
    if rise is None:
        raise SystemExit(f"{folder} has too few steps to have quarters")
    began, ended = run.campaign.select("started_at", "finished_at").row(0)
    return {
        "run": folder.name,
        "seed": recipe["seed"],
        "shuffled": recipe["train"]["advantage"]["shuffle"],
        "minutes": round((ended - began) / 60, 1),
        "rollouts": run.rollouts.height,
        "valid_row_rate": round(fmean(steps["valid_row_rate"].drop_nulls()), 4),
        "token_in_rate_after_roots": round(fmean(steps["token_in_rate_after_roots"].drop_nulls()), 4),
        "proof_mean_abs_delta_max": round(max(steps["proof_mean_abs_delta"].drop_nulls()), 4),
        "gen_kl_error_mean": round(fmean(steps["gen_kl_error"].drop_nulls()), 6),
        "rewards": rewards,
        "rise": {name: round(value, 4) for name, value in asdict(rise).items()},
        "recipe": recipe,
    }


def same_but_for_the_seed(played: list[dict[str, Any]]) -> None:
    """Exit unless the recipes differ in what names a run alone, so that the runs are samples of one thing."""

    def rest(recipe: dict[str, Any]) -> dict[str, Any]:
        train = recipe["train"] | {"advantage": recipe["train"]["advantage"] | {"shuffle": None}}
        own = ("seed", "name", "reports", "deadlines")
        return {name: value for name, value in (recipe | {"train": train}).items() if name not in own}

    if any(rest(run["recipe"]) != rest(played[0]["recipe"]) for run in played):
        raise SystemExit("the runs' recipes differ in more than seed, name and deadlines")


def each_seed_once(played: list[dict[str, Any]]) -> None:
    """Exit where a seed is there twice: it would count as a second sample and narrow the bounds."""
    seeds = [run["seed"] for run in played]
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        names = ", ".join(run["run"] for run in played if run["seed"] == twice[0])
        raise SystemExit(f"seed {twice[0]} is there more than once ({names}); a sample is a run with a seed of its own")


def picture(learned: list[dict[str, Any]], controls: list[dict[str, Any]], path: Path) -> None:
    with house_style():
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        axes = figure.subplots()
        marks = [*zip(SERIES, MARKERS, strict=False)][: len(learned)] + [(MUTED, "x")] * len(controls)
        for run, (colour, marker) in zip([*learned, *controls], marks, strict=True):
            rewards, shuffled = run["rewards"], run["shuffled"]
            steps = range(1, len(rewards) + 1)
            windows = [rewards[max(0, i - SMOOTH // 2) : i + SMOOTH // 2 + 1] for i in range(len(rewards))]
            smooth = [mean([value for value in window if value is not None]) for window in windows]
            points = [math.nan if value is None else value for value in rewards]
            axes.plot(steps, points, marker, color=colour, alpha=0.35, markersize=3, linestyle="")
            label = f"seed {run['seed']}" if not shuffled else "shuffled advantages" if run is controls[0] else None
            axes.plot(steps, smooth, color=colour, label=label, linestyle="--" if shuffled else "-", linewidth=1.8)
        axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1), title="Reward of each step")
        axes.legend(loc="center right", labelcolor=INK)
        axes.grid(axis="y")
        figure.savefig(path, metadata={"Date": None})


def of_one(rise: dict[str, float]) -> SeedsRise:
    """A single run's own rise in the form of several."""
    return SeedsRise(
        lower=rise["lower"], upper=rise["upper"], differences=(rise["difference"],), mean=rise["difference"]
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def page(summary: dict[str, Any]) -> str:
    """The README of the report."""
    seeds, recipe, control = summary["over_seeds"], summary["recipe"], summary["over_controls"]
    train, environment = recipe["train"], recipe["environment"]
    verdict = "it learned" if summary["learned"] else "it did not learn"
    rows = [
        f"| {'control, shuffled' if run['shuffled'] else 'seed'} {run['seed']} | {run['rise']['first']:.3f} "
        f"| {run['rise']['last']:.3f} | {run['rise']['difference']:+.3f} | {run['rise']['lower']:+.3f} "
        f"| {run['rise']['upper']:+.3f} | {run['rollouts']} | {run['minutes']:.0f} |"
        for run in [*summary["runs"], *summary["controls"]]
    ]
    lines = [
        f"# {recipe['name']}: does it learn?",
        "",
        f"{recipe['model']['path']} on `{environment['name']}` ({environment['options']}), {train['steps']} steps of "
        f"{train['groups_per_step']} groups × {train['rollouts_per_group']} rollouts, learning rate "
        f"{train['learning_rate']:g}.",
        "",
        "![mean reward of each step](learning.svg)",
        "",
        "| run | first quarter | last quarter | difference | lower 95 % | upper 95 % | rollouts | minutes |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"**Over seeds:** {seeds['mean']:+.3f}, one-sided 95 % bounds {seeds['lower']:+.3f} and {seeds['upper']:+.3f} "
        f"(Student's t over {len(seeds['differences'])} runs): {verdict}.",
        f"**Control:** {control['mean']:+.3f}, bounds {control['lower']:+.3f} and {control['upper']:+.3f} "
        f"({'Welch over the steps of one run' if len(control['differences']) == 1 else 'over runs'}): "
        f"{'flat' if summary['control_flat'] else 'not flat'}.",
        "",
        "The differences are last minus first quarter of the steps' mean rewards. A run's own bounds are Welch's t "
        "over its steps, which share their weights: under shuffled advantages these drift at random, so that the "
        "bounds of one run are too narrow. Those over seeds take each run as one sample. Times are those of a "
        "machine that others used too.",
        "",
        "Made by `python tools/learning_report.py`, from the numbers in `summary.json`.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--control", required=True, nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    asked = parser.parse_args()
    learned, controls = ([read(folder) for folder in folders] for folders in (asked.runs, asked.control))
    same_but_for_the_seed([*learned, *controls])
    if not all(run["shuffled"] for run in controls) or any(run["shuffled"] for run in learned):
        raise SystemExit("the control must have train.advantage.shuffle, and the others must not")
    each_seed_once(learned)
    each_seed_once(controls)
    seeds = rise_over_seeds([run["rewards"] for run in learned])
    if seeds is None:
        raise SystemExit("the spread between seeds needs at least two of them")
    recipe = learned[0]["recipe"]
    for run in [*learned, *controls]:
        del run["recipe"]
    over_controls = rise_over_seeds([run["rewards"] for run in controls]) or of_one(controls[0]["rise"])
    flat = over_controls.lower <= 0.0 <= over_controls.upper
    summary = {
        "learned": seeds.learned,
        "control_flat": flat,
        "over_seeds": asdict(seeds),
        "over_controls": asdict(over_controls),
        "runs": learned,
        "controls": controls,
        "recipe": {name: recipe[name] for name in ("name", "model", "sampling", "environment", "train")},
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (asked.out / "README.md").write_text(page(summary))
    picture(learned, controls, asked.out / "learning.svg")
    print(page(summary))
    return 0 if seeds.learned and flat else 1


if __name__ == "__main__":
    sys.exit(main())
