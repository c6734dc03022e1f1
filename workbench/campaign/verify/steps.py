"""Verify steps: what the logs and the trainer's parts say of groups and steps, recomputed from the verified rows.

In: what each group of a run gave when it was recomputed (`Recomputed`) and the events (`Told`). Out: differences. Of
every group: its line in groups.jsonl. Of every step: the trainer's record of each row (mask, difference),
advantages from rewards by the recipe's estimator, which tokens were in the loss and why others were not; and in its
line of steps.jsonl what rows and stored log-probs give: rewards, rates, votes, lag, ratio, clip, agreement, padding.
The code that computes them is the trainer's own. The rows of one step are in memory at a time.
Invariant: where a group or a record differs already, nothing that rests on it is a second difference.
Not here: what needs the model (log-probs, loss, gradient; `tools/recompute_run.py`, which shares no code with this),
and what is nowhere else (times, proofs).
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

from workbench.campaign.verify.compare import DOUBLE, SINGLE, changed, dotted
from workbench.campaign.verify.events import Told
from workbench.campaign.verify.report import VerifyReport
from workbench.errors import RunStoreError, TrainerError, WorkbenchError
from workbench.finalizer.messages import RowSummary
from workbench.finalizer.metrics import GroupMetrics
from workbench.runs.frames import read_parts, scan_lines
from workbench.runs.tokens import Deltas
from workbench.train.agreement import row_errors
from workbench.train.rows import TrainRow
from workbench.train.votes import DISAGREES, Ballot, cast_votes

_OF_THE_TRAINER = ("rows", "tokens", "sampled_tokens", "reward_mean", "valid_row_rate")
"""Values that the groups of a step give as well and the trainer says last: of its batch as it voted."""
_RETAKEN = "retaken_mean_abs_delta"
_ROW = (
    "rollout_id", "group_id", "index", "reward", "sample_mask", "reward_components", "weight_version_spans",
    "token_mask", "logprobs",
)  # fmt: skip
"""Columns of a row that its step is verified by."""


@dataclass
class Recomputed:
    """What the groups of a run hold and give: by rollout id the part that its row lies in, and of the groups in which
    nothing differs the metrics, and the line that they give. Of rows there is no more here than their ids."""

    run_dir: Path
    part_of: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, GroupMetrics] = field(default_factory=dict)
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    deltas: Deltas = field(default_factory=Deltas)
    """Of the trained tokens of verified steps."""

    def holds(self, group_id: str, metrics: GroupMetrics, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the verified rows of a group, without their tokens, and its calls give."""
        summaries = [{name: row[name] for name in RowSummary.model_fields} for row in rows]
        self.metrics[group_id] = metrics
        self.lines[group_id] = {
            "task_id": summaries[0]["task_id"] if summaries else None,
            **metrics.model_dump(mode="json"),
            **metrics.rates(),
            "rollouts": summaries,
        }

    def rows(self, rollout_ids: Sequence[str]) -> dict[str, TrainRow | None]:
        """The stored rows of these rollouts as they were trained; None for one that nobody could train on."""
        parts = dict.fromkeys(self.part_of[rollout_id] for rollout_id in rollout_ids if rollout_id in self.part_of)
        found: dict[str, TrainRow | None] = {}
        for name in parts:
            frame = read_parts("rows", [self.run_dir / "rows" / f"{name}.parquet"], _ROW)
            arrays = {column: frame[column] for column in ("token_mask", "logprobs")}
            for place, row in enumerate(frame.drop(arrays).iter_rows(named=True)):
                found[row["rollout_id"]] = _train_row(row | {name: array[place] for name, array in arrays.items()})
        return found


def _train_row(row: Mapping[str, Any]) -> TrainRow | None:
    try:
        logprobs_T = np.asarray(row["logprobs"], dtype=np.float32)
        return TrainRow(
            rollout_id=row["rollout_id"],
            group_id=row["group_id"],
            index=row["index"],
            reward=math.nan if row["reward"] is None else row["reward"],
            sample_mask=row["sample_mask"] == 1,
            token_ids=np.broadcast_to(np.int64(0), logprobs_T.shape),  # how many there are is all that counts here
            token_mask=np.asarray(row["token_mask"], dtype=bool),
            logprobs=logprobs_T,
            meta={name: orjson.loads(row[name] or "null") for name in ("reward_components", "weight_version_spans")},
        )
    except (TrainerError, ValueError, TypeError):
        return None  # such a row differs from what its receipt gives, and is named for that


def verify_group_lines(known: Recomputed, told: Told, report: VerifyReport) -> None:
    """Each line of groups.jsonl against what the group's calls, receipts and rows give, and the event of its start."""
    for line in scan_lines(known.run_dir / "groups.jsonl").rows:
        group_id = line.get("group_id", "")
        found = told.groups.get(group_id, {}) | known.lines.get(group_id, {})
        summaries = {row["rollout_id"]: row for row in found.pop("rollouts", ())}
        for what in changed(line, found):
            report.differs("groups.jsonl", None, None, f"group {group_id}: {what}")
        said = line.get("rollouts")
        if not summaries or said is None:
            continue
        named = [row.get("rollout_id") for row in said if isinstance(row, dict)] if isinstance(said, list) else said
        if named != list(summaries):
            what = f"group {group_id}: rollouts are {named!r}, recomputed {list(summaries)!r}"
            report.differs("groups.jsonl", None, None, what)
            continue
        for row, summary in zip(said, summaries.values(), strict=True):
            for what in changed(row, summary):
                report.differs("groups.jsonl", row["rollout_id"], None, f"group {group_id}: {what}")


def verify_step_lines(run_dir: Path, told: Told, report: VerifyReport) -> None:
    """What a line of steps.jsonl says that needs no rows: the weights that the step made are numbered as it is."""
    for line in scan_lines(run_dir / "steps.jsonl").rows:
        found = {"weight_version": line.get("step"), "groups_evicted": told.evicted[line.get("step", 0)]}
        for what in changed(line, found):
            report.differs("steps.jsonl", None, None, f"step {line.get('step')}: {what}")


def verify_steps(
    run_dir: Path, recipe: Mapping[str, Any], verified: set[str], known: Recomputed, told: Told, report: VerifyReport
) -> set[str]:
    """Every part of train/ against the rows, and against its line. A `verified` group without any row is named already.
    Returns the groups that were trained."""
    lines = {line.get("step"): line for line in scan_lines(run_dir / "steps.jsonl").rows}
    stored = Counter(known.part_of.values())
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
        rows = known.rows([record["rollout_id"] for record in part])
        _verify_records(file, whole, rows, report)
        if len(report.differences) == found and part:
            _Step(part, rows, recipe, known, told, report).verify(file, lines.get(part[0]["step"]))
    return groups


def _verify_records(
    file: str, part: list[dict[str, Any]], rows: Mapping[str, TrainRow | None], report: VerifyReport
) -> None:
    """The same rollouts, masks and lengths, and delta = trainer − sampler."""
    for record in part:
        if record["rollout_id"] not in rows:
            what: str | None = "there is no such row"
        else:
            row = rows[record["rollout_id"]]
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
        self, part: list[dict[str, Any]], rows: Mapping[str, TrainRow | None], recipe: Mapping[str, Any],
        known: Recomputed, told: Told, report: VerifyReport,
    ) -> None:  # fmt: skip
        self.part = part
        self.rows = rows
        self.told = told
        self.train: Mapping[str, Any] = recipe.get("train") or {}
        self.seed = recipe.get("seed") or 0
        self.known = known
        self.report = report
        self.number: int = part[0]["step"]
        self.trainer_NT = [np.asarray(record["trainer_logprobs"], dtype=np.float32) for record in part]

    def verify(self, file: str, line: Mapping[str, Any] | None) -> None:
        group_ids = list(dict.fromkeys(record["group_id"] for record in self.part))
        rows = [row for record in self.part if (row := self.rows.get(record["rollout_id"])) is not None]
        if len(rows) < len(self.part) or any(group_id not in self.known.metrics for group_id in group_ids):
            return
        self.report.steps += 1
        for record, row in zip(self.part, rows, strict=True):
            delta_T = np.asarray(record["delta"], np.float32)
            self.known.deltas.add(self.number, delta_T[row.loss_mask], row.versions[row.loss_mask])
        ballot = self._ballot(rows)
        if ballot is not None:
            for rollout_id, what in self._changed_votes(rows, ballot):
                self.report.differs(file, rollout_id, None, what)
        if line is not None:
            self._verify_line(line, group_ids, rows, ballot)

    def _verify_line(
        self, line: Mapping[str, Any], group_ids: list[str], rows: Sequence[TrainRow], ballot: Ballot | None
    ) -> None:
        total = sum((self.known.metrics[group_id] for group_id in group_ids), GroupMetrics())
        pooled = total.model_dump(mode="json") | total.rates() | {"group_ids": group_ids} | self._staleness(group_ids)
        # A line that a resume wrote of a step whose weights it could load has nothing of the trainer's.
        measured_by_trainer = "loss" in line or "token_lag_max" in line
        if measured_by_trainer:
            pooled = {name: value for name, value in pooled.items() if name not in _OF_THE_TRAINER}
        self._differs_in_line(line, pooled, DOUBLE)
        if ballot is None or not measured_by_trainer:
            return
        voted = ballot.metrics(rows) | {"optimizer_stepped": int(any(mask.any() for mask in ballot.masks))}
        self._differs_in_line(line, voted | self._cut(rows), DOUBLE)
        # A step that a resume took again has a line about log-probs that are not those of its part.
        if _RETAKEN not in line:
            measured = {name: value for name, value in self._measured(rows, ballot).items() if name not in voted}
            self._differs_in_line(dotted(line, "agreement"), dotted(measured, "agreement"), SINGLE)

    def _staleness(self, group_ids: Sequence[str]) -> dict[str, Any]:
        """Empty where a group has no version but that of its dispatch, which a resume does not know."""
        rows = [self.known.lines[group_id]["rollouts"] for group_id in group_ids]
        versions = [[v for row in group if (v := row["weight_version_min"]) is not None] for group in rows]
        return {"staleness_max": self.number - 1 - min(map(min, versions))} if all(versions) else {}

    def _cut(self, rows: Sequence[TrainRow]) -> dict[str, Any]:
        """How the batch was cut and padded; empty for a step before a resume, which may have had another bound."""
        from workbench.train.batch import padding_metrics

        bound = self.train.get("micro_batch_tokens")
        if not isinstance(bound, int) or self.number <= self.told.resumed_after:
            return {}
        return padding_metrics(rows, bound)

    def _differs_in_line(self, line: Mapping[str, Any], found: Mapping[str, Any], bound: float) -> None:
        for what in changed(line, found, bound):
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
            if not abs(was - now) <= DOUBLE * max(1.0, abs(now)):
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
        return step_metrics(config, rows, ballot, self.trainer_NT)


def _sorted_in_groups(rows: Sequence[TrainRow], values_N: np.ndarray) -> np.ndarray:
    out_N = values_N.copy()
    for group_id in dict.fromkeys(row.group_id for row in rows):
        members = [place for place, row in enumerate(rows) if row.group_id == group_id]
        out_N[members] = np.sort(values_N[members])
    return out_N
