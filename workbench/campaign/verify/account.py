"""Verify account: what a run says of itself as a whole, in its recipe, status, events, summary and vocabulary.

In: what its groups, lines and events gave. Out: differences for a file that a finished run has lost (for its summary
and its vocabulary a remark: a kill may have come before them), for an event that is there twice, and for a value that
other records of the run contradict. A recipe is compared with its digest, which the events hold, and with what was
sampled and trained by it; a vocabulary with the tokenizer beside the weights that the run published, where one is left.
Invariant: a summary is compared only where nothing else differs: it would differ for the same reason.
Not here: groups and steps (run, steps); whether the files can be read (logs).
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from workbench.campaign.run_place import is_held
from workbench.campaign.verify.compare import SINGLE, changed, dotted
from workbench.campaign.verify.events import Told
from workbench.campaign.verify.report import VerifyReport
from workbench.campaign.verify.steps import Recomputed
from workbench.errors import RunStoreError
from workbench.finalizer.metrics import GroupMetrics
from workbench.runs.condition import broken_recipe
from workbench.runs.frames import scan_lines
from workbench.runs.reader import Run
from workbench.runs.vocabulary import load_vocabulary

_NO_SUMMARY = (
    "summary.json: this file is missing and the run is done: it was removed, or the runner was killed before it wrote "
    "one. Next: restore it from a copy of the run; `workbench inspect` shows its numbers anew"
)
_NO_VOCABULARY = (
    "vocabulary.json: this file is missing and the run is done: it was removed, or its tokenizer could not be read. "
    "Next: restore it from a copy of the run; without it, and without weights/*/tokenizer.json, views show ids for text"
)
_NOT_OF_RECORDS = ("notebook", "html", "status", "error", "guessed", "nothing_learned", "seconds")
"""Of a summary: paths, times, and what is said in words of its version."""


def verify_account(
    run: Run, known: Recomputed, told: Told, report: VerifyReport, *, done: bool, trained: set[str]
) -> None:
    """All of it; `done`: the run came to its end; `trained`: the groups that steps were taken on."""
    if done:
        _verify_presence(run.path, told, report)
    lines = scan_lines(run.path / "steps.jsonl").rows
    for event in told.repeated:
        what = f"has the event {event.get('kind')} of {event['at']} another time, with the same fields"
        report.differs("events.jsonl", None, None, what)
    _verify_verdicts(known, told, report)
    if done and not run.served and lines:
        _verify_end(run, lines, known, told, trained, report)
    _verify_recipe(run, lines, known, told, report)
    _verify_vocabulary(run.path, report)
    if report.ok and not run.damage:
        _verify_summary(run, known, report)


def _verify_presence(run_dir: Path, told: Told, report: VerifyReport) -> None:
    # A runner writes environment.json first and the summary last, after its notebook has verified the run.
    has_runner, has_summary = ((run_dir / name).exists() for name in ("environment.json", "summary.json"))
    if has_runner and not has_summary and not is_held(run_dir):
        report.remarks.append(_NO_SUMMARY)
    has_rows = any((run_dir / "rows").glob("*.parquet"))
    if has_runner and has_rows and not (run_dir / "vocabulary.json").exists() and not is_held(run_dir):
        report.remarks.append(_NO_VOCABULARY)
    for name in ("status.json", "events.jsonl", *(["recipe.yaml"] if told.by_recipe else [])):
        if not (run_dir / name).exists():
            report.differs(name, None, None, "this file is missing and the run is done")


def _verify_verdicts(known: Recomputed, told: Told, report: VerifyReport) -> None:
    """What was said of a rollout when its group was finished is what its row says."""
    lines = {line.get("group_id") for line in scan_lines(known.run_dir / "groups.jsonl").rows}
    for group_id, line in known.lines.items():
        for row in line["rollouts"]:
            said = told.verdicts.get(row["rollout_id"])
            if said is None and row["cause"] is not None and group_id in lines & told.groups.keys():
                what = f"has no event rollout_rejected of it, cause {row['cause']!r}"
                report.differs("events.jsonl", row["rollout_id"], None, what)
            for what in changed(said or {}, row | {"group_id": group_id}):
                report.differs("events.jsonl", row["rollout_id"], None, what)


def _verify_end(
    run: Run, lines: list[dict[str, Any]], known: Recomputed, told: Told, trained: set[str], report: VerifyReport
) -> None:
    """The last status and the last event: where the run came to."""
    last = max(lines, key=lambda line: line.get("step") or 0)
    came_to = {"step": last.get("step"), "steps": last.get("step"), "weight_version": last.get("step")}
    status = came_to | {"status": "done", "reward_mean": last.get("reward_mean"), "groups": len(trained)}
    if told.resumed is not None:
        status["resumed"] = told.resumed
    finished = came_to | {"groups_replaced": told.kinds["group_replaced"]}
    if trained == known.metrics.keys():  # else what else was sampled is in these numbers too
        total = sum(known.metrics.values(), GroupMetrics())
        status |= {name: total.rates()[name] for name in ("token_in_rate", "token_in_rate_after_roots")}
        status["rejected"] = sum(total.rejections.values())
        finished["rejections"] = total.rejections
    for what in changed(run.status, status):
        report.differs("status.json", None, None, what)
    for what in changed(told.finished or {}, finished):
        report.differs("events.jsonl", None, None, f"the event finished: {what}")


def _verify_recipe(run: Run, lines: list[dict[str, Any]], known: Recomputed, told: Told, report: VerifyReport) -> None:
    path = run.path / "recipe.yaml"
    if not path.exists() or broken_recipe(run.path):
        return  # named already
    found: dict[str, Any] = {}
    if told.recipes and (digest := sha256(path.read_bytes()).hexdigest()) not in told.recipes:
        report.differs(path.name, None, None, f"its SHA-256 is {digest}, the events give {told.recipes[-1]}")
        return
    if told.finished is not None and "steps" in told.finished:
        found["train.steps"] = told.finished["steps"]
    per_step = Counter(len(line["group_ids"]) for line in lines if isinstance(line.get("group_ids"), list))
    rows = Counter(len(known.lines[group_id]["rollouts"]) for group_id in told.groups if group_id in known.lines)
    for name, counts in (("train.groups_per_step", per_step), ("train.rollouts_per_group", rows)):
        if len(counts) == 1:
            found[name] = next(iter(counts))
    for what in changed(dotted(run.recipe, "train"), found):
        report.differs(path.name, None, None, what)
    _verify_seed(run.recipe.get("seed"), told, report)


def _verify_seed(seed: Any, told: Told, report: VerifyReport) -> None:
    """The recipe's seed and a group's number give the seed of its task."""
    from workbench.campaign.environments import task_seed

    if not isinstance(seed, int):
        return
    for group_id, said in told.groups.items():
        number, was = group_id.removeprefix("g"), said.get("task_seed")
        if number.isdigit() and was is not None and was != (now := task_seed(seed, int(number))):
            what = f"seed is {seed}, which gives group {group_id} the task seed {now}, and its event has {was}"
            report.differs("recipe.yaml", None, None, what)
            return


def _verify_vocabulary(run_dir: Path, report: VerifyReport) -> None:
    """Each token is what the tokenizer beside the weights that the run published says it is."""
    path = run_dir / "vocabulary.json"
    if not path.exists():
        return
    try:
        stored = load_vocabulary(path)
        for published in sorted(run_dir.glob("weights/*/tokenizer.json"))[:1]:
            now = load_vocabulary(published)
            for kind, was, found in (("pieces", stored.pieces, now.pieces), ("special", stored.special, now.special)):
                for token_id, piece in was.items():
                    if piece != found.get(token_id):
                        what = f"{kind}.{token_id} is {piece!r}, the tokenizer gives {found.get(token_id)!r}"
                        report.differs(path.name, None, None, what)
    except RunStoreError as error:
        report.differs(path.name, None, None, str(error))


def _verify_summary(run: Run, known: Recomputed, report: VerifyReport) -> None:
    from workbench.campaign.report.notebook_file import Outcome
    from workbench.campaign.report.summary import summary_of

    path = run.path / "summary.json"
    if not path.exists():
        return
    try:
        stored = orjson.loads(path.read_bytes())
        if not isinstance(stored, dict):
            raise ValueError("expected an object")
    except ValueError as error:
        report.differs(path.name, None, None, f"is no summary ({error})")
        return
    notebook = run.path / "campaign.ipynb"
    summary = summary_of(run, notebook=notebook, outcome=Outcome("done"), seconds=0.0, deltas=known.deltas).as_dict()
    now = {name: value for name, value in summary.items() if name not in _NOT_OF_RECORDS}
    if stored.get("status") == "done":  # a campaign may be done and its notebook fail, and not the other way round
        now["status"] = run.status.get("status")
    for what in changed(stored, now, SINGLE):
        report.differs(path.name, None, None, what)
