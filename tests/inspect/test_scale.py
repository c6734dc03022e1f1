"""Scale: the largest rollouts stay small in the notebook, and quick by a margin that no machine should miss.

Sizes are asserted as they are promised; times ten times as wide (benchmarks/inspectors.py measures them).
"""

from __future__ import annotations

import time

import large
import numpy as np
import pytest

from workbench.inspect import PrefixChain, RowDiff, TokenStrip
from workbench.inspect.align import equal_stretches
from workbench.inspect.live.pack import unpack

MEGABYTE = 1_000_000
TOKENS, CALLS = 131_072, 500


def size_of(view) -> int:
    data, _ = view._repr_mimebundle_()
    return sum(len(value) for value in data.values())


def test_a_strip_of_131072_tokens_fits_into_a_megabyte_live_and_static():
    frame = large.row(TOKENS, CALLS)
    began = time.process_time()
    strip = TokenStrip(frame, vocabulary=large.vocabulary())
    widget = strip.live
    assert time.process_time() - began < 5
    assert len(widget.block) < MEGABYTE and size_of(strip) < MEGABYTE
    words, columns = unpack(widget.block)
    assert np.array_equal(columns["ids"][columns["slot"]], frame["token_id"].to_numpy())
    assert len(words["calls"]) == CALLS and words["n"] == TOKENS
    assert "of 131,072; others:" in strip.html()


@pytest.mark.parametrize("shape", ["chain", "star", "bush"])
def test_a_tree_of_10000_calls_is_whole_live_and_bounded_static(shape):
    calls = large.tree(10_000, shape)
    began = time.process_time()
    chain = PrefixChain(calls)
    assert time.process_time() - began < 5  # a tenth of it alone; comparing each call with each would take minutes
    words, columns = unpack(chain.live.chain.block)
    assert sorted(words["ids"]) == sorted(calls["model_call_id"]) and columns["row"].size == 10_000
    assert len(chain.live.chain.block) < MEGABYTE and size_of(chain) < MEGABYTE
    assert "of 10,000 calls drawn and 200 listed" in chain.html()


def test_a_chain_of_10000_calls_is_one_path_and_siblings_are_one_each():
    assert {place.row for place in PrefixChain(large.tree(10_000, "chain")).places} == {0}
    star = PrefixChain(large.tree(10_000, "star")).places
    assert len({place.row for place in star}) == 9_999 and max(place.column for place in star) == 1


def test_50000_tokens_are_compared_with_50000():
    one = large.row(50_000, 200)
    other = large.edited(one, every=50)
    began = time.process_time()
    diff = RowDiff(one, other, vocabulary=large.vocabulary())
    widget = diff.live
    assert time.process_time() - began < 5
    assert len(widget.one) + len(widget.other) + len(widget.block) < MEGABYTE and size_of(diff) < MEGABYTE
    ids_one, ids_other = one["token_id"].to_numpy(), other["token_id"].to_numpy()
    assert sum(length for _, _, length in equal_stretches(ids_one, ids_other)) > 0.9 * 48_000
