"""What the trainer's own detectors found stands in the view of log-prob differences, by step."""

from __future__ import annotations

from types import SimpleNamespace

import polars as pl

from workbench import demo, runs
from workbench.inspect import LogprobDelta


def test_detectors_are_named_with_their_steps():
    run = runs.open(demo.recorded_run())
    said = ["temperature", None, "temperature, truncated_support", None]
    steps = run.steps.with_columns(pl.Series("agreement_suspect", said, dtype=pl.String))
    view = LogprobDelta(SimpleNamespace(logprobs=run.logprobs, vocabulary=run.vocabulary, steps=steps))
    assert view.suspects == {"temperature": [1, 3], "truncated_support": [3]}
    html = view.html()
    assert "sharper or flatter" in html and "(steps 1, 3)" in html and "a part of the vocabulary only" in html
    quiet = LogprobDelta(run)
    assert quiet.suspects == {} and "sharper or flatter" not in quiet.html()
