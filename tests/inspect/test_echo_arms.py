"""Echo arms: pairs of a captured and an echoed run say what is equal and where the echoed row is not what ran."""

from __future__ import annotations

import polars as pl
import pytest

from workbench import runs
from workbench.demo import recorded_ledger, recorded_run
from workbench.errors import RunStoreError
from workbench.inspect import echo_pairs, steps_side_by_side
from workbench.runs.vocabulary import Vocabulary

ASK, AGAIN = [1, 10, 11], [12]
VOCABULARY = Vocabulary({65: b"A", 66: b"B", 67: b"AB"}, {2: "<|im_end|>"})


class Arm:
    """What is read of a run: its rollouts, their tokens, its vocabulary and its steps. `rows`: (calls, reward, wrong)
    a rollout of one task, a call being (carried ids, sampled ids)."""

    def __init__(self, name, rows, gen_kl):
        names = [f"{name}.0.{i}.0" for i in range(len(rows))]
        self.rows = dict(zip(names, rows, strict=True))
        self.rollouts = pl.DataFrame(
            {
                "task_seed": 1, "group_id": "g0", "task_id": "t-1",
                "index": range(len(rows)), "rollout_id": names, "cause": None, "detail": None,
                "reward": [reward for _, reward, _ in rows], "sample_mask": [1] * (len(rows) - 1) + [0], "calls": 2,
                "failed_calls": 0, "tokens": 9, "sampled_tokens": 4, "position": [wrong for _, _, wrong in rows],
            },
            schema_overrides={"position": pl.Int64, "cause": pl.String, "detail": pl.String},
        )  # fmt: skip
        self.steps = pl.DataFrame(
            {
                "step": [1, 2], "reward_mean": [0.1, 0.2], "mean_abs_logprob_delta": [0.0, 0.0],
                "token_mult_prob_error": [1.0, 1.0], "gen_kl_error": gen_kl, "echo_wrong_rows": [0, 1],
            }
        )  # fmt: skip

    def vocabulary(self):
        return VOCABULARY

    def tokens(self, rollout_id):
        calls, _, _ = self.rows[rollout_id]
        parts = [
            (f"{rollout_id}/{n}", token_id, sampled)
            for n, (carried, answer) in enumerate(calls)
            for ids, sampled in ((carried, False), (answer, True))
            for token_id in ids
        ]
        return pl.DataFrame(parts, schema=["model_call_id", "token_id", "sampled"], orient="row")


def test_equal_text_of_other_tokens_is_told_from_equal_tokens():
    spelt, merged = [(ASK, [65, 66, 2]), (AGAIN, [65, 2])], [(ASK, [67, 2]), (AGAIN, [65, 2])]
    other_text, other_prompt = [(ASK, [66, 2])], [([1, 10], [65, 2])]
    gone = (spelt, 0.0, None)  # a placeholder: it was not trained on
    captured = Arm(
        "a", [(spelt, 0.5, None), (spelt, 0.5, None), (spelt, 0.5, None), (spelt, 0.5, None), gone], [0.1, 0.2]
    )
    echoed = Arm(
        "b",
        [(spelt, 0.5, None), (merged, 0.5, 3), (other_text, 0.1, None), (other_prompt, 0.2, None), gone],
        [0.3, 0.4],
    )
    pairs = echo_pairs(captured, echoed)
    assert pairs["same_prompt"].to_list() == [True, True, True, False]
    assert pairs["same_text"].to_list() == [True, True, False, False]
    assert pairs["same_tokens"].to_list() == [True, False, False, False]
    assert pairs["wrong_at"].to_list() == [None, 3, None, None]
    assert pairs["task_seed"].to_list() == [1] * 4
    same = pairs.filter("same_text")
    assert (same["reward"] == same["reward_echo"]).all()
    steps = steps_side_by_side(captured, echoed)
    assert steps.columns == ["step", "metric", "captured", "echoed"] and steps["step"].to_list() == [1] * 5 + [2] * 5
    told = {(step, metric): (one, other) for step, metric, one, other in steps.rows()}
    assert [told[step, "gen_kl_error"] for step in (1, 2)] == [(0.1, 0.3), (0.2, 0.4)]
    assert told[2, "echo_wrong_rows"] == (1, 1)


@pytest.mark.parametrize("compare", [echo_pairs, steps_side_by_side])
def test_what_are_no_two_runs_is_answered_with_what_was_expected_and_how_to_open_one(compare):
    recorded, name = runs.open(recorded_run()), compare.__name__
    with pytest.raises(RunStoreError, match=rf"{name} expected a run, got str; open a run: .*open_any\('reports/a'\)"):
        compare(recorded, "reports/a")
    with pytest.raises(RunStoreError, match=rf"{name} expected a run, got NoneType; open a run: runs\.open"):
        compare(None, recorded)
    for same in (recorded, runs.open(recorded_run())):
        with pytest.raises(RunStoreError, match=rf"{name} expected two runs, got demo twice\. Next: {name}\("):
            compare(recorded, same)


def test_arms_that_share_no_task_are_no_pairs():
    with pytest.raises(RunStoreError, match=r"No rollout of 16 and 7 has a partner: .*Next: run one"):
        echo_pairs(runs.open(recorded_run()), runs.open_any(recorded_ledger()))
    with pytest.raises(RunStoreError, match="got ForeignLedger, which has no steps"):
        steps_side_by_side(runs.open(recorded_run()), runs.open_any(recorded_ledger()))
