"""Frames page: the columns of every frame of a run as one Markdown page, kept as docs/reference/frames.md.

    python tools/reference_pages.py

In: the declarations of `schema` and `frames`, and `CARRIED` below. Out: the page. Invariant: what the page lists for a
frame is what `runs.open(path).<frame>` has, in that order; columns that only a file on disk has stand apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.runs import frames, schema
from workbench.runs.schema import Column

C = Column

#: Frame of a run -> the table whose declaration it follows.
FRAMES = {"campaign": "campaigns", "steps": "steps", "groups": "groups", "rollouts": "rollouts", "calls": "calls"}

EVENTS = (
    C("run", "str", "", "run"),
    C("at", "f64", "s", "Unix time"),
    C("kind", "str", "", "what happened"),
    C("fields", "json", "", "the event's own fields"),
)

_COUNTS = (
    C("unrewarded_rows", "i64", "", "valid rows without a reward, as a served rollout may be closed"),
    C("reward_sum", "f64", "", "sum of valid rewards"),
    C("reward_square_sum", "f64", "", "sum of their squares"),
    C("token_in_calls", "i64", "", "calls that continued recorded tokens"),
    C("root_calls", "i64", "", "calls that began a conversation"),
    C("failed_calls", "i64", "", "calls without a custody row"),
    C("unresolved_calls", "i64", "", "failed calls whose history continued no recorded call"),
    C("receipts", "i64", "", "rollouts that have a receipt"),
)

#: Frame -> columns that its lines bring along: there where a line of the run has them, after the declared ones.
CARRIED: dict[str, tuple[Column, ...]] = {
    "groups": (
        *_COUNTS,
        C("valid_row_rate", "f64", "", "valid rows / rows"),
        C("sampling_s", "f64", "s", "from the group's start until its last rollout was closed"),
    ),
    "steps": (
        *_COUNTS,
        C("valid_rows", "i64", "", "rows with sample_mask 1"),
        C("reward_std", "f64", "", "population standard deviation of valid rewards"),
        C("calls", "i64", "", "recorded calls, unresolved and failed ones included"),
        C("heuristic_fraction", "f64", "", "receipts whose terminal was guessed by the heuristic / receipts"),
        C("witness_disagreements", "i64", "", "receipts whose witnesses named different sequences"),
        C("duplicate_rows", "i64", "", "valid rows that equal an earlier sibling byte for byte"),
        C("finalize_fetch_s", "f64", "s", "reading from staging, summed over the groups"),
        C("finalize_verify_s", "f64", "s", "verifying and linearising, summed over the groups"),
        C("finalize_publish_s", "f64", "s", "rows into the train partition, summed over the groups"),
        C("finalize_store_s", "f64", "s", "parts on disk, summed over the groups"),
        C("finalize_clear_s", "f64", "s", "clearing staging, summed over the groups"),
        C("policy_kl_error", "f64", "nat", "estimated KL(trainer || sampler) over sampled tokens"),
        C("max_abs_logprob_delta", "f64", "nat", "largest |trainer - sampler log-prob|"),
        C("approx_entropy", "f64", "nat", "mean of -trainer log-prob over sampled tokens"),
        C("probs_ratio", "f64", "", "mean of exp(trainer - base log-prob)"),
        C("probs_ratio_clamped", "f64", "", "the same, clamped to the clip range"),
        C("probs_ratio_min", "f64", "", "smallest ratio"),
        C("probs_ratio_max", "f64", "", "largest ratio"),
        *(C(f"probs_ratio_p{q:02d}", "f64", "", f"{q}% quantile of the ratio") for q in (1, 5, 50, 95, 99)),
        C("advantage_abs_mean", "f64", "", "mean |advantage| over valid rows; 0: equal rewards or one vote a group"),
        C("token_lag_max", "i64", "versions", "largest lag of a sampled token behind the weights trained"),
        C("micro_batches", "i64", "", "micro-batches of the step"),
        C("padding_tokens", "i64", "tokens", "padded tokens of all micro-batches"),
        C("longest_micro_batch", "i64", "tokens", "tokens of the longest micro-batch"),
        C("other_component_rows", "i64", "", "rows left out because their reward has other components than most"),
        C("optimizer_stepped", "i64", "", "1: the optimiser stepped; 0: no row had a vote"),
        C("seconds", "f64", "s", "the step in the trainer alone"),
        C("fetch_s", "f64", "s", "the trainer's reading of its rows"),
        C("store_s", "f64", "s", "the step's part on disk"),
        C("clear_s", "f64", "s", "clearing its rows"),
        C("load_s", "f64", "s", "loading the new weights"),
        C("proof_max_abs_delta", "f64", "nat", "largest difference on the fixed prompt after the sync"),
    ),
}

_HEAD = """# Frames of a run

`workbench.runs.open(path)` gives these Polars frames; `.to_pandas()` is Polars' own. A null means
not known, never zero. Rendered from the declarations by `tools/reference_pages.py`."""

_ARRAYS = """## Token arrays

Frames of things hold no tokens; `run.tokens(rollout_id)`, `run.logprobs()` and `run.staged(rollout_id)` give them on
demand. They are in the Parquet parts, which lack the columns from `run` on: those are added by reading."""


def docs() -> str:
    """The whole page."""
    parts = [_HEAD]
    for frame, table in FRAMES.items():
        parts.append(f"## run.{frame}\n\n{_table(frame_columns(frame))}")
        if frame in CARRIED:
            lines = f"Beside these, where the lines of `{table}.jsonl` have them:"
            parts.append(f"{lines}\n\n{_table(CARRIED[frame])}")
    parts.append(f"## run.events\n\n{_table(EVENTS)}")
    parts.append(_ARRAYS)
    for table, shown in (("calls", "calls"), ("rows", "rollouts")):
        only = [column for column in schema.columns(table) if column.name not in frames.scalar_columns(shown)]
        parts.append(f"### {table}/*.parquet, beside columns of `run.{shown}`\n\n{_table(only)}")
    parts.append(f"### train/*.parquet\n\n{schema.docs_table('train')}")
    return "\n\n".join(parts) + "\n"


def frame_columns(frame: str) -> list[Column]:
    """The columns that a frame always has, in order."""
    table = FRAMES[frame]
    shown = frames.scalar_columns(table)
    return [column for column in schema.columns(table) if column.name in shown] + list(frames.ADDED.get(table, ()))


def _table(columns: Sequence[Column]) -> str:
    return schema.docs_lines(columns)
