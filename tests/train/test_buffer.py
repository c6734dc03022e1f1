"""The replay buffer: nothing consumed twice, nothing lost, whatever the order of events."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workbench.config import load_recipe
from workbench.errors import RecipeError, ReplayBufferError
from workbench.train.buffer import ReplayBuffer
from workbench.train.samplers import Sampler, Selection, sampler
from workbench.train.samplers.in_order import InOrder


def keys(group_id, n=2):
    return [f"{group_id}.{i}.0" for i in range(n)]


def filled(n, name="weight_fifo", version=0, **options):
    buffer = ReplayBuffer(max(n, 1), sampler(name, **options))
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
    for name, expected in (("in_order", []), ("weight_fifo", ["g1"])):
        buffer = ReplayBuffer(2, name)
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
    buffer = ReplayBuffer(1, sampler("windowed", max_staleness=0))
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


@dataclass(frozen=True)
class NewestFirst(Sampler):
    """A sampler of one's own: twice the groups of a step must be ready, and the newest half of them is taken."""

    places: int = 2

    def select(self, entries, count, version):
        ready = [entry for entry in entries if entry.ready]
        return Selection(ready[::-1][:count] if len(ready) >= self.places * count else [], [])

    def places_needed(self, groups_per_step):
        return self.places * groups_per_step


class Unruly(Sampler):
    """Chooses what is not ready."""

    def select(self, entries, count, version):
        return Selection(list(entries[:count]), [])


def train_section(*overrides):
    return load_recipe("cpu_smoke", ["train.groups_per_step=3", *overrides]).train


@pytest.mark.parametrize(
    ("overrides", "capacity"),
    [
        ((), 9),
        (("train.max_staleness=0",), 6),
        (("train.buffer_groups=3",), 3),
        (("train.sampler.name=windowed", "train.buffer_groups=4"), 4),
        ((f"train.sampler.name={__name__}:NewestFirst", "train.sampler.options.places=5"), 15),
    ],
)
def test_a_recipe_makes_its_buffer(overrides, capacity):
    assert ReplayBuffer.of(train_section(*overrides)).capacity == capacity


def test_a_windowed_sampler_follows_the_recipes_staleness_unless_told_otherwise():
    for overrides, kept in ((("train.max_staleness=2",), True), (("train.sampler.options.max_staleness=1",), False)):
        buffer = ReplayBuffer.of(train_section("train.sampler.name=windowed", *overrides))
        buffer.reserve("g0", keys("g0"), 3)
        buffer.take(1, 5)
        assert (buffer.state("g0") == "reserved") is kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.buffer_groups=2",), "train.buffer_groups: expected at least 3"),
        ((f"train.sampler.name={__name__}:NewestFirst", "train.buffer_groups=5"), "expected at least 6"),
        (("train.sampler.name=in_ordr",), "train.sampler: no sampler 'in_ordr', did you mean in_order"),
        (("train.sampler.options.window=1",), "train.sampler: sampler in_order has no option 'window'; it has: none"),
        (("train.sampler.name=windowed", "train.sampler.options.max_staleness=-1"), "whole number ≥ 0, got -1"),
        (
            ("train.sampler.name=no.such:Thing",),
            "cannot be imported (ModuleNotFoundError: No module named 'no')",
        ),
        ((f"train.sampler.name={__name__}:Nobody",), "has no 'Nobody'. It has "),
        ((f"train.sampler.name={__name__}:keys",), "expected a subclass of workbench.train.samplers.Sampler"),
    ],
)
def test_a_recipe_that_would_deadlock_or_cannot_be_meant_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=r"^train\.") as caught:
        ReplayBuffer.of(train_section(*overrides))
    assert message in str(caught.value)


@dataclass(frozen=True)
class Picky(InOrder):
    """One's own sampler that takes no odd window."""

    window: int = 2

    def __post_init__(self) -> None:
        if self.window % 2:
            raise ValueError("an even window")


def test_what_a_sampler_of_ones_own_does_not_take_is_said_in_its_words():
    with pytest.raises(RecipeError, match=r"sampler .*:Picky does not take .*'window': 3.*: an even window"):
        sampler(f"{__name__}:Picky", window=3)


def test_a_buffer_without_room_is_refused():
    with pytest.raises(RecipeError, match="needs room for 1 group or more, got 0"):
        ReplayBuffer(0)


def test_the_capacity_that_is_asked_for_is_enough_and_one_less_is_not():
    for places, trained in ((5, 0), (6, 3)):
        buffer = ReplayBuffer(places, NewestFirst())
        for i in range(places):
            buffer.reserve(f"g{i}", keys(f"g{i}"))
            buffer.commit_finalized(f"g{i}", keys(f"g{i}"))
        assert buffer.free == 0 and len(buffer.take(3, 0)) == trained


def test_a_sampler_that_breaks_the_rules_is_named_and_changes_nothing():
    buffer = ReplayBuffer(2, Unruly())
    buffer.reserve("g0", keys("g0"))
    with pytest.raises(ReplayBufferError, match=r"sampler Unruly.*chose \['g0'\]"):
        buffer.take(1, 0)
    assert buffer.state("g0") == "reserved"
