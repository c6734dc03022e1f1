"""Verify steps: what the logs and the trainer's parts say of groups and steps, recomputed from the verified rows.

In: the rows of a run and what each group gave when it was recomputed (`Recomputed`). Out: differences. Of every group:
the counts and rates of its line in groups.jsonl. Of every step: the trainer's record of each row (mask, difference),
advantages from rewards by the recipe's estimator, which tokens were in the loss and why others were not; and in its
line of steps.jsonl what rows and stored log-probs give: rewards, rates, votes, lag, ratio and clip. The code that
computes them is the trainer's own.
Invariant: where a group or a record differs already, nothing that rests on it is a second difference.
Not here: what needs the model (log-probs, loss, gradient; `tools/recompute_run.py`, which shares no code with this),
and what is nowhere else (times, proofs, versions at dispatch).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from workbench.campaign.verify_report import VerifyReport
from workbench.errors import RunStoreError, TrainerError, WorkbenchError
from workbench.finalizer.metrics import GroupMetrics
from workbench.runs.frames import read_parts, scan_lines
from workbench.train.agreement import row_errors
from workbench.train.rows import TrainRow
from workbench.train.votes import DISAGREES, Ballot, cast_votes

_OF_THE_TRAINER = ("rows", "tokens", "sampled_tokens", "reward_mean", "valid_row_rate")
"""Values that the groups of a step give as well and the trainer says last: of its batch as it voted."""
_RETAKEN = "retaken_mean_abs_delta"
_DOUBLE, _SINGLE = 1e-9, 1e-6
"""Largest difference, relative to max(1, |value|): of what was computed in float64, and from float32 log-probs."""


@dataclass
class Recomputed:
    """What the groups of a run hold and give: by rollout id its row (None for one that nobody could train on) and the
    group that stored it, and the metrics of the groups in which nothing differs."""

    rows: dict[str, TrainRow | None] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, GroupMetrics] = field(default_factory=dict)

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the stored rows of a group for the step that trained them."""
        for row in rows:
            self.group_of[row["rollout_id"]] = row["group_id"]
            self.rows[row["rollout_id"]] = _train_row(row)


def _train_row(row: Mapping[str, Any]) -> TrainRow | None:
    try:
        return TrainRow(
            rollout_id=row["rollout_id"],
            group_id=row["group_id"],
            index=row["index"],
            reward=math.nan if row["reward"] is None else row["reward"],
            sample_mask=row["sample_mask"] == 1,
            token_ids=np.asarray(row["token_ids"], dtype=np.uint64).view(np.int64),
            token_mask=np.asarray(row["token_mask"], dtype=bool),
            logprobs=np.asarray(row["logprobs"], dtype=np.float32),
            meta={name: orjson.loads(row[name] or "null") for name in ("reward_components", "weight_version_spans")},
        )
    except (TrainerError, ValueError, TypeError):
        return None  # such a row differs from what its receipt gives, and is named for that


def verify_group_lines(run_dir: Path, known: Recomputed, report: VerifyReport) -> None:
    """The counts and rates of each line of groups.jsonl against those that the group's calls and receipts give."""
    for line in scan_lines(run_dir / "groups.jsonl").rows:
        metrics = known.metrics.get(line.get("group_id", ""))
        if metrics is not None:
            for what in _changed(line, metrics.model_dump(mode="json") | metrics.rates(), _DOUBLE):
                report.differs("groups.jsonl", None, None, f"group {line['group_id']}: {what}")


def verify_steps(
    run_dir: Path, recipe: Mapping[str, Any], verified: set[str], known: Recomputed, report: VerifyReport
) -> set[str]:
    """Every part of train/ against the rows, and against its line. A `verified` group without any row is named already.
    Returns the groups that were trained."""
    lines = {line.get("step"): line for line in scan_lines(run_dir / "steps.jsonl").rows}
    stored = Counter(known.group_of.values())
    groups: set[str] = set()
    for path in sorted((run_dir / "train").glob("*.parquet")):
        file = f"train/{path.name}"
        try:
            part = read_parts("train", [path]).to_dicts()
        except RunStoreError as error:
            report.differs(file, None, None, str(error))
            continue
        groups |= {record["group_id"] for record in part if record["group_id"]}
        found = len(report.differences)
        whole = [each for each in part if stored[each["group_id"]] or each["group_id"] not in verified]
        for group_id, many in Counter(record["group_id"] for record in whole).items():
            if many != stored[group_id]:
                amount = f"{many} records of group {group_id}, which has {stored[group_id]} rows"
                report.differs(file, None, None, amount)
        _verify_records(file, whole, known, report)
        if len(report.differences) == found and part:
            _Step(part, recipe, known, report).verify(file, lines.get(part[0]["step"]))
    return groups


def _verify_records(file: str, part: list[dict[str, Any]], known: Recomputed, report: VerifyReport) -> None:
    """The same rollouts, masks and lengths, and delta = trainer − sampler."""
    for record in part:
        if record["rollout_id"] not in known.rows:
            what: str | None = "there is no such row"
        else:
            row = known.rows[record["rollout_id"]]
            what = None if row is None else _record_fault(record, row)
        if what is not None:
            report.differs(file, record["rollout_id"], None, what)


def _record_fault(record: dict[str, Any], row: TrainRow) -> str | None:
    if record["sample_mask"] != row.sample_mask:
        return f"sample_mask is {record['sample_mask']}, the row's is {int(row.sample_mask)}"
    if not row.sample_mask:
        return None
    for name, values in (("log-probs", record["trainer_logprobs"]), ("mask entries", record["loss_mask"])):
        if len(values) != len(row.token_ids):
            return f"{len(values)} {name} for a row of {len(row.token_ids)} tokens"
    delta_T = np.asarray(record["trainer_logprobs"], np.float32) - row.logprobs
    off_T = np.abs(np.where(row.token_mask, delta_T, 0) - np.asarray(record["delta"], np.float32))
    if off_T.size and float(off_T.max()) > 1e-5:
        at = int(off_T.argmax())
        return f"delta at position {at} is {record['delta'][at]}, trainer - sampler gives {float(delta_T[at])}"
    return None


class _Step:
    """One step whose records fit their rows: what its ballot and its line must have been."""

    def __init__(
        self, part: list[dict[str, Any]], recipe: Mapping[str, Any], known: Recomputed, report: VerifyReport
    ) -> None:
        self.part = part
        self.train: Mapping[str, Any] = recipe.get("train") or {}
        self.seed = recipe.get("seed") or 0
        self.known = known
        self.report = report
        self.number: int = part[0]["step"]
        self.trainer_NT = [np.asarray(record["trainer_logprobs"], dtype=np.float32) for record in part]

    def verify(self, file: str, line: Mapping[str, Any] | None) -> None:
        group_ids = list(dict.fromkeys(record["group_id"] for record in self.part))
        rows = [row for record in self.part if (row := self.known.rows.get(record["rollout_id"])) is not None]
        if len(rows) < len(self.part) or any(group_id not in self.known.metrics for group_id in group_ids):
            return
        self.report.steps += 1
        ballot = self._ballot(rows)
        if ballot is not None:
            for rollout_id, what in self._changed_votes(rows, ballot):
                self.report.differs(file, rollout_id, None, what)
        if line is not None:
            total = sum((self.known.metrics[group_id] for group_id in group_ids), GroupMetrics())
            pooled = total.model_dump(mode="json") | total.rates() | {"group_ids": group_ids}
            # A line that a resume wrote of a step whose weights it could load has nothing of the trainer's.
            measured_by_trainer = "loss" in line or "token_lag_max" in line
            if measured_by_trainer:
                pooled = {name: value for name, value in pooled.items() if name not in _OF_THE_TRAINER}
            self._differs_in_line(line, pooled, _DOUBLE)
            if ballot is not None and measured_by_trainer:
                voted = ballot.metrics(rows)
                self._differs_in_line(line, voted, _DOUBLE)
                # A step that a resume took again has a line about log-probs that are not those of its part.
                if _RETAKEN not in line:
                    measured = {
                        name: value for name, value in self._measured(rows, ballot).items() if name not in voted
                    }
                    self._differs_in_line(line, measured, _SINGLE)

    def _differs_in_line(self, line: Mapping[str, Any], found: Mapping[str, Any], bound: float) -> None:
        for what in _changed(line, found, bound):
            self.report.differs("steps.jsonl", None, None, f"step {self.number}: {what}")

    def _ballot(self, rows: Sequence[TrainRow]) -> Ballot | None:
        """Who voted, and with what advantage, as the recipe says; None where that cannot be told."""
        advantage, old = self.train.get("advantage"), self.train.get("off_policy") or {}
        if not advantage:
            self._not_compared("recipe.yaml names no estimator")
            return None
        max_lag = old.get("max_lag")
        try:
            ballot = cast_votes(
                rows, version=self.number - 1, advantage=dict(advantage), off_policy=old.get("policy", "allow"),
                max_lag=self.train.get("max_staleness", 0) if max_lag is None else max_lag, shuffle_seed=self.seed,
            )  # fmt: skip
        except (WorkbenchError, KeyError, TypeError) as error:
            self._not_compared(str(error).rstrip("."))
            return None
        limit = (self.train.get("loss") or {}).get("max_mult_prob_error")
        if limit is not None:
            masks = [row.loss_mask for row in rows]
            for place, apart in enumerate(row_errors(self.trainer_NT, [row.logprobs for row in rows], masks)):
                if apart > limit and ballot.masks[place].any():
                    ballot.masks[place] = np.zeros_like(ballot.masks[place])
                    ballot.left_out[place] = DISAGREES
        return ballot

    def _not_compared(self, why: str) -> None:
        words = f"advantages and votes of the steps: not compared, {why}"
        if words not in self.report.not_compared:
            self.report.not_compared.append(words)

    def _changed_votes(self, rows: Sequence[TrainRow], ballot: Ballot) -> Iterator[tuple[str, str]]:
        stored_N = np.array([record["advantage"] for record in self.part], dtype=np.float64)
        now_N, note = ballot.advantages, ""
        if self.train["advantage"].get("shuffle"):
            # Which row got whose is drawn, and another NumPy may draw otherwise; what was handed out is the group's.
            stored_N, now_N, note = (*(_sorted_in_groups(rows, each) for each in (stored_N, now_N)), ", of the group's")
        for place, row in enumerate(rows):
            was, now = float(stored_N[place]), float(now_N[place])
            if not abs(was - now) <= _DOUBLE * max(1.0, abs(now)):
                name = self.train["advantage"]["name"]
                yield row.rollout_id, f"advantage is {was!r}, the rewards give {now!r} by {name}{note}"
            if self.part[place]["left_out"] != ballot.left_out[place]:
                yield row.rollout_id, f"left_out is {self.part[place]['left_out']!r}, not {ballot.left_out[place]!r}"
            held_T = np.asarray(self.part[place]["loss_mask"], dtype=bool)
            if held_T.size == ballot.masks[place].size and (at := np.flatnonzero(held_T != ballot.masks[place])).size:
                yield row.rollout_id, f"loss_mask differs at {at.size} positions, first at {at[0]}"

    def _measured(self, rows: Sequence[TrainRow], ballot: Ballot) -> dict[str, Any]:
        """What the trainer measured on stored log-probs: ratio, clip, agreement."""
        from workbench.train.record import step_metrics
        from workbench.train.settings import TrainerConfig

        clips = {name: self.train[name] for name in ("clip_low", "clip_high") if name in self.train}
        config = TrainerConfig("", "", tis_cap=(self.train.get("loss") or {}).get("tis_cap"), **clips)
        measured = step_metrics(config, rows, ballot, self.trainer_NT)
        del measured["agreement"]  # the evidence of agreement_suspect, in numbers of their own
        return measured


def _sorted_in_groups(rows: Sequence[TrainRow], values_N: np.ndarray) -> np.ndarray:
    out_N = values_N.copy()
    for group_id in dict.fromkeys(row.group_id for row in rows):
        members = [place for place, row in enumerate(rows) if row.group_id == group_id]
        out_N[members] = np.sort(values_N[members])
    return out_N


def _changed(line: Mapping[str, Any], found: Mapping[str, Any], bound: float) -> Iterator[str]:
    """The values of a line that are not what was recomputed; what an older line does not have is no difference."""
    for name, now in found.items():
        if name not in line:
            continue
        was = line[name]
        if isinstance(now, float) and not math.isfinite(now):
            now = None  # JSON knows no other word for it
        numbers = all(isinstance(value, int | float) for value in (was, now))
        if not (abs(was - now) <= bound * max(1.0, abs(now)) if numbers else _alike(was, now, bound)):
            yield f"{name} is {was!r}, recomputed {now!r}"


def _alike(was: Any, now: Any, bound: float) -> bool:
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and not any(_changed(was, now, bound))
    return bool(was == now)
