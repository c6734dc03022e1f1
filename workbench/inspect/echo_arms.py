"""Echo arms: a captured run against its token-echo baseline: what is equal, and what echo got wrong.

In: two runs of one recipe that differ in `token_capture.enabled`. Out: one row a pair of trained rollouts, by task and
place. With a seed for each call (`sampling.seed_each_call`) and the same weights both arms sample the same answers, up
to the engine's rounding; from the second step on their weights may differ, because their rows do.
Invariant: equal texts have equal rewards, since a reward sees nothing but the text. Not here: how far trainer and
sampler are apart (the runs' own steps), pairs with intervals (arms).
"""

from __future__ import annotations

from typing import Any

import polars as pl

from workbench.errors import RunStoreError
from workbench.inspect.arms import pair_up
from workbench.inspect.ids import check_run

STEP_COLUMNS = ("reward_mean", "mean_abs_logprob_delta", "token_mult_prob_error", "gen_kl_error", "echo_wrong_rows")
"""What `steps_side_by_side` shows of each arm."""


def echo_pairs(captured: Any, echoed: Any) -> pl.DataFrame:
    """One row a pair that was trained on in both arms, sorted by task and place.

    Columns: task_id, task_seed, index, rollout_id, rollout_id_echo, same_prompt (the ids before the first sampled
    token), same_text (every answer, as text), same_tokens (the whole rows, as ids), reward, reward_echo, wrong_at
    (first token of the echo arm's row that is not what the engine ran; null: none). Raises RunStoreError for what is no
    two runs, and for runs that share no task.
    """
    _check_arms("echo_pairs", "rollouts", captured, echoed)
    seeds = captured.rollouts.select("rollout_id", "task_seed")
    wrong = echoed.rollouts.filter(pl.col("sample_mask") == 1).select("rollout_id", wrong_at="position")
    pairs = pair_up(captured.rollouts, echoed.rollouts)
    if pairs.is_empty():
        raise RunStoreError(
            f"No rollout of {captured.rollouts.height:,} and {echoed.rollouts.height:,} has a partner: the arms share "
            "no task. Next: run one recipe twice, the second time with token_capture.enabled=false"
        )
    pairs = pairs.filter((pl.col("valid") == 1) & (pl.col("valid_other") == 1))
    rows = []
    for pair in pairs.to_dicts():
        one, other = captured.tokens(pair["rollout_id"]), echoed.tokens(pair["rollout_id_other"])
        rows.append(
            {
                "task_id": pair["task_id"],
                "index": pair["index"],
                "rollout_id": pair["rollout_id"],
                "rollout_id_echo": pair["rollout_id_other"],
                "same_prompt": _prompt(one) == _prompt(other),
                "same_text": _answers(captured, one) == _answers(echoed, other),
                "same_tokens": one["token_id"].to_list() == other["token_id"].to_list(),
                "reward": pair["reward"],
                "reward_echo": pair["reward_other"],
            }
        )
    frame = pl.DataFrame(rows, schema=_SCHEMA)
    frame = frame.join(seeds, on="rollout_id", how="left", maintain_order="left")
    frame = frame.join(wrong, left_on="rollout_id_echo", right_on="rollout_id", how="left", maintain_order="left")
    return frame.select("task_id", "task_seed", pl.exclude("task_id", "task_seed"))


_SCHEMA = {
    "task_id": pl.String,
    "index": pl.Int64,
    "rollout_id": pl.String,
    "rollout_id_echo": pl.String,
    "same_prompt": pl.Boolean,
    "same_text": pl.Boolean,
    "same_tokens": pl.Boolean,
    "reward": pl.Float64,
    "reward_echo": pl.Float64,
}


def steps_side_by_side(captured: Any, echoed: Any) -> pl.DataFrame:
    """`STEP_COLUMNS` of each step that both arms took, a line each: step, metric, captured, echoed.

    A null means not known; captured rows are verified, so the captured arm counts no wrong ones. Raises RunStoreError
    for what is no two runs.
    """
    _check_arms("steps_side_by_side", "steps", captured, echoed)
    one, other = (
        run.steps.select("step", pl.col(STEP_COLUMNS).cast(pl.Float64)).unpivot(index="step", variable_name="metric")
        for run in (captured, echoed)
    )
    lines = one.rename({"value": "captured"}).join(other.rename({"value": "echoed"}), on=["step", "metric"])
    order = {name: place for place, name in enumerate(STEP_COLUMNS)}
    return lines.sort("step", pl.col("metric").replace_strict(order))


def _check_arms(name: str, holds: str, captured: Any, echoed: Any) -> None:
    for run in (captured, echoed):
        check_run(run, name, holds)
    paths = [getattr(run, "path", None) for run in (captured, echoed)]
    if captured is echoed or (paths[0] is not None and paths[0] == paths[1]):
        which = getattr(captured, "name", "one run")
        raise RunStoreError(f"{name} expected two runs, got {which} twice. Next: {name}(captured, echoed)")


def _prompt(tokens: pl.DataFrame) -> list[int]:
    sampled = tokens["sampled"].to_list()
    return tokens["token_id"].to_list()[: sampled.index(True) if True in sampled else None]


def _answers(run: Any, tokens: pl.DataFrame) -> list[bytes]:
    """What was sampled in each call, as bytes of text; special tokens are none."""
    sampled = tokens.filter("sampled").group_by("model_call_id", maintain_order=True).agg("token_id")
    pieces = run.vocabulary().pieces
    return [b"".join(pieces.get(token_id, b"") for token_id in ids) for ids in sampled["token_id"].to_list()]
