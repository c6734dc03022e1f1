"""Schema: the columns of a run, declared once; everything else (Arrow, Polars, documentation) is rendered from here.

Six levels with ids in every row, so that everything joins: campaigns -> steps -> groups -> rollouts -> calls, and
`rows`, which is `rollouts` with its token arrays. `train` is what the trainer adds to a row.

    TABLES["calls"]            tuple of Column(name, dtype, unit, meaning)
    arrow_schema("calls")      pyarrow.Schema          (pyarrow is imported in the call, not with this module)
    polars_schema("calls")     dict name -> polars dtype
    docs_table("calls")        Markdown table

Invariant: a table on disk has exactly these columns in this order; drift is a failing test.
Suffix legend: `_T` stands for the tokens of one call's delta, or of one row; a null means "not known", never zero.
Not here: writing (writer), reading and joining (reader).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: The closed vocabulary of dtypes -> (Arrow constructor, Polars class).
DTYPES = {
    "str": ("string", "String"),
    "json": ("string", "String"),
    "bool": ("bool_", "Boolean"),
    "i64": ("int64", "Int64"),
    "f64": ("float64", "Float64"),
    "list[str]": ("string", "String"),
    "list[i64]": ("int64", "Int64"),
    "list[u64]": ("uint64", "UInt64"),
    "list[u8]": ("uint8", "UInt8"),
    "list[f32]": ("float32", "Float32"),
    "bytes": ("binary", "Binary"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `dtype` is a key of `DTYPES`; `json` is text that parses as JSON; `unit` may be empty."""

    name: str
    dtype: str
    unit: str
    meaning: str
    optional: bool = False
    """Writers may leave it out, and parts of older runs lack it: it is null there."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"column {self.name}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")


C = Column

CAMPAIGNS = (
    C("run", "str", "", "name of the run, the first part of every rollout id"),
    C("path", "str", "", "run directory"),
    C("state", "str", "", "running, done, failed, stopped, or unreadable: status.json cannot be read"),
    C("started_at", "f64", "s", "Unix time of the first event"),
    C("finished_at", "f64", "s", "Unix time of the last event of a closed run"),
    C("model", "str", "", "model the policy started from"),
    C("environment", "str", "", "environment the tasks came from"),
    C("capture_enabled", "bool", "", "true: token capture; false: the token-echo baseline"),
    C("steps", "i64", "", "optimiser steps taken"),
    C("groups", "i64", "", "groups finalised"),
    C("rollouts", "i64", "", "rollouts finalised, placeholders included"),
    C("valid_rollouts", "i64", "", "rollouts that became a training row"),
    C("error", "str", "", "what ended the run, where something did"),
)

STEPS = (
    C("step", "i64", "", "optimiser step, from 1"),
    C("weight_version", "i64", "", "version the step produced"),
    C("group_ids", "list[str]", "", "groups it consumed, in order"),
    C("rows", "i64", "", "rows in the batch, placeholders included"),
    C("tokens", "i64", "tokens", "tokens of the batch's rows"),
    C("sampled_tokens", "i64", "tokens", "tokens with mask 1"),
    C("loss", "f64", "", "policy loss, averaged over sampled tokens"),
    C("reward_mean", "f64", "", "mean reward of valid rows"),
    C("valid_row_rate", "f64", "", "valid rows / rows"),
    C("token_mult_prob_error", "f64", "", "mean of exp(|trainer - sampler log-prob|) over sampled tokens"),
    C("gen_kl_error", "f64", "nat", "estimated KL(sampler || trainer) over sampled tokens"),
    C("mean_abs_logprob_delta", "f64", "nat", "mean |trainer - sampler log-prob| over sampled tokens"),
    C("clip_fraction", "f64", "", "sampled tokens whose ratio was clipped / sampled tokens"),
    C("kl_penalty", "f64", "nat", "mean estimated KL to the reference over tokens in the loss; null without a penalty"),
    C("loss_tokens", "i64", "tokens", "sampled tokens that entered the loss"),
    C("off_policy_rows", "i64", "", "rows that lost tokens, or their vote, for being too old"),
    C("disagreeing_rows", "i64", "", "rows left out because trainer and sampler disagree about them"),
    C("token_lag_mean", "f64", "versions", "mean of trainer version - version of the token, over sampled tokens"),
    C("agreement_suspect", "str", "", "detectors that found something: shift_by_one, temperature, truncated_support"),
    C("replay_coverage", "f64", "", "positions in the loss whose routes were replayed / all of them; null: no replay"),
    C("router_agreement", "f64", "", "layers whose own router agrees with a replayed route / all; null: no replay"),
    C("router_agreement_by_layer", "json", "", "layer -> the same share; null: no replay"),
    C("padding_rate", "f64", "", "padded tokens / tokens of all micro-batches"),
    C("grad_norm", "f64", "", "gradient norm before clipping"),
    C("token_in_rate", "f64", "", "token_in calls / all calls, unresolved and failed ones included"),
    C("token_in_rate_after_roots", "f64", "", "the same, captured roots left out of the calls; a failed call is none"),
    C("capture_poisoned_rollouts", "i64", "", "rollouts whose capture was poisoned"),
    C("ended_early", "json", "", "reason -> rollouts whose agent stopped before the end; null in older runs"),
    C("echo_wrong_rows", "i64", "", "token-echo arm: valid rows that are not what the engine ran at the last call"),
    C("staleness_max", "i64", "versions", "trainer version - oldest version in the batch"),
    C("groups_evicted", "i64", "", "groups given up as too stale while the step waited, and replaced"),
    C("rollout_s", "f64", "s", "waiting for groups"),
    C("train_s", "f64", "s", "the optimiser step"),
    C("publish_s", "f64", "s", "writing the new weights"),
    C("sync_s", "f64", "s", "loading them into every worker, proof included"),
    C("proof_mean_abs_delta", "f64", "nat", "sampler against trainer on the fixed prompt after the sync"),
)

GROUPS = (
    C("group_id", "str", "", "group"),
    C("task_id", "str", "", "task all its rollouts tried"),
    C("weight_version", "i64", "", "version the group was dispatched at"),
    C("rows", "i64", "", "N, placeholders included"),
    C("valid_rows", "i64", "", "rows with sample_mask 1"),
    C("reward_mean", "f64", "", "mean reward of valid rows"),
    C("reward_std", "f64", "", "population standard deviation of valid rewards"),
    C("tokens", "i64", "tokens", "tokens of valid rows"),
    C("sampled_tokens", "i64", "tokens", "tokens of valid rows with mask 1"),
    C("calls", "i64", "", "recorded calls, unresolved and failed ones included"),
    C("token_in_rate", "f64", "", "token_in calls / all calls, unresolved and failed ones included"),
    C("token_in_rate_after_roots", "f64", "", "the same, captured roots left out of the calls; a failed call is none"),
    C("capture_poisoned_rollouts", "i64", "", "rollouts whose capture was poisoned"),
    C("terminal_selection_counts", "json", "", "method -> rollouts whose terminal call it named"),
    C("terminal_selection_fractions", "json", "", "the same as a share of the group's receipts"),
    C("heuristic_fraction", "f64", "", "receipts whose terminal was guessed by the heuristic / receipts"),
    C(
        "route_coverage",
        "f64",
        "",
        "positions before a sampled token whose route is known / all of them; null: no replay",
    ),
    C("route_sentinel_fraction", "f64", "", "tokens of valid rows without a route / tokens; null: no replay"),
    C("route_faults", "json", "", "cause -> calls of a chain whose routes could not be used"),
    C("witness_disagreements", "i64", "", "receipts whose witnesses named different sequences"),
    C("rejections", "json", "", "cause -> rollouts rejected for it"),
    C("ended_early", "json", "", "reason -> rollouts whose agent stopped before the end; null in older runs"),
    C("duplicate_rows", "i64", "", "valid rows that equal an earlier sibling byte for byte"),
    C("echo_wrong_rows", "i64", "", "token-echo arm: valid rows that are not what the engine ran at the last call"),
    C("fetch_s", "f64", "s", "the one batched read from staging"),
    C("verify_s", "f64", "s", "digests, graph, linearisation"),
    C("publish_s", "f64", "s", "rows into the train partition"),
    C("store_s", "f64", "s", "the group's parts on disk, fsynced"),
    C("clear_s", "f64", "s", "staging cleared (first try)"),
)

ROLLOUTS = (
    C("group_id", "str", "", "group"),
    C("rollout_id", "str", "", "rollout; also the key of its training row"),
    C("index", "i64", "", "place in the group, from 0"),
    C("task_id", "str", "", "task it tried"),
    C("reward", "f64", "", "reward of the environment; null: none was given, or the rollout failed before"),
    C("reward_components", "json", "", "name -> part of the reward"),
    C("sample_mask", "i64", "", "1: trains; 0: placeholder without a vote"),
    C(
        "placeholder",
        "str",
        "",
        "where a placeholder's prompt is from: sibling, root_carry or bos; null: valid row",
    ),
    C("cause", "str", "", "the one primary cause of a rejection; null for a valid row"),
    C("detail", "str", "", "what was found, in a sentence; or reason codes, which are explained under Causes"),
    C("call_id", "str", "", "call at which verification failed, where known"),
    C("position", "i64", "tokens", "token position in that call's delta, where known"),
    C("terminal_model_call_id", "str", "", "call that ends the trajectory"),
    C(
        "terminal_selection",
        "str",
        "",
        "declared, response_id, content or heuristic; null: nothing attributed",
    ),
    C("terminal_attribution_reason", "str", "", "what the witnesses said"),
    C("capture_poisoned", "bool", "", "the receipt's poison flag"),
    C("failure_reason", "str", "", "the receipt's own failure reason"),
    C("calls", "i64", "", "recorded calls, side branches included, failures not"),
    C(
        "failed_calls",
        "i64",
        "",
        "admitted calls without a custody row: refused or lost by the worker, or not captured. A request that the "
        "gateway refuses before (what it cannot read, `n: 2`) is no call, so nothing of it is here: an agent that lets "
        "the refusal through has it in `detail`",
    ),
    C("unresolved_calls", "i64", "", "failed calls whose history continued no recorded call"),
    C("prompt_len", "i64", "tokens", "the root call's carry"),
    C("tokens", "i64", "tokens", "length of the row"),
    C("sampled_tokens", "i64", "tokens", "tokens with mask 1"),
    C("weight_version_min", "i64", "", "oldest version on the chain"),
    C("weight_version_max", "i64", "", "newest version on the chain"),
    C("model_call_ids", "list[str]", "", "the chain, root first"),
    C("weight_versions", "list[i64]", "", "version of each call of the chain"),
    C("weight_version_spans", "json", "", "[call, start, end, version] over row positions"),
    C("link_spans", "json", "", "[call, carry, generated] of the chain, root first"),
    C("duplicate_of", "str", "", "earlier sibling whose row is byte-equal, where there is one"),
    C(
        "ended_early",
        "str",
        "",
        "why its agent stopped before the end, as `window full: …`; such a rollout trains. null: it did not say so, or "
        "the run is older than the column",
        optional=True,
    ),
)

ROWS = (
    *ROLLOUTS,
    C("route_plan", "json", "", "how the row's routes are put together; null without router replay", optional=True),
    C("token_ids", "list[u64]", "tokens", "ids_T"),
    C("token_mask", "list[u8]", "", "mask_T: 1 = sampled by the policy"),
    C("logprobs", "list[f32]", "nat", "logprob_T of the sampler; exactly 0 where the mask is 0"),
)

CALLS = (
    C("group_id", "str", "", "group"),
    C("rollout_id", "str", "", "rollout"),
    C("model_call_id", "str", "", "call"),
    C("manifest_index", "i64", "", "place in the manifest, from 0; failures follow the records"),
    C("parent_call_id", "str", "", "call it continues; null for a root"),
    C("disposition", "str", "", "staged, failed (no custody row), or echoed: of the token-echo arm, whole prompt"),
    C(
        "staging",
        "str",
        "",
        "fetched, or the cause for which the delta could not be read; null for a failed call",
    ),
    C("failure_reason", "str", "", "the wire's reason of a failed call"),
    C("detail", "str", "", "what is known beyond the reason"),
    C("mode", "str", "", "text (root) or token_in (child)"),
    C("schema_version", "i64", "", "staging schema"),
    C("digest_version", "i64", "", "call digest"),
    C("extras_digest_version", "i64", "", "extras digest"),
    C("prev_len", "i64", "tokens", "parent's cumulative length"),
    C("delta_len", "i64", "tokens", "tokens of this call's delta"),
    C("cum_len", "i64", "tokens", "cumulative length"),
    C("carry_tokens", "i64", "tokens", "prompt-carry tokens of the delta (mask 0)"),
    C("sampled_tokens", "i64", "tokens", "generated tokens of the delta (mask 1)"),
    C("weight_version", "i64", "", "version at admission, read on the worker"),
    C("digest", "str", "sha256", "staged-call digest, as recorded"),
    C("extras_digest", "str", "sha256", "extras digest, as recorded"),
    C("chain_hash", "str", "sha256", "chain hash, as recorded"),
    C("cumulative_hash", "str", "sha256", "cumulative hash, as recorded"),
    C("staging_key", "str", "", "where the delta was staged"),
    C("response_id", "str", "", "id of the served object"),
    C("admitted_at", "f64", "s", "Unix time of admission"),
    C("output_fingerprint", "str", "sha256", "fingerprint of the served output"),
    C("continuation_fingerprint", "str", "sha256", "fingerprint of request and output"),
    C("fingerprint_version", "i64", "", "0 = none"),
    C("on_chain", "bool", "", "part of the rollout's terminal chain"),
    C("terminal", "bool", "", "the rollout's terminal call"),
    C("finish_reason", "str", "", "why the engine stopped"),
    C("extras", "json", "", "the digested extras tree; SQL null when none was staged"),
    C(
        "routes",
        "bytes",
        "",
        "routed experts of the delta, little-endian; dtype and shape are in extras; null: none staged",
        optional=True,
    ),
    C("snapshot", "json", "", "staged fields that differ from the recorded ones, {} when none do"),
    C("token_ids", "list[u64]", "tokens", "ids_T of the delta"),
    C("token_mask", "list[f32]", "", "mask_T as staged: 0 carry, 1 generated"),
    C("logprobs", "list[f32]", "nat", "logprob_T as staged"),
)

TRAIN = (
    C("step", "i64", "", "optimiser step"),
    C("group_id", "str", "", "group"),
    C("rollout_id", "str", "", "rollout"),
    C("index", "i64", "", "place in the group"),
    C("advantage", "f64", "", "advantage of the row; 0 for a placeholder"),
    C("sample_mask", "i64", "", "1: trained on; 0: placeholder"),
    C(
        "left_out",
        "str",
        "",
        "why the row, or tokens of it, stayed out: placeholder, off_policy, mult_prob_error, reward_components; "
        "null: all is in",
    ),
    C("loss_mask", "list[u8]", "", "mask_T: 1 = the token entered the loss"),
    C(
        "trainer_logprobs",
        "list[f32]",
        "nat",
        "logprob_T of the trainer before the step; 0 where not sampled",
    ),
    C("delta", "list[f32]", "nat", "trainer - sampler log-prob; 0 where not sampled"),
    C(
        "route_agreement",
        "list[f32]",
        "",
        "share of layers whose own router agrees with the replayed route of a token; NaN without one; null: no replay",
        optional=True,
    ),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "campaigns": CAMPAIGNS,
    "steps": STEPS,
    "groups": GROUPS,
    "rollouts": ROLLOUTS,
    "calls": CALLS,
    "rows": ROWS,
    "train": TRAIN,
}


def columns(table: str) -> tuple[Column, ...]:
    """Columns of a table, in order. KeyError names the tables there are."""
    if table not in TABLES:
        raise KeyError(f"no table {table!r}; there are {', '.join(TABLES)}")
    return TABLES[table]


def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table; all columns nullable."""
    import pyarrow as pa

    def arrow_type(dtype: str) -> pa.DataType:
        inner = getattr(pa, DTYPES[dtype][0])()
        return pa.list_(inner) if dtype.startswith("list[") else inner

    return pa.schema([pa.field(c.name, arrow_type(c.dtype)) for c in columns(table)])


def compression(table: str) -> dict[str, str]:
    """Codec of each column of a table's Parquet files, by its path in the file.

    What is as long as the tokens, or longer, is packed. A part has few rows, and to unpack each of its short columns
    takes longer than to read it.
    """
    long = {"list[u64]", "list[u8]", "list[f32]", "bytes"}
    return {
        f"{c.name}.list.element" if c.dtype.startswith("list[") else c.name: "zstd" if c.dtype in long else "none"
        for c in columns(table)
    }


def polars_schema(table: str) -> dict[str, Any]:
    """Polars dtypes of a table, in order."""
    import polars as pl

    def polars_type(dtype: str) -> Any:
        inner = getattr(pl, DTYPES[dtype][1])
        return pl.List(inner) if dtype.startswith("list[") else inner

    return {c.name: polars_type(c.dtype) for c in columns(table)}


def docs_table(table: str) -> str:
    """The table's documentation as a Markdown table."""
    return docs_lines(columns(table))


def docs_lines(shown: Iterable[Column]) -> str:
    """Any columns as a Markdown table; a bar in a meaning is escaped, or it would end its cell."""
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    for c in shown:
        meaning = c.meaning.replace("|", "\\|")
        lines.append(f"| `{c.name}` | {c.dtype} | {c.unit} | {meaning} |")
    return "\n".join(lines)
