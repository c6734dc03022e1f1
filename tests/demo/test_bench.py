"""The bench is the product: what is captured on it verifies, and a history that was changed does not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from workbench.campaign.verify import verify_run
from workbench.demo import recorded_ledger, recorded_run
from workbench.demo.bench import open_bench
from workbench.errors import RunStoreError, SetupError
from workbench.finalizer import verify_and_linearize
from workbench.gateway.settings import WORKER_TOKEN
from workbench.wire import Cause

ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
MORE = {"role": "user", "content": "And then?"}
SPELT = {"token_ids": [43, 86, 223, 84, 67, 75, 80, 85, 16, 2]}


async def test_what_is_captured_on_the_bench_is_an_ordinary_run(tmp_path: Path) -> None:
    async with open_bench([SPELT, {"text": "Take an umbrella."}], path=tmp_path / "run") as bench:
        first = await bench.say("r.0.0.0", ASK)
        answer = first["choices"][0]["message"]
        assert answer["content"] == "It rains."
        last = await bench.say("r.0.0.0", [*ASK, answer, MORE])
        outcome = await bench.finish("r.0.0.0", last)
        (summary,) = await bench.finalise("g", [outcome])
        assert summary.sample_mask == 1 and summary.terminal_selection == "response_id"
        row = verify_and_linearize(bench.run.receipt("r.0.0.0"), bench.run.staged("r.0.0.0"))
        sampled = row.token_ids[row.token_mask == 1]
        assert sampled[: len(SPELT["token_ids"])].tolist() == SPELT["token_ids"], "as sampled, not as encoded"
        assert np.array_equal(row.token_ids, bench.run.tokens("r.0.0.0")["token_id"].to_numpy())
    report = verify_run(tmp_path / "run")
    assert report.ok and report.calls == 2
    assert bench.run.campaign["state"][0] == "done"


async def test_a_changed_history_on_the_bench_has_no_vote(tmp_path: Path) -> None:
    async with open_bench([{"text": "It rains."}], path=tmp_path / "run") as bench:
        await bench.say("r.0.0.0", ASK)
        last = await bench.say("r.0.0.0", [*ASK, {"role": "assistant", "content": "It snows."}, MORE])
        (summary,) = await bench.finalise("g", [await bench.finish("r.0.0.0", last)])
    assert (summary.sample_mask, summary.cause) == (0, Cause.UNRESOLVED_PARENT)


def test_an_installation_without_its_recordings_says_how_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.demo._RUN", tmp_path)
    monkeypatch.setattr("workbench.demo._LEDGER", tmp_path)
    with pytest.raises(RunStoreError, match=r"python -m workbench\.campaign\.record_demo reports/RUN"):
        recorded_run()
    with pytest.raises(RunStoreError, match="install the package again"):
        recorded_ledger()


async def test_the_environment_is_as_it_was_when_a_bench_is_closed(monkeypatch):
    for before in ("mine", None):
        if before is None:
            monkeypatch.delenv(WORKER_TOKEN)
        else:
            monkeypatch.setenv(WORKER_TOKEN, before)
        async with open_bench([{"text": "yes"}]):
            pass
        assert os.environ.get(WORKER_TOKEN) == before


async def test_a_line_of_the_script_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"Line 2 of the script cannot be written as JSON \(.*\): \{'text': <object"):
        async with open_bench([{"text": "a"}, {"text": object()}], path=tmp_path / "run"):
            pass
