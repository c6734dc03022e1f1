"""Training rows: what the finalizer wrote comes back whole and in order, or the step does not happen."""

from __future__ import annotations

import asyncio

import numpy as np
import orjson
import pytest
from train.samples import row

from workbench.errors import TrainerError
from workbench.finalizer.rows import GroupRow, pack_row, publish_rows
from workbench.train.rows import TrainPartition, TrainRow, match_rows, unpack_row
from workbench.train.votes import cast_votes


def group_row(index: int, length: int, reward: float | None = 0.5, sample_mask: int = 1) -> GroupRow:
    made = row(index, length, sampled=slice(3, length), valid=bool(sample_mask))
    return GroupRow(
        rollout_id=f"run.0.{index}.0", group_id="run.0", index=index, reward=reward, reward_components={},
        sample_mask=sample_mask, prompt_len=3, model_call_ids=["c"], weight_versions=[2],
        weight_version_spans=[["c", 3, length, 2]], link_spans=[["c", 3, length - 3]], sampling=[{}], cause=None,
        token_ids=made.token_ids.astype(np.uint64), token_mask=made.token_mask, logprobs=made.logprobs,
    )  # fmt: skip


def assert_same(read: TrainRow, written: GroupRow) -> None:
    assert (read.rollout_id, read.group_id, read.index) == (written.rollout_id, written.group_id, written.index)
    assert (read.reward, read.sample_mask) == (written.reward, bool(written.sample_mask))
    np.testing.assert_array_equal(read.token_ids, written.token_ids.astype(np.int64))
    np.testing.assert_array_equal(read.token_mask, written.token_mask.astype(bool))
    assert read.logprobs.tobytes() == written.logprobs.tobytes()


def test_a_packed_row_reads_back():
    written = group_row(1, 12)
    assert_same(unpack_row(pack_row(written)), written)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus-baseline"])
def test_a_placeholder_that_nobody_gave_a_reward_moves_no_sibling(name):
    """What a rollout whose agent or reward failed comes to the trainer as."""
    group = [group_row(0, 12, reward=1.0), group_row(1, 12, reward=0.0), group_row(2, 12, reward=0.25)]
    failed = group_row(3, 12, reward=None, sample_mask=0)
    alone, beside = [unpack_row(pack_row(row)) for row in group], unpack_row(pack_row(failed))
    assert np.isnan(beside.reward)
    expected = cast_votes(alone, version=2, advantage={"name": name})
    ballot = cast_votes([beside, *alone], version=2, advantage={"name": name})
    np.testing.assert_array_equal(ballot.advantages, [0.0, *expected.advantages])
    assert ballot.metrics([beside, *alone])["reward_mean"] == expected.metrics(alone)["reward_mean"]


def test_a_placeholder_has_no_token_in_the_loss_even_if_its_mask_says_so():
    made = row(0, 8, sampled=slice(2, 8))
    placeholder = TrainRow("r.0.0.0", "r.0", 0, 1.0, False, made.token_ids, made.token_mask, made.logprobs)
    assert placeholder.token_mask.any() and not placeholder.loss_mask.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"meta": None}, "without meta"),
        ({"meta": np.frombuffer(b"{", np.uint8)}, "metadata cannot be read"),
        ({"meta": np.frombuffer(orjson.dumps({"rollout_id": "r"}), np.uint8)}, "group_id"),
        ({"token_mask": np.zeros(12, np.float32)}, "token_mask must be uint8"),
        ({"logprobs": np.zeros(11, np.float32)}, "one length"),
        ({"token_mask": np.ones(12, np.uint8)}, "first token is marked as sampled"),
        ({"routes": np.zeros((12, 2, 2), np.float32)}, "routes must be int8, int16 or int32, got float32"),
        ({"routes": np.zeros((11, 2, 2), np.int16)}, r"expected routes \[12, layers, topk\], got \[11, 2, 2\]"),
        ({"logprobs": np.full(12, np.nan, np.float32)}, "log-prob at position 3 is nan"),
    ],
)
def test_a_damaged_row_is_named(change, says):
    columns = pack_row(group_row(1, 12)) | change
    with pytest.raises(TrainerError, match=says):
        unpack_row({name: column for name, column in columns.items() if column is not None})


def test_rows_that_are_missing_foreign_or_twice_are_named():
    rows = [row(i, 6, sampled=slice(2, 6)) for i in range(3)]
    keys = [item.rollout_id for item in rows]
    assert match_rows(keys[::-1], rows) == rows[::-1]
    with pytest.raises(TrainerError, match=r"missing \['run.0.2.0'\]"):
        match_rows(keys, rows[:2])
    with pytest.raises(TrainerError, match=r"not asked for \['run.0.2.0'\]"):
        match_rows(keys[:2], rows)
    with pytest.raises(TrainerError, match="twice"):
        match_rows([*keys, keys[0]], rows)


@pytest.mark.ray
def test_rows_from_transfer_queue_in_the_order_asked(tq):
    written = [group_row(index, 10 + index, sample_mask=int(index != 2)) for index in range(4)]
    keys = asyncio.run(publish_rows(written, 2))
    partition = TrainPartition(deadline_s=20.0)
    for read, expected in zip(partition.fetch(keys[::-1]), written[::-1], strict=True):
        assert_same(read, expected)
    with pytest.raises(TrainerError, match=r"missing \['run.0.9.0'\]"):
        partition.fetch([*keys, "run.0.9.0"])
    partition.clear(keys)
    with pytest.raises(TrainerError):
        partition.fetch(keys)
