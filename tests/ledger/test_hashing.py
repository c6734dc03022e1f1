"""Hashing requests that continue each other: always the values of the whole hashes, whatever came before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import FingerprintError
from workbench.ledger import hashing
from workbench.ledger.hashing import RequestHasher
from workbench.wire import assistant_fingerprint, conversation_digest

TEXTS = st.sampled_from(["", "a", "é", "1", "true", '{"x": 1}'])
CALLS = st.fixed_dictionaries({"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})})
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXTS}),
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": st.lists(CALLS, max_size=2)}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.sampled_from([None, 5, [{"type": "x", "v": 1}]])}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.sampled_from([[{"type": "x", "v": True}], ["a"]])}),
)


def outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except FingerprintError as error:
        return str(error)


@given(st.lists(ITEMS, max_size=8), st.lists(st.tuples(st.integers(0, 8), st.lists(ITEMS, max_size=3)), max_size=12))
def test_every_request_has_the_hashes_of_its_own_items(first, branches) -> None:
    hasher, items = RequestHasher(), first
    for cut, added in [(len(first), []), *branches]:
        items = copy.deepcopy(items[:cut]) + added
        hashes = hasher.hashes(items)
        for more in ([], [{"role": "assistant", "content": "more"}]):
            assert outcome(hashes.assistant, more) == outcome(assistant_fingerprint, [*items, *more])
        for length in range(len(items) + 1):
            assert outcome(hashes.conversation, length) == outcome(conversation_digest, items[:length])


def test_a_request_that_goes_on_hashes_only_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher, items, added = RequestHasher(), [{"role": "user", "content": "begin"}], []
    add = hashing.ConversationHasher.add
    monkeypatch.setattr(hashing.ConversationHasher, "add", lambda self, item: (added.append(item), add(self, item)))
    for number in range(20):
        hashes = hasher.hashes(copy.deepcopy(items))
        hashes.conversation(max(len(items) - 2, 0))
        items = [*items, {"role": "assistant", "content": f"{number}"}, {"role": "user", "content": "and"}]
    assert len(added) == len(items) - 2


@pytest.mark.parametrize("odd", [{1: 2}, {"role": "user", "content": "\ud800"}, "no object", object()])
def test_what_json_cannot_hold_is_refused_as_before(odd: Any) -> None:
    hasher = RequestHasher()
    hasher.hashes([{"role": "user", "content": "a"}])
    items = [{"role": "user", "content": "a"}, odd]
    assert outcome(hasher.hashes(items).conversation, 2) == outcome(conversation_digest, items)
    assert hasher.hashes(items).conversation(1) == conversation_digest(items[:1])
