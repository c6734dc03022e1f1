"""Reader: a run directory as Polars frames, while it is being written, after it ended, after it crashed.

    run = open("reports/first")         run.campaign  run.steps  run.groups  run.rollouts  run.calls  run.events
    run.tokens(rollout_id)              one row a token of the trained row (or of the path to one call)
    run.logprobs()                      one row a sampled token that was trained on, sampler beside trainer
    run.receipt(rollout_id)             the receipt as a wire record

Invariants: ids are in every row of every frame; a frame is read again only when its files have changed; a
reader never writes into a run. A part that is there is whole (the writer renames). A line or a part that cannot be read
costs itself and not the sight of the others, and `run.damage` (and the run's own sentence) says that it is missing.
Frames of things hold no token arrays; those come on demand.
Not here: reading and keeping files (files), which columns there are (schema, frames), foreign ledgers (foreign),
proving digests (campaign.verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import orjson
import polars as pl

from workbench.errors import RunStoreError
from workbench.runs import frames
from workbench.runs.condition import (
    broken_recipe,
    broken_status,
    is_being_written,
    read_recipe,
    read_status,
    state_of,
)
from workbench.runs.custody import Ledgers, holds_records, is_ledger, known_calls, ledger_files
from workbench.runs.damage import in_short, lost_log, torn_lines
from workbench.runs.files import RunFiles
from workbench.runs.finding import find, is_run, no_run
from workbench.runs.gradient import learned_nothing
from workbench.runs.refused import is_cut, refused_frame
from workbench.runs.staged import staged_call
from workbench.runs.tokens import call_path_tokens, row_tokens, sampled_logprobs
from workbench.runs.trained import trained_steps, with_steps
from workbench.runs.vocabulary import Vocabulary, load_vocabulary, vocabulary_file
from workbench.wire import RolloutReceipt, StagedCall

_JOURNALS = ("steps", "groups", "events")

# A valid row without a receipt's terminal was echoed: there was nothing to verify it by.
_IS_VERIFIED = ((pl.col("sample_mask") == 1) & pl.col("terminal_selection").is_not_null()).fill_null(False)


def open(path: str | PathLike[str]) -> Run:
    """The run in a directory; a relative path is looked for from here upwards, a bare name in reports/ too.

    Raises RunStoreError when there is no run; an unfinished or crashed one opens.
    """
    directory = find(path, holds_records)
    if is_run(directory):
        return Run(directory)
    if is_ledger(directory):
        raise RunStoreError(
            f"{directory} holds ledgers and no run: open it with workbench.runs.open_ledger({str(directory)!r})"
        )
    raise RunStoreError(no_run(directory))


class Run:
    """One campaign on disk. Cheap to make; every attribute reads what it needs when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = RunFiles(path)
        self._ledgers = Ledgers(path / "ledger")

    @property
    def name(self) -> str:
        """The run's name, the first part of every rollout id."""
        return str(self.status.get("run") or self.path.name)

    def __repr__(self) -> str:
        row = self.campaign.row(0, named=True)
        counts = {"calls": self.calls.height} if self.served else {"steps": row["steps"]}
        counts["groups"] = row["groups"]
        did = " · ".join(f"{many} {name[:-1] if many == 1 else name}" for name, many in counts.items())
        version = "" if row["weight_version"] is None else f" · weight version {row['weight_version']}"
        learned = " · NOTHING LEARNED" if learned_nothing(self.steps, self.rollouts) else ""
        return (
            f"{'Served run' if self.served else 'Run'} {row['run']} · {row['state']} · {did} · "
            f"{row['valid_rollouts']} of {row['rollouts']} rollouts valid{version}{learned}"
            f"{in_short(self.damage, self.path)}"
        )

    @property
    def damage(self) -> list[str]:
        """One sentence for each line, part and log of the run that could not be read, with its place; usually none.

        The line that a running campaign is just writing does not count, and of a part only what was read of it: token
        arrays are on demand (`workbench verify` reads everything).
        """
        told = [words for name in _JOURNALS for words in self._files.scanned(name).broken]
        told += broken_status(self.path)
        if self._stored_recipe() is None:
            told += broken_recipe(self.path)
        told += self._ledgers.broken()
        if not is_being_written(self.path):
            files = [self.path / f"{name}.jsonl" for name in _JOURNALS] + ledger_files(self.path / "ledger")
            told += self._files.kept("torn", files, lambda: torn_lines(files)) + self._lost_logs()
        return told + [str(error) for error in self.damaged_parts().values()]

    def damaged_parts(self) -> dict[Path, RunStoreError]:
        """By path why a part of rows, calls or train could not be read; usually none."""
        _ = self.rollouts
        self._files.scalars("calls")
        return self._files.damaged.there()

    def unread(self, rollout_id: str) -> dict[str, RunStoreError]:
        """By table (rows, calls, train) the damaged part that holds something of a rollout; usually none."""
        if not (damaged := self.damaged_parts()):
            return {}
        known = [self.rollouts.select("rollout_id", "group_id"), self.calls.select("rollout_id", "group_id")]
        group = dict(pl.concat(known).drop_nulls().iter_rows()).get(rollout_id)
        step = next(
            (row.get("step") for row in self._files.lines("steps") if group in (row.get("group_ids") or ())), None
        )
        parts = {"rows": group, "calls": group, "train": f"step-{step}"}
        own = {table: self.path / table / f"{part}.parquet" for table, part in parts.items()}
        return {table: damaged[path] for table, path in own.items() if path in damaged}

    # -- frames ------------------------------------------------------------------------------------------------

    @property
    def campaign(self) -> pl.DataFrame:
        """One row: the run as a whole (columns of table `campaigns`)."""
        recipe, steps = self.recipe, self.steps
        rollouts, events = self.rollouts, self._files.lines("events")
        state, error = state_of(self.path)
        times = [event["at"] for event in events if isinstance(event.get("at"), (int, float))]
        row = {
            "run": self.name,
            "path": str(self.path),
            "state": state,
            "error": error,
            "started_at": min(times, default=None),
            "finished_at": max(times, default=None) if state != "running" else None,
            "model": (recipe.get("model") or {}).get("path"),
            "environment": (recipe.get("environment") or {}).get("name"),
            "capture_enabled": (recipe.get("token_capture") or {}).get("enabled"),
            "steps": steps.height,
            "groups": rollouts["group_id"].n_unique(),
            "rollouts": rollouts.height,
            "valid_rollouts": int((rollouts["sample_mask"] == 1).sum()),
            "weight_version": steps["weight_version"].max(),
        }
        return frames.frame_of("campaigns", [row])

    @property
    def steps(self) -> pl.DataFrame:
        """One row an optimiser step, in order."""
        return self._files.kept("steps", [self.path / "steps.jsonl"], self._build_steps)

    @property
    def groups(self) -> pl.DataFrame:
        """One row a finalised group, in the order they were finalised. Where a run was stopped, those whose rows were
        stored and whose numbers had not come to the campaign yet are in `rollouts` alone."""
        return self._files.kept("groups", [self.path / "groups.jsonl"], self._build_groups)

    @property
    def rollouts(self) -> pl.DataFrame:
        """One row a finalised rollout, by group and index; placeholders have their cause."""
        paths = [*self._files.parts("rows"), *self._files.parts("train")]
        paths += [self.path / "groups.jsonl", self.path / "steps.jsonl"]
        return self._files.kept("rollouts", paths, self._build_rollouts)

    @property
    def calls(self) -> pl.DataFrame:
        """One row a model call: staged, failed and unresolved ones, of rollouts still in flight too."""
        # A diagnosis is written after the row that it is about.
        paths = [*self._files.parts("calls"), *self._ledgers.files(), self.path / "events.jsonl"]
        return self._files.kept("calls", paths, self._build_calls)

    @property
    def events(self) -> pl.DataFrame:
        """One row an event: `at` (Unix time, s), `kind`, and the event's own fields as JSON text."""
        name = self.name
        rows = [
            {
                "run": name,
                "at": event.get("at"),
                "kind": event.get("kind"),
                "fields": orjson.dumps({k: v for k, v in event.items() if k not in ("at", "kind")}).decode(),
            }
            for event in self._files.lines("events")
        ]
        return pl.DataFrame(
            rows, schema={"run": pl.String, "at": pl.Float64, "kind": pl.String, "fields": pl.String}, strict=False
        )

    @property
    def refused(self) -> pl.DataFrame:
        """One row a rollout and reason for which requests of its agent were refused; columns: `runs.refused`."""
        return refused_frame(self._files.lines("refused"), self.calls)

    @property
    def refused_cut(self) -> bool:
        """Whether more was refused than `refused` has, because the gateways' file of refusals was full."""
        return is_cut(self._files.lines("refused"))

    # -- on demand ---------------------------------------------------------------------------------------------

    def tokens(self, rollout_id: str, call_id: str | None = None) -> pl.DataFrame:
        """One row a token, in order: of the rollout's trained row, or of the path from its root to `call_id`.

        Columns: run, group_id, rollout_id, model_call_id, position, token_id (UInt64), sampled (bool), logprob (of
        the sampler, nat; 0 where not sampled), trainer_logprob, delta (trainer - sampler), advantage,
        weight_version; the trainer's three are null where it never saw the token. A rejected rollout's row is a
        placeholder, so without `call_id` the path to its terminal call, else to its last staged call, is given.
        Raises RunStoreError for an unknown rollout or call.
        """
        row = self._row("rows", rollout_id)
        if row is not None and call_id is None and row["sample_mask"] == 1:
            frame = row_tokens(row, self._row("train", rollout_id))
        else:
            calls = self._table("calls", rollout_id)
            if row is None and calls.is_empty():
                raise self._unknown(rollout_id)
            frame = call_path_tokens(rollout_id, calls.to_dicts(), call_id)
        return frame.select(pl.lit(self.name).alias("run"), pl.all())

    def logprobs(self) -> pl.DataFrame:
        """One row a sampled token of every trained row, sampler and trainer side by side.

        Columns: run, step, group_id, rollout_id, position, sampled_position (from 0, sampled tokens only), token_id,
        logprob, trainer_logprob, delta, weight_version.
        """
        paths = [*self._files.parts("rows"), *self._files.parts("train")]
        return self._files.kept(
            "logprobs",
            paths,
            lambda: sampled_logprobs(self.name, self._files.read("rows"), self._files.read("train")),
        )

    def ids_before(self, places: Sequence[tuple[str, int]], count: int) -> list[list[int]]:
        """The `count` ids before each place (rollout id, position) of a training row, carried ones too; fewer at its
        start, none for a rollout without a row."""
        rows = self._files.read("rows", ["rollout_id", "token_ids"])
        rows = rows.filter(pl.col("rollout_id").is_in([rollout_id for rollout_id, _ in places]))
        ids_of = dict(rows.iter_rows())
        return [ids_of.get(rollout_id, [])[max(0, at - count) : at] for rollout_id, at in places]

    def drift(self, rollout_id: str | None = None) -> pl.DataFrame:
        """One row an unresolved call: which call it nearly continues, the first item, place and token that differ.

        Columns and their nulls: `workbench.runs.drift.drift_frame`.
        """
        from workbench.runs.drift import drift_frame

        return drift_frame(self, rollout_id)

    def token_ids(self) -> set[int]:
        """Every token id that occurs in a stored call or row."""
        stored = [
            self._files.read(table, ["token_ids"])["token_ids"].explode().drop_nulls() for table in ("calls", "rows")
        ]
        return set(pl.concat(stored).unique().to_list())

    def receipt(self, rollout_id: str) -> RolloutReceipt:
        """The stored receipt. Raises RunStoreError when there is none (not finalised, or finalised without one)."""
        broken: list[str] = []
        for path in sorted((self.path / "receipts").glob("*.jsonl")):
            lines = frames.scan_lines(path)
            broken += lines.broken
            for row in lines.rows:
                receipt = row.get("receipt", row)
                if row.get("rollout_id") == rollout_id and receipt is not None:
                    return RolloutReceipt.model_validate(receipt)
        why = broken[0] if broken else "is it finalised?"
        raise RunStoreError(f"No receipt of rollout {rollout_id!r} in {self.path / 'receipts'}; {why}")

    def staged(self, rollout_id: str) -> list[StagedCall]:
        """The staged calls of a rollout as records, in manifest order; what never came back from staging is left out.

        Digests are as stored, unchecked. Raises RunStoreError for a rollout without stored calls.
        """
        calls = self._table("calls", rollout_id)
        if calls.is_empty():
            raise self._unknown(rollout_id)
        return [staged_call(row) for row in calls.sort("manifest_index").to_dicts() if row["staging"] == "fetched"]

    def vocabulary(self) -> Vocabulary:
        """The bytes behind the run's token ids: its own `vocabulary.json`, else a tokenizer beside its weights."""
        path = vocabulary_file(self.path)
        return self._files.kept(f"vocabulary {path}", [path], partial(load_vocabulary, path))

    @property
    def status(self) -> dict[str, Any]:
        """What the campaign last said of itself; `{}` before it has said anything."""
        return read_status(self.path)

    @property
    def served(self) -> bool:
        """Whether an agent of somebody's own was served here: there are rollouts and calls then, and no steps."""
        said = self.status.get("command") == "serve"
        return said or any(event.get("kind") == "serving" for event in self._files.lines("events"))

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as the run stored it; `{}` where it stored none that can be read."""
        return self._stored_recipe() or {}

    def _stored_recipe(self) -> dict[str, Any] | None:
        return self._files.kept("recipe", [self.path / "recipe.yaml"], lambda: read_recipe(self.path))

    def _lost_logs(self) -> list[str]:
        """One sentence for each log that names nothing of what was trained, where the run is done."""
        if self.status.get("status") != "done":
            return []
        trained = {
            "step": len(self._files.parts("train")),
            "group": self._files.scalars("train")["group_id"].n_unique(),
        }
        lost = [(self.path / f"{noun}s.jsonl", noun, many) for noun, many in trained.items() if many]
        return [f"{log}: {lost_log(log, noun, many)}" for log, noun, many in lost if not self._files.lines(f"{noun}s")]

    # -- reading -----------------------------------------------------------------------------------------------

    def _build_steps(self) -> pl.DataFrame:
        name = self.name  # read once, not once a row
        return frames.frame_of("steps", [{"run": name, **row} for row in self._files.lines("steps")])

    def _build_groups(self) -> pl.DataFrame:
        name = self.name  # read once, not once a row
        return frames.frame_of("groups", [{"run": name, **row} for row in self._files.lines("groups")])

    def _build_rollouts(self) -> pl.DataFrame:
        trained, masks = trained_steps(self._files.scalars("train"), self.path)
        self._files.damaged.note(masks.damaged)
        stored, lines = self._files.scalars("rows").sort("group_id", "index"), self._files.lines
        rows = with_steps(stored, lines("groups"), lines("steps"), trained)
        return rows.with_columns(run=pl.lit(self.name), verified=_IS_VERIFIED).select(*frames.polars_dtypes("rollouts"))

    def _build_calls(self) -> pl.DataFrame:
        stored: dict[str, dict[str, dict[str, Any]]] = {}
        for row in self._files.scalars("calls").to_dicts():
            stored.setdefault(row["rollout_id"], {})[row["model_call_id"]] = row
        recorded = self._ledgers.calls()
        group_of, name = self._groups_of_rollouts(), self.name
        rows = [
            call | {"run": name, "group_id": call.get("group_id") or group_of.get(rollout_id)}
            for rollout_id in sorted(recorded.keys() | stored.keys())
            for call in known_calls(recorded.get(rollout_id, []), stored.get(rollout_id, {}))
        ]
        return frames.frame_of("calls", rows)

    def _groups_of_rollouts(self) -> dict[str, str]:
        return {
            rollout_id: event["group_id"]
            for event in self._files.lines("events")
            if event.get("kind") == "group_started"
            for rollout_id in event.get("rollout_ids", ())
        }

    def _row(self, table: str, rollout_id: str) -> dict[str, Any] | None:
        found = self._table(table, rollout_id)
        return found.row(found.height - 1, named=True) if found.height else None

    def _table(self, table: str, rollout_id: str) -> pl.DataFrame:
        """The stored rows of one rollout, arrays included.

        Raises RunStoreError where its own part is damaged, but for the trainer's: nothing is known of the trainer then.
        """
        found = self._files.of_rollout(table, rollout_id)
        if found.is_empty() and table != "train" and (error := self.unread(rollout_id).get(table)):
            raise error
        return found

    def _unknown(self, rollout_id: str) -> RunStoreError:
        recorded = self.calls.filter(rollout_id=rollout_id).height
        if recorded:
            when = "yet" if is_being_written(self.path) else "and never was: the run ended before"
            return RunStoreError(
                f"Rollout {rollout_id} of run {self.name} is not finalised {when}; its {recorded:,} recorded "
                f"call{'' if recorded == 1 else 's'} can be seen (PrefixChain), its tokens are stored with its group"
            )
        known = self.rollouts["rollout_id"].to_list()
        some = f"for instance {', '.join(known[:3])}" if known else "none yet"
        if broken := self._ledgers.broken(rollout_id):
            return RunStoreError(f"Nothing of rollout {rollout_id} can be read: {broken[0]}")
        lost = "".join(f"; {error}" for error in list(self.damaged_parts().values())[:1])
        return RunStoreError(f"Run {self.name} has no rollout {rollout_id!r}; it has {len(known)}, {some}{lost}")
