"""The replay buffer: nothing consumed twice, nothing lost, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from workbench.errors import RecipeError, ReplayBufferError
from workbench.train.buffer import SAMPLERS, ReplayBuffer


def keys(group_id, n=2):
    return [f"{group_id}.{i}.0" for i in range(n)]


def filled(n, sampler="weight_fifo", version=0, **options):
    buffer = ReplayBuffer(max(n, 1), sampler, **options)
    for i in range(n):
        buffer.reserve(f"g{i}", keys(f"g{i}"), version)
        buffer.commit_finalized(f"g{i}", keys(f"g{i}"))
    return buffer


def ids(entries):
    return [e.group_id for e in entries]


def test_ten_groups_ready_three_asked_seven_left():
    buffer = filled(10)
    assert ids(buffer.take(3, 0)) == ["g0", "g1", "g2"]
    assert ids(buffer.groups("ready")) == [f"g{i}" for i in range(3, 10)]
    assert buffer.free == 3


def test_fewer_groups_than_asked_gives_none_and_keeps_all():
    buffer = filled(2)
    assert buffer.take(3, 0) == []
    assert ids(buffer.take(2, 0)) == ["g0", "g1"]


def test_removing_two_groups_at_once_leaves_the_third():
    buffer = filled(4)
    assert buffer.remove("g1").train_keys == ("g1.0.0", "g1.1.0")
    assert buffer.remove("g2").reason == "removed"
    assert buffer.remove("g2") is None
    assert ids(buffer.groups("ready")) == ["g0", "g3"]


def test_in_order_waits_for_the_earlier_group_and_weight_fifo_does_not():
    for sampler, expected in (("in_order", []), ("weight_fifo", ["g1"])):
        buffer = ReplayBuffer(2, sampler)
        for g in ("g0", "g1"):
            buffer.reserve(g, keys(g), 0)
        buffer.commit_finalized("g1", keys("g1"))
        assert ids(buffer.take(1, 0)) == expected


def test_an_aborted_group_leaves_no_hole_in_the_order():
    buffer = ReplayBuffer(2, "in_order")
    for g in ("g0", "g1"):
        buffer.reserve(g, keys(g), 0)
    buffer.commit_finalized("g1", keys("g1"))
    gone = buffer.abort("g0", "finalizer died")
    assert (gone.rollout_ids, gone.train_keys, gone.reason) == (("g0.0.0", "g0.1.0"), (), "finalizer died")
    assert ids(buffer.take(1, 0)) == ["g1"]


def test_weight_fifo_gives_the_oldest_weights_first():
    buffer = ReplayBuffer(3, "weight_fifo")
    for g, dispatched, oldest in (("g0", 3, 3), ("g1", 4, 2), ("g2", 5, None)):
        buffer.reserve(g, keys(g), dispatched)
        buffer.commit_finalized(g, keys(g), weight_version=oldest)
    assert [(e.group_id, e.weight_version) for e in buffer.take(3, 5)] == [("g1", 2), ("g0", 3), ("g2", 5)]


def test_windowed_evicts_what_is_too_stale_and_says_what_to_clear():
    buffer = filled(3, "windowed", max_staleness=1)
    assert ids(buffer.take(1, 1)) == ["g0"]
    assert buffer.take(1, 2) == []
    evicted = buffer.drain_evicted()
    assert [(d.group_id, d.train_keys) for d in evicted] == [
        ("g1", ("g1.0.0", "g1.1.0")),
        ("g2", ("g2.0.0", "g2.1.0")),
    ]
    assert buffer.drain_evicted() == []
    assert buffer.free == 3


def test_a_group_evicted_while_it_is_written_is_told_so_at_commit():
    buffer = ReplayBuffer(1, "windowed", max_staleness=0)
    buffer.reserve("g0", keys("g0"), 0)
    assert buffer.take(1, 1) == []
    assert [d.train_keys for d in buffer.drain_evicted()] == [()]
    assert buffer.commit_finalized("g0", keys("g0")) is False
    assert buffer.groups("ready") == []
    assert buffer.abort("g0") is None


def test_it_is_bounded_and_refuses_what_is_out_of_turn():
    buffer = filled(1)
    with pytest.raises(ReplayBufferError, match="1 of 1 places"):
        buffer.reserve("g1", keys("g1"), 0)
    with pytest.raises(ReplayBufferError, match="already ready"):
        buffer.reserve("g0", keys("g0"), 0)
    with pytest.raises(ReplayBufferError, match="is ready"):
        buffer.commit_finalized("g0", keys("g0"))
    with pytest.raises(ReplayBufferError, match="remove it instead"):
        buffer.abort("g0")
    with pytest.raises(ReplayBufferError, match="not reserved"):
        buffer.commit_finalized("g7", keys("g7"))
    buffer.take(1, 0)
    with pytest.raises(ReplayBufferError, match="already consumed"):
        buffer.reserve("g0", keys("g0"), 0)
    buffer.reserve("g2", keys("g2"), 0)
    with pytest.raises(ReplayBufferError, match="exactly N rows"):
        buffer.commit_finalized("g2", keys("g2", 1))
    with pytest.raises(ReplayBufferError, match="1 group or more"):
        buffer.take(0, 0)


def test_settings_are_refused_with_the_allowed_values():
    with pytest.raises(RecipeError, match="in_order, weight_fifo, windowed"):
        ReplayBuffer(1, "random")
    with pytest.raises(RecipeError, match="max_staleness"):
        ReplayBuffer(1, "windowed")
    with pytest.raises(RecipeError, match="1 group or more"):
        ReplayBuffer(0)


class BufferMachine(RuleBasedStateMachine):
    """Any order of events: each group leaves exactly once, as trained or as discarded."""

    groups = Bundle("groups")

    def __init__(self):
        super().__init__()
        self.version = 0
        self.buffer = None
        self.known: set[str] = set()
        self.left: list[str] = []

    @rule(target=groups, number=st.integers(0, 30), sampler=st.sampled_from(SAMPLERS), age=st.integers(0, 2))
    def reserve(self, number, sampler, age):
        if self.buffer is None:
            self.buffer = ReplayBuffer(5, sampler, max_staleness=1 if sampler == "windowed" else None)
        group = f"g{number}"
        may = group not in self.known and self.buffer.free > 0
        try:
            self.buffer.reserve(group, keys(group), max(0, self.version - age))
            assert may
            self.known.add(group)
        except ReplayBufferError:
            assert not may
        return group

    @rule(group=groups)
    def commit(self, group):
        before = self.buffer.state(group)
        try:
            committed = self.buffer.commit_finalized(group, keys(group))
        except ReplayBufferError:
            assert before in (None, "ready", "consumed")
        else:
            assert committed == (before == "reserved")

    @rule(group=groups)
    def remove(self, group):
        gone = self.buffer.remove(group)
        if gone is not None:
            self.left.append(gone.group_id)

    @rule(count=st.integers(1, 4))
    def take(self, count):
        if self.buffer is None:
            return
        ready = len(self.buffer.groups("ready"))
        taken = self.buffer.take(count, self.version)
        evicted = [d.group_id for d in self.buffer.drain_evicted()]
        assert len(taken) in (0, count) and all(e.ready for e in taken)
        assert len(self.buffer.groups("ready")) >= ready - len(taken) - len(evicted)
        self.left += ids(taken) + evicted

    @rule()
    def train(self):
        self.version += 1

    @invariant()
    def every_group_is_in_exactly_one_place(self):
        if self.buffer is None:
            return
        inside = ids(self.buffer.groups("ready")) + ids(self.buffer.groups("reserved"))
        assert sorted(inside + self.left) == sorted(self.known)
        assert len(inside) <= 5 and self.buffer.free == 5 - len(inside)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
