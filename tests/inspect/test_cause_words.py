"""Causes: a code is never alone where a person reads it, and every view takes its words from the one list."""

from __future__ import annotations

from types import SimpleNamespace

import polars as pl
import pytest

from workbench import runs
from workbench.demo import recorded_run
from workbench.inspect import PoisonTable
from workbench.inspect import html as markup
from workbench.inspect.arms import flips, pair_up
from workbench.inspect.causes import in_words
from workbench.inspect.custody import rejection
from workbench.wire.causes import REASONS

SAID = "response_id_no_match,no_content_match"
WORDS = (
    "response_id_no_match (no captured call was served under the response's id), "
    "no_content_match (no captured call was answered with the response's content)"
)


def test_what_witnesses_said_has_its_words_behind_each_code():
    assert in_words(SAID) == WORDS
    named = "witness_disagreement[response_id=a1;content=b2]"
    assert f"{named} (response id, content or declaration name calls" in in_words(f"no_content_match,{named}")
    assert in_words("corroborated_by=content").startswith("corroborated_by=content (these witnesses")
    both = in_words("no_response_object,ambiguous_terminal", "ambiguous_terminal")
    assert both == "no_response_object (the agent left no response as it was served, so nothing could be compared)"
    assert in_words(f"{SAID}; what it nearly is, in words") == f"{WORDS}; what it nearly is, in words"
    for code in REASONS:
        assert in_words(code).startswith(f"{code} (")


@pytest.mark.parametrize(
    "detail", ["The receipt lists no call.", "no_such_code", "a sentence, with a comma", "one; more", ""]
)
def test_what_is_no_code_stays_as_it_is(detail):
    assert in_words(detail) == detail and in_words(None) == ""


def test_a_stack_trace_above_that_is_nowhere_near_is_left_out():
    engine = "Error code: 500 - EngineCore encountered an issue."
    assert in_words(f"{engine} See stack trace (above) for the root cause.") == engine


def test_every_view_of_a_rejected_rollout_has_the_words():
    run = runs.open(recorded_run())
    rejected = pl.col("cause").is_not_null()
    rollouts = run.rollouts.with_columns(detail=pl.when(rejected).then(pl.lit(SAID)))
    changed = SimpleNamespace(rollouts=rollouts, calls=run.calls)
    assert markup.escape(WORDS) in PoisonTable(changed).html()
    assert {row["detail"] for row in PoisonTable(changed).live.causes.rollouts} == {WORDS}
    assert rejection(rollouts.filter(rejected).row(0, named=True)).endswith(f": {WORDS}")
    pairs = pair_up(run.rollouts.with_columns(sample_mask=1, cause=None), rollouts)
    assert f"B rejected: unresolved_parent: {WORDS}" in flips(pairs, solved=2.0)["what"].to_list()
