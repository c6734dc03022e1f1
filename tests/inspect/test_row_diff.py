"""RowDiff: rows aligned id by id, arms paired by task and seed, numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_run import VOCABULARY, StoredRun, encode

from workbench import runs
from workbench.errors import RunStoreError
from workbench.inspect import RowDiff, align
from workbench.inspect.align import equal_stretches, first_difference
from workbench.inspect.arms import differences, flips, pair_up
from workbench.inspect.live.pack import unpack


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
@settings(max_examples=150, deadline=None)
def test_stretches_are_equal_in_order_and_begin_with_the_common_prefix(one, other):
    left, right = ids(*one), ids(*other)
    stretches = equal_stretches(left, right)
    at_one = at_other = -1
    for start_one, start_other, length in stretches:
        assert (start_one, start_other) != (at_one, at_other), "two that adjoin are one"
        assert start_one >= at_one and start_other >= at_other and length > 0
        assert one[start_one : start_one + length] == other[start_other : start_other + length]
        at_one, at_other = start_one + length, start_other + length
    first = first_difference(left, right)
    if first is None:
        assert one == other
    else:
        assert one[:first] == other[:first] and one[first : first + 1] != other[first : first + 1]
        assert first == 0 or stretches[0] == (0, 0, first)


def test_an_insertion_and_a_replacement_are_found_where_they_are():
    rng = np.random.default_rng(0)
    row = rng.integers(0, 50_000, 5_000).astype(np.uint64)
    changed = np.concatenate([row[:1_000], ids(1, 2, 3), row[1_000:3_000], ids(9), row[3_001:]])
    assert equal_stretches(row, changed) == [(0, 0, 1_000), (1_000, 1_003, 2_000), (3_001, 3_004, 1_999)]
    assert equal_stretches(row, row) == [(0, 0, 5_000)] and first_difference(row, row) is None
    assert equal_stretches(row, ids()) == [] and first_difference(row, ids()) == 0


def test_of_blocks_that_changed_places_the_longer_one_is_kept():
    short, long = np.arange(100, dtype=np.uint64), np.arange(1_000, 1_300, dtype=np.uint64)
    one, other = np.concatenate([short, long]), np.concatenate([long, short])
    assert equal_stretches(one, other) == [(100, 0, 300)]


def test_windows_that_hash_alike_cost_an_anchor_and_never_make_a_wrong_stretch(monkeypatch):
    monkeypatch.setattr(align, "_windows", lambda row: np.arange(row.size - align._WINDOW + 1, dtype=np.uint64))
    assert equal_stretches(np.arange(500, dtype=np.uint64), np.arange(1_000, 1_500, dtype=np.uint64)) == []


def test_two_texts_that_read_alike_differ_by_their_ids():
    def frame(token_ids: list[int]) -> pl.DataFrame:
        count = len(token_ids)
        return pl.DataFrame(
            {
                "rollout_id": ["r"] * count,
                "model_call_id": ["c"] * count,
                "token_id": pl.Series(token_ids, dtype=pl.UInt64),
                "sampled": [True] * count,
                "logprob": pl.Series([-0.5] * count, dtype=pl.Float32),
                "trainer_logprob": pl.Series([None] * count, dtype=pl.Float32),
                "delta": pl.Series([None] * count, dtype=pl.Float32),
                "weight_version": [0] * count,
            }
        )

    merged = type(VOCABULARY)({**VOCABULARY.pieces, 300: b"llo"}, VOCABULARY.special)
    diff = RowDiff(frame(encode("hello!")), frame([*encode("he"), 300, *encode("!")]), vocabulary=merged)
    assert diff.first == 2 and "first diverging id at 2" in repr(diff)
    assert repr(RowDiff(frame(encode("same")), frame(encode("same")), vocabulary=merged)).endswith("equal")


def arm(rows: list[tuple[str, int, float | None, str | None]]) -> pl.DataFrame:
    """task, index, reward, cause."""
    return pl.DataFrame(
        {
            "group_id": [f"g{i:03d}" for i in range(len(rows))],
            "rollout_id": [f"r{i}" for i in range(len(rows))],
            "task_id": [row[0] for row in rows],
            "index": [row[1] for row in rows],
            "reward": [row[2] for row in rows],
            "cause": pl.Series([row[3] for row in rows], dtype=pl.String),
            "detail": pl.Series(["why" if row[3] == "rollout_failed" else None for row in rows], dtype=pl.String),
            "sample_mask": [0 if row[3] else 1 for row in rows],
            "calls": [2] * len(rows),
            "failed_calls": [0] * len(rows),
            "tokens": [100 + 10 * i for i in range(len(rows))],
            "sampled_tokens": [20] * len(rows),
        }
    )


def test_pairs_are_by_task_seed_and_occurrence_and_the_rest_is_counted():
    one = arm([("t1", 0, 0.0, None), ("t1", 1, 1.0, None), ("t2", 0, 0.2, None), ("t1", 0, 0.4, None)])
    other = arm([("t2", 0, 0.9, None), ("t1", 0, 0.6, None), ("t1", 1, 0.0, "no_root"), ("t3", 0, 1.0, None)])
    pairs = pair_up(one, other)
    assert pairs.select("task_id", "index", "rollout_id", "rollout_id_other").rows() == [
        ("t1", 0, "r0", "r1"),
        ("t1", 1, "r1", "r2"),
        ("t2", 0, "r2", "r0"),
    ]
    found = flips(pairs, solved=0.5)
    assert dict(found.select("rollout_id", "what").rows()) == {
        "r0": "only B solved it",
        "r1": "B rejected: no_root",
        "r2": "only B solved it",
    }


def test_differences_leave_out_what_one_partner_lacks_and_have_an_interval():
    one = arm([(f"t{i}", 0, 0.0, None) for i in range(8)])
    other = arm([(f"t{i}", 0, 0.5 if i % 2 else 0.1, "no_root" if i == 7 else None) for i in range(8)])
    reward, valid, *_ = differences(pair_up(one, other))
    assert reward.pairs == 7 and reward.mean == pytest.approx((4 * 0.1 + 3 * 0.5) / 7)
    assert reward.low is not None and 0.1 <= reward.low < reward.mean < reward.high <= 0.5
    assert valid.pairs == 8 and valid.mean == pytest.approx(-1 / 8)
    assert differences(pair_up(one, other))[0] == reward
    single = differences(pair_up(one.head(1), other.head(1)))[0]
    assert single.low is None and single.mean == pytest.approx(0.1)


def test_calls_are_compared_only_where_both_arms_keep_a_record_of_them():
    one = arm([("t1", 0, 0.0, None)])
    echoed = one.with_columns(calls=pl.lit(0, pl.Int64))
    assert "calls" in [difference.metric for difference in differences(pair_up(one, one))]
    metrics = [difference.metric for difference in differences(pair_up(one, echoed))]
    assert metrics == ["reward", "valid", "tokens", "sampled_tokens"]


@pytest.fixture(scope="module")
def arms(tmp_path_factory) -> tuple[runs.Run, runs.Run]:
    opened = []
    for name, kinds in (("a", ["plain", "retry", "plain"]), ("b", ["plain", "nan", "branch"])):
        stored = StoredRun(tmp_path_factory.mktemp("arms") / name, seed=len(name) + len(opened))
        stored.step(1, [kinds, kinds])
        opened.append(runs.open(stored.finish()))
    return opened[0], opened[1]


def test_a_flip_by_a_rejection_says_why_where_that_is_known():
    pairs = pair_up(arm([("t1", 0, None, "rollout_failed")]), arm([("t1", 0, 0.9, None)]))
    assert flips(pairs, solved=0.5)["what"].to_list() == ["A rejected: rollout_failed: why"]


def test_two_arms_open_on_a_flip_and_show_any_other(arms):
    diff = RowDiff(*arms)
    assert diff.pairs is not None and diff.flips is not None and diff.flips.height >= 1
    assert repr(diff).startswith("6 pairs by task and seed · ")
    html = diff.html()
    assert "B − A" in html and "B rejected: worker_capture_failed" in html and "first diverging id" in html
    live = diff.live
    assert live.arms["all_flips"] == diff.flips.height
    live.chosen = ["a.0.2.0", "b.0.2.0"]
    _, columns = unpack(live.one)
    assert columns["ids"][columns["slot"]].tolist() == arms[0].tokens("a.0.2.0")["token_id"].to_list()
    live.chosen = ["a.0.2.0", "b.9.9.9"]
    assert "no rollout 'b.9.9.9'" in live.missing


def test_two_arms_without_a_flip_open_on_a_pair_that_differs(arms):
    class Same:
        """Arm A again, the third of its six rollouts with another reward that solves no more and no less."""

        def __init__(self) -> None:
            self.rollouts = arms[0].rollouts.with_columns(
                reward=pl.when(pl.int_range(pl.len()) == 2).then(pl.col("reward") * 0.999).otherwise("reward")
            )
            self.calls, self.vocabulary, self.tokens = arms[0].calls, arms[0].vocabulary, arms[0].tokens

    diff = RowDiff(arms[0], Same(), solved=2.0)
    assert diff.flips is not None and diff.flips.is_empty()
    assert diff.names[0] == arms[0].rollouts["rollout_id"][2]


def test_a_flip_without_tokens_is_passed_over_and_no_tokens_at_all_is_an_error(arms):
    class Partly:
        """Arm B whose rejected rollouts, or all rollouts, have no tokens."""

        def __init__(self, lost: set[str]) -> None:
            self.rollouts, self.calls, self.vocabulary = arms[1].rollouts, arms[1].calls, arms[1].vocabulary
            self.lost = lost

        def tokens(self, rollout_id: str, call_id: str | None = None) -> pl.DataFrame:
            if rollout_id in self.lost:
                raise RunStoreError(f"Rollout {rollout_id} has no staged tokens: worker_capture_failed")
            return arms[1].tokens(rollout_id, call_id)

    everything = set(arms[1].rollouts["rollout_id"])
    first = RowDiff(*arms).names[1]
    passed_over = RowDiff(arms[0], Partly({first}))
    assert passed_over.names[1] != first and passed_over.flips is not None
    with pytest.raises(RunStoreError, match="has tokens on both sides"):
        RowDiff(arms[0], Partly(everything))


def test_two_rollouts_of_one_run_need_no_partner(arms):
    run = arms[0]
    diff = RowDiff(run, run, rollouts=("a.0.0.0", "a.0.2.0"))
    assert diff.pairs is None and "a.0.0.0 against a.0.2.0" in repr(diff)


def test_arms_without_a_common_task_are_refused_with_the_way_out(arms, tmp_path):
    class Other:
        rollouts = arms[1].rollouts.with_columns(pl.lit("elsewhere").alias("task_id"))

    with pytest.raises(RunStoreError, match=r"share no task.*rollouts=") as caught:
        RowDiff(arms[0], Other())
    assert "has a partner" in str(caught.value)
    with pytest.raises(RunStoreError, match="two runs or two token frames"):
        RowDiff(arms[0], arms[0].tokens("a.0.0.0"))


def test_one_run_against_itself_compares_the_best_and_the_worst_of_a_group(tmp_path):
    stored = StoredRun(tmp_path / "one")
    stored.step(1, [["plain", "plain", "edit"], ["plain", "retry"]])
    run = runs.open(stored.finish())
    rows = run.rollouts.filter(group_id="g00001", sample_mask=1).sort("reward")["rollout_id"].to_list()
    diff = RowDiff(run, run, group="g00001")
    assert diff.pairs is None and diff.names == (rows[-1], rows[0])
    parted = diff.diverging()
    assert parted["side"].to_list() == ["A", "B"] and parted["position"].to_list() == [diff.first] * 2
    assert parted["token_id"][0] != parted["token_id"][1]
    with pytest.raises(RunStoreError, match="Run one has no group 'g7'"):
        RowDiff(run, run, group="g7")


def test_a_row_that_ends_first_has_no_diverging_token():
    frame = pl.DataFrame(
        {
            "rollout_id": ["r"] * 3,
            "model_call_id": ["c"] * 3,
            "token_id": pl.Series([1, 2, 3], dtype=pl.UInt64),
            "sampled": [True] * 3,
            "logprob": pl.Series([-0.5] * 3, dtype=pl.Float32),
            "trainer_logprob": pl.Series([None] * 3, dtype=pl.Float32),
            "delta": pl.Series([None] * 3, dtype=pl.Float32),
            "advantage": pl.Series([None] * 3, dtype=pl.Float64),
            "weight_version": [0] * 3,
        }
    )
    assert RowDiff(frame, frame.head(2)).diverging()["token_id"].to_list() == [3, None]
    assert RowDiff(frame, frame).diverging().is_empty()


def test_arms_without_a_valid_pair_have_no_difference_of_rewards(arms):
    one = arm([("t1", 0, 0.0, "no_root")])
    reward, valid, *_ = differences(pair_up(one, one))
    assert (reward.pairs, reward.mean, valid.pairs) == (0, None, 1)

    class Rejected:
        """Arm B, all of its rollouts rejected."""

        rollouts = arms[1].rollouts.with_columns(sample_mask=pl.lit(0), cause=pl.lit("no_root"))
        calls, vocabulary, tokens = arms[1].calls, arms[1].vocabulary, arms[1].tokens

    diff = RowDiff(arms[0], Rejected())
    assert diff.differences[0].mean is None and ">–<" in diff.html()


def test_partners_that_are_missing_and_flips_that_are_not_shown_are_counted(arms):
    class Shorter:
        """Arm B without its last rollout."""

        rollouts = arms[1].rollouts.head(5)
        calls, vocabulary, tokens = arms[1].calls, arms[1].vocabulary, arms[1].tokens

    diff = RowDiff(arms[0], Shorter(), max_flips=1)
    assert diff.flips is not None and diff.flips.height > 1
    assert "Without a partner: 1 of A, 0 of B" in diff.html()
    assert f"Showing 1 of {diff.flips.height} flips; all: .flips" in diff.html()


def test_named_rollouts_of_arms_that_share_no_task_are_compared_without_numbers(arms):
    class Elsewhere:
        rollouts = arms[1].rollouts.with_columns(pl.lit("elsewhere").alias("task_id"))
        calls, vocabulary, tokens = arms[1].calls, arms[1].vocabulary, arms[1].tokens

    diff = RowDiff(arms[0], Elsewhere(), rollouts=("a.0.0.0", "b.0.0.0"))
    assert diff.pairs is None and "a.0.0.0 against b.0.0.0" in repr(diff)
