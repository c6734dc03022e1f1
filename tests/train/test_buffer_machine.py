"""The replay buffer under any order of operations, against a model.

The model keeps each group's state in a dictionary and computes what a step must get from the words of the samplers'
documentation, with none of their code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from workbench.errors import ReplayBufferError
from workbench.train.buffer import ReplayBuffer
from workbench.train.samplers import SAMPLERS, sampler

CAPACITY = 5
WINDOW = 1


def made(name):
    return ReplayBuffer(CAPACITY, sampler(name, WINDOW))


def keys(group, n=2):
    return [f"{group}.{i}.0" for i in range(n)]


def ids(entries):
    return [entry.group_id for entry in entries]


@dataclass
class Model:
    """What the buffer should hold: group → [state, version] in reservation order; one that left keeps its state."""

    sampler: str
    groups: dict[str, list] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)

    def named(self, *states):
        return [group for group, (state, _) in self.groups.items() if state in states]

    @property
    def free(self):
        return CAPACITY - len(self.named("reserved", "ready"))

    def take(self, count, version):
        inside = self.named("reserved", "ready")
        if self.sampler == "windowed":
            for group in inside:
                if version - self.groups[group][1] > WINDOW:
                    self.groups[group][0] = "discarded"
                    self.evicted.append(group)
        ready = self.named("ready")
        if self.sampler == "in_order":
            waiting = self.named("reserved")
            first = inside.index(waiting[0]) if waiting else len(inside)
            ready = inside[:first]
        else:
            ready.sort(key=lambda group: self.groups[group][1])  # stable: equally old ones in reservation order
        if len(ready) < count:
            return []
        for group in ready[:count]:
            self.groups[group][0] = "consumed"
        return ready[:count]


class AgainstAModel(RuleBasedStateMachine):
    known = Bundle("known")

    def __init__(self, name):
        super().__init__()
        self.buffer, self.model, self.version = made(name), Model(name), 0

    @rule(target=known, age=st.integers(0, 2))
    def reserve_the_next(self, age):
        return self._reserve(f"g{len(self.model.groups)}", age, 2)

    @rule(target=known, number=st.integers(0, 30), age=st.integers(0, 2), rollouts=st.integers(0, 2))
    def reserve_anything(self, number, age, rollouts):
        return self._reserve(f"g{number}", age, rollouts)

    def _reserve(self, group, age, rollouts):
        version = max(0, self.version - age)
        may = group not in self.model.groups and self.model.free > 0 and rollouts > 0
        try:
            self.buffer.reserve(group, keys(group, rollouts), version)
        except ReplayBufferError:
            assert not may
        else:
            assert may
            self.model.groups[group] = ["reserved", version]
        return group

    @precondition(lambda self: self.model.named("reserved"))
    @rule(pick=st.integers(0, CAPACITY - 1), fresher=st.integers(-1, 1))
    def commit_a_reserved_one(self, pick, fresher):
        reserved = self.buffer.groups("reserved")
        entry = reserved[pick % len(reserved)]
        self._commit(entry.group_id, len(entry.rollout_ids), fresher)

    @rule(group=known, n=st.integers(1, 2))
    def commit_anything(self, group, n):
        self._commit(group, n, 0)

    def _commit(self, group, n, fresher):
        state, version = self.model.groups.get(group, ("unknown", 0))
        entries = {e.group_id: e for e in self.buffer.groups("reserved")}
        fits = state == "reserved" and len(entries[group].rollout_ids) == n
        try:
            committed = self.buffer.commit_finalized(group, keys(group, n), weight_version=version + fresher)
        except ReplayBufferError:
            assert state in ("unknown", "ready", "consumed") or not fits
        else:
            assert committed == (state == "reserved")
            assert fits or state == "discarded"
            if committed:
                self.model.groups[group] = ["ready", version + fresher]

    @rule(group=known)
    def abort(self, group):
        state = self.model.groups.get(group, ["unknown"])[0]
        try:
            gone = self.buffer.abort(group)
        except ReplayBufferError:
            assert state == "ready"
        else:
            self._left(group, gone, state)

    @rule(group=known)
    def remove(self, group):
        self._left(group, self.buffer.remove(group), self.model.groups.get(group, ["unknown"])[0])

    def _left(self, group, gone, state):
        assert (gone is not None) == (state in ("reserved", "ready"))
        if gone is not None:
            assert gone.group_id == group and bool(gone.train_keys) == (state == "ready")
            self.model.groups[group][0] = "discarded"

    @rule(count=st.sampled_from([1, 1, 2, 3]))
    def take(self, count):
        taken = self.buffer.take(count, self.version)
        assert ids(taken) == self.model.take(count, self.version)
        assert all(entry.train_keys for entry in taken)

    @rule()
    def drain(self):
        assert ids(self.buffer.drain_evicted()) == self.model.evicted
        self.model.evicted = []

    @rule()
    def new_version(self):
        self.version += 1

    @invariant()
    def buffer_and_model_agree(self):
        for state in ("reserved", "ready"):
            assert ids(self.buffer.groups(state)) == self.model.named(state)
        assert self.buffer.free == self.model.free >= 0
        assert all(self.buffer.state(group) == state for group, (state, _) in self.model.groups.items())


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_order_of_operations_does_what_the_model_says(name):
    steps = settings(max_examples=50, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(lambda: AgainstAModel(name), settings=steps)
