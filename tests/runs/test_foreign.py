"""Foreign ledgers: one written by the reference implementation opens as the same frames."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import polars as pl
import pytest

from workbench import runs
from workbench.errors import RunStoreError
from workbench.runs import frames

FOREIGN = Path(__file__).parents[1] / "conformance" / "foreign_ledger"


@pytest.fixture(scope="module")
def ledger() -> runs.ForeignLedger:
    return runs.open_ledger(FOREIGN / "ledger")


@pytest.fixture(scope="module")
def truth() -> dict[str, dict]:
    rows = [json.loads(line) for line in (FOREIGN / "truth.jsonl").read_text().splitlines()]
    return {row["rollout_id"]: row for row in rows}


def test_every_rollout_call_and_failure_is_there(ledger, truth):
    assert set(ledger.rollouts["rollout_id"]) == set(truth)
    for row in ledger.rollouts.iter_rows(named=True):
        expected = truth[row["rollout_id"]]
        calls = ledger.calls.filter(pl.col("rollout_id") == row["rollout_id"])
        failed = calls.filter(pl.col("failure_reason").is_not_null())
        assert row["calls"] == expected["calls"] == calls.height - failed.height
        found = [list(pair) for pair in failed.select("model_call_id", "failure_reason").rows()]
        assert found == expected["failures"]
        roots = calls.filter(pl.col("mode") == "text")
        assert roots.height == expected["roots"]


def test_the_terminal_is_the_one_the_reference_chose(ledger, truth):
    for row in ledger.rollouts.iter_rows(named=True):
        expected = truth[row["rollout_id"]]["heuristic"]
        assert row["terminal_model_call_id"] == expected["terminal"]
        if expected["terminal"] is None:
            assert row["cause"] is not None and expected["reason"] in row["terminal_attribution_reason"]
        else:
            assert row["terminal_selection"] == "heuristic"


def test_frames_have_the_columns_of_a_run(ledger):
    assert dict(ledger.calls.schema).items() >= frames.polars_dtypes("calls").items()
    assert dict(ledger.rollouts.schema).items() >= frames.polars_dtypes("rollouts").items()


def test_a_ledger_has_no_tokens_and_says_so(ledger):
    with pytest.raises(RunStoreError, match="custody only"):
        ledger.tokens("g00-0-205727")
    assert repr(ledger).endswith("no tokens")


def test_opening_leaves_the_directory_as_it_was(tmp_path):
    shutil.copytree(FOREIGN / "ledger", tmp_path / "ledger")
    before = {path: path.read_bytes() for path in (tmp_path / "ledger").iterdir()}
    opened = runs.open_ledger(tmp_path / "ledger")
    assert opened.calls.height and opened.rollouts.height
    assert {path: path.read_bytes() for path in (tmp_path / "ledger").iterdir()} == before


def test_a_broken_file_is_one_rollout_with_its_reason(tmp_path):
    shutil.copytree(FOREIGN / "ledger", tmp_path / "ledger")
    path = tmp_path / "ledger" / "g00-1-7a8bc0.lineage.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], b"{not json", *lines[1:]]) + b"\n")
    opened = runs.open_ledger(tmp_path / "ledger")
    broken = opened.rollouts.filter(pl.col("rollout_id") == "g00-1-7a8bc0").row(0, named=True)
    assert "line 2" in broken["detail"] and opened.rollouts.height == 32
    assert broken["cause"] == "missing_receipt" and "1 broken line left out (g00-1-7a8bc0" in repr(opened)


def test_a_torn_last_line_of_a_ledger_is_said(tmp_path):
    shutil.copytree(FOREIGN / "ledger", tmp_path / "ledger")
    with (tmp_path / "ledger" / "g00-1-7a8bc0.lineage.jsonl").open("ab") as file:
        file.write(b'{"model_call_id": "g00')
    opened = runs.open_ledger(tmp_path / "ledger")
    assert opened.rollouts.filter(rollout_id="g00-1-7a8bc0")["cause"].to_list() == [None]
    assert "1 torn line left out (g00-1-7a8bc0.lineage.jsonl" in repr(opened)


def test_what_is_no_ledger_beside_ledgers_costs_nobody_else(tmp_path):
    directory = tmp_path / "ledger"
    shutil.copytree(FOREIGN / "ledger", directory)
    (directory / "folder.lineage.jsonl").mkdir()
    (directory / "gone.lineage.jsonl").symlink_to(tmp_path / "nowhere")
    (directory / "two words.lineage.jsonl").write_text("\n")
    (directory / "list.lineage.jsonl").write_text("[1, 2]\n")
    (directory / "bytes.lineage.jsonl").write_bytes(b"\xff\xfe" * 40)
    (directory / "notes.txt").write_text("not a ledger")
    opened = runs.open_ledger(directory)
    added = opened.rollouts.filter(~pl.col("rollout_id").str.starts_with("g0"))
    assert dict(added.select("rollout_id", "cause").rows()) == {
        "bytes": "no_records",
        "gone": "missing_receipt",
        "list": "missing_receipt",
        "two words": "missing_receipt",
    }
    assert opened.rollouts.height == 36 and opened.calls.equals(runs.open_ledger(FOREIGN / "ledger").calls)


def test_a_ledger_travels_to_another_process(ledger):
    assert repr(pickle.loads(pickle.dumps(ledger))) == repr(ledger)


def test_a_count_is_the_same_wherever_it_is_said(ledger):
    calls, rollouts = ledger.calls, ledger.rollouts
    assert int((rollouts["calls"] + rollouts["failed_calls"]).sum()) == calls.height
    rejected, failed = rollouts["cause"].count(), calls["failure_reason"].count()
    assert f"{rejected} of them rejected · {calls.height} calls, {failed} of them failed or unresolved" in repr(ledger)


def test_a_directory_without_ledgers_is_refused(tmp_path):
    with pytest.raises(RunStoreError, match="No ledger in"):
        runs.open_ledger(tmp_path)
