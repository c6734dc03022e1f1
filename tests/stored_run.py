"""A stored run for tests: the real capture core, ledger, verifier and writers around a policy that is made up.

Tokens are bytes (ids 0-255), `<|im_start|>` is 256 and `<|im_end|>` 257, so texts can be read back and characters are
split over ids. Seeded: the same arguments give the same files. It has, on purpose: retries, side branches, an edited
history (unresolved), a log-prob that is NaN (capture failure), an answer cut by length.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from workbench.capture.core import CaptureCore
from workbench.capture.staging import MemorySink
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.metrics import pool_metrics
from workbench.finalizer.parts import write_group
from workbench.finalizer.rows import pack_row
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.runs.vocabulary import Vocabulary
from workbench.runs.writer import RunWriter, write_part
from workbench.train.rows import unpack_row
from workbench.train.votes import cast_votes
from workbench.wire import CallRecord, Cause, RolloutCommit

START, END = 256, 257
VOCABULARY = Vocabulary(
    pieces={byte: bytes([byte]) for byte in range(256)}, special={START: "<|im_start|>", END: "<|im_end|>"}
)


def encode(text: str) -> list[int]:
    """Bytes, with the two special tokens recognised."""
    ids: list[int] = []
    for part in text.replace("<|im_start|>", "\0S\0").replace("<|im_end|>", "\0E\0").split("\0"):
        ids.extend({"S": [START], "E": [END]}.get(part) or part.encode())
    return ids


@dataclass
class Rollout:
    """One rollout being played: its conversation, and the exact ids behind every call."""

    run: StoredRun
    rollout_id: str
    items: list[dict[str, Any]] = field(default_factory=list)
    ids: dict[str, list[int]] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)

    def call(self, answer: str, *, tail: str, finish: str = "stop", nan_at: int | None = None) -> str | None:
        """Play one call of the present conversation; returns its id, or None where it was not captured."""
        call_id = uuid.UUID(int=self.run.rng.getrandbits(128), version=4).hex
        admitted = self.run.ledger.admit(self.rollout_id, self.items, call_id)
        if admitted.admission is None:
            return None
        prefix = self.ids.get(admitted.admission.parent_call_id or "", [])
        prompt, sampled = [*prefix, *encode(tail)], encode(answer)
        logprobs = [-self.run.rng.gammavariate(0.7, 0.9) for _ in sampled]
        if nan_at is not None:
            logprobs[nan_at] = float("nan")
        active = self.run.core.begin(admitted.admission, prefix or None)
        coords = self.run.core.complete(
            active,
            prompt_token_ids=prompt,
            generated_token_ids=sampled,
            logprobs=logprobs,
            extras={"finish_reason": finish, "truncated": finish == "length"},
        )
        if coords.disposition != "staged":
            failure = active.failure
            self.run.ledger.record_failure(
                self.rollout_id, call_id, Cause.WORKER_CAPTURE_FAILED, str(failure.cause) if failure else None
            )
            return None
        self.ids[call_id] = prompt + sampled
        response = {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}
        record = CallRecord(
            **{name: getattr(coords, name) for name in CallRecord.model_fields if hasattr(coords, name)},
            mode=admitted.admission.mode,
            response_id=f"chatcmpl-{call_id}",
            admitted_at=1_000.0 + len(self.ids),
        )
        self.run.ledger.record(
            RolloutCommit(
                rollout_id=self.rollout_id,
                record=record,
                staging_chain=[*admitted.admission.staging_chain, record.staging_key],
                request_items=self.items,
                response_items=[response],
            )
        )
        self.served[call_id] = response["content"]
        return call_id


class StoredRun:
    """Plays and finalises groups into `run_dir`. `named`: each agent says which response was its last. `reward`:
    that of every rollout."""

    def __init__(self, run_dir: Path, seed: int = 5, *, named: bool = True, reward: float | None = None) -> None:
        self.run_dir = run_dir
        self.named = named
        self.reward = reward
        self.rng = random.Random(seed)
        self.version = 0
        self.sink = MemorySink()
        self.core = CaptureCore(self.sink, lambda: self.version, sink_timeout_s=None)
        self.ledger = LedgerStore(run_dir / "ledger")
        self.train_rows: dict[str, Any] = {}
        self.writer = RunWriter(run_dir)
        self.writer.status({"status": "running", "phase": "set-up", "run": run_dir.name})
        (run_dir / "recipe.yaml").write_text(
            "name: stored\nmodel: {path: made-up}\nenvironment: {name: guess_number}\ntoken_capture: {enabled: true}\n"
            "train: {max_staleness: 1, advantage: {name: grpo, options: {}}}\n"
        )
        (run_dir / "vocabulary.json").write_bytes(VOCABULARY.dump())

    def play(self, rollout_id: str, turns: int, *, kind: str) -> tuple[Rollout, str | None]:
        """One guessing game. `kind`: plain, early, retry, branch, edit, nan or length. Returns it and its last id."""
        rollout = Rollout(self, rollout_id, items=[{"role": "user", "content": "A number from 1 to 20 🎲"}])
        tail = "<|im_start|>user\nA number from 1 to 20 🎲<|im_end|>\n<|im_start|>assistant\n"
        last = None
        for turn in range(turns):
            if kind == "retry" and turn == 1:
                rollout.call("Hm, é?<|im_end|>", tail=tail)
            if kind == "branch" and turn == turns - 1:
                kept = list(rollout.items)
                rollout.items = [*rollout.items[:-1], {"role": "user", "content": "Why?"}]
                rollout.call("Because.<|im_end|>", tail="\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
                rollout.items = kept
            if kind == "edit" and turn == turns - 1:
                rollout.items = [{"role": "user", "content": "Another task"}, *rollout.items[1:]]
            cut = kind == "length" and turn == turns - 1
            answer = f"<guess>{self.rng.randint(1, 20)}</guess>" + ("" if cut else "<|im_end|>")
            nan_at = 3 if kind == "nan" and turn == turns - 1 else None
            call_id = rollout.call(answer, tail=tail, finish="length" if cut else "stop", nan_at=nan_at)
            if call_id is None:
                break
            last = call_id
            reply = {"role": "user", "content": "higher"}
            rollout.items = [*rollout.items, {"role": "assistant", "content": rollout.served[call_id]}, reply]
            tail = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
        return rollout, last

    def group(self, step: int | None, number: int, kinds: list[str]) -> FinalizedGroup:
        """Play one rollout a kind, finalise the group, write its parts."""
        group_id = f"g{number:05d}"
        ids = [f"{self.run_dir.name}.{number}.{index}.0" for index in range(len(kinds))]
        self.writer.event("group_started", step=step, group_id=group_id, rollout_ids=ids, task_id="guess")
        outcomes = []
        for index, (rollout_id, kind) in enumerate(zip(ids, kinds, strict=True)):
            _, last = self.play(rollout_id, 2 + (number + index) % 3, kind=kind)
            made_up = round(min(1.0, 0.1 * (step or 0) + 0.4 * self.rng.random()), 3)
            reward = made_up if self.reward is None else self.reward
            manifest = self.ledger.manifest(rollout_id)
            receipt = assemble_receipt(
                manifest,
                rollout_id=rollout_id,
                reward=reward,
                declared_response_id=f"chatcmpl-{last}" if last and self.named else None,
            )
            outcomes.append(
                RolloutOutcome(
                    rollout_id=rollout_id,
                    index=index,
                    task_id="guess",
                    receipt=receipt,
                    failures=manifest.failures,
                    reward=reward,
                    reward_components={"guess": reward},
                    ended_early="window full: 40 tokens, at most 32" if kind == "early" else None,
                )
            )
        request = FinalizationRequest(group_id=group_id, weight_version=self.version, rollouts=outcomes)
        staged = {key: _fetched(self.sink, key) for key in request.staging_keys()}
        assembly = assemble(request, staged, bos_token_id=START)
        write_group(self.run_dir, request, staged, assembly)
        finalized = FinalizedGroup(
            group_id=group_id,
            weight_version=self.version,
            train_keys=ids,
            rows=assembly.summaries,
            metrics=assembly.metrics,
        )
        for row in assembly.summaries:
            if row.cause is not None:
                told = row.model_dump(include={"rollout_id", "cause", "detail", "call_id", "position"})
                self.writer.event("rollout_rejected", step=step, group_id=group_id, **told)
        self.writer.group({"step": step, **finalized.store_record()})
        self.train_rows[group_id] = assembly.rows
        return finalized

    def step(self, step: int, groups: list[list[str]]) -> None:
        """One optimiser step over freshly played groups; the trainer's log-probs are the sampler's plus small noise."""
        first = (step - 1) * len(groups)
        self.take(step, [self.group(step, first + offset, kinds) for offset, kinds in enumerate(groups)])

    def take(self, step: int, made: list[FinalizedGroup]) -> None:
        """One optimiser step over groups that were played for it or for another."""
        rows_of = {group.group_id: self.train_rows.pop(group.group_id) for group in made}
        batch = [unpack_row(pack_row(row)) for rows in rows_of.values() for row in rows]
        ballot = cast_votes(batch, version=step - 1, advantage={"name": "grpo", "options": {}})
        advantages = dict(zip((row.rollout_id for row in batch), ballot.advantages.tolist(), strict=True))
        noise = np.random.default_rng(step)
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "step",
                "group_id",
                "rollout_id",
                "index",
                "advantage",
                "sample_mask",
                "left_out",
                "loss_mask",
                "trainer_logprobs",
                "delta",
            )
        }
        deltas = []
        for group_id, rows in rows_of.items():
            for row in rows:
                mask_T = row.token_mask.astype(bool)
                trainer_T = np.where(mask_T, row.logprobs + noise.normal(0, 0.03, mask_T.size), 0).astype(np.float32)
                delta_T = np.where(mask_T, trainer_T - row.logprobs, 0).astype(np.float32)
                deltas.append(np.abs(delta_T[mask_T & bool(row.sample_mask)]).astype(np.float64))
                for name, value in (
                    ("step", step),
                    ("group_id", group_id),
                    ("rollout_id", row.rollout_id),
                    ("index", row.index),
                    ("advantage", advantages[row.rollout_id]),
                    ("sample_mask", row.sample_mask),
                    ("left_out", None if row.sample_mask else "placeholder"),
                    ("loss_mask", row.token_mask * row.sample_mask),
                    ("trainer_logprobs", trainer_T),
                    ("delta", delta_T),
                ):
                    columns[name].append(value)
        write_part(self.run_dir / "train" / f"step-{step}.parquet", "train", columns)
        self.version = step
        of_the_batch = {
            "tokens": sum(len(row.token_ids) for row in batch),
            "sampled_tokens": sum(int(row.loss_mask.sum()) for row in batch),
            "mean_abs_logprob_delta": float(np.concatenate(deltas).mean()),
        }
        line = {"step": step, "weight_version": step, **pool_metrics(made), **ballot.metrics(batch), **of_the_batch}
        self.writer.step(line | {"proof_mean_abs_delta": 0.03})

    def finish(self) -> Path:
        """Close the run as done."""
        self.writer.event("finished", weight_version=self.version)
        self.writer.status({"status": "done", "phase": "done", "step": self.version, "weight_version": self.version})
        self.writer.close()
        return self.run_dir


def make_run(run_dir: Path, steps: int = 2) -> Path:
    """A finished run: `steps` × two groups of four rollouts, every kind among them."""
    run = StoredRun(run_dir)
    for step in range(1, steps + 1):
        run.step(step, [["plain", "retry", "branch", "length"], ["plain", "edit", "nan", "retry"]])
    return run.finish()


def _fetched(sink: MemorySink, key: str) -> Any:
    from workbench.capture.staged_row import unpack

    return unpack(key, sink.rows[key])


def rewrite_json_line(path: Path, line: int, change: dict[str, Any]) -> None:
    """Change fields of one line of a JSONL file, as damage would."""
    lines = path.read_bytes().splitlines()
    lines[line] = orjson.dumps(orjson.loads(lines[line]) | change)
    path.write_bytes(b"\n".join(lines) + b"\n")
