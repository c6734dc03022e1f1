"""Verification of a stored run's custody: receipts, ledgers and parts say the same, whichever of them was changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from stored_run import StoredRun, rewrite_json_line

from workbench import runs
from workbench.campaign.cli import main
from workbench.campaign.verify import VerifyReport, verify_run
from workbench.errors import RolloutFrozen
from workbench.ledger import LedgerStore
from workbench.runs.frames import read_lines
from workbench.wire import Cause

PLAIN, UNCAPTURED = "stored.0.0.0", "stored.0.1.0"
LEDGER, RECEIPTS, CALLS = f"ledger/{PLAIN}.lineage.jsonl", "receipts/g00000.jsonl", "calls/g00000.parquet"
DEMO = Path(runs.__file__).parents[1] / "demo" / "run"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """One group of two rollouts; a call of the second was not captured."""
    run = StoredRun(tmp_path_factory.mktemp("custody") / "stored")
    run.step(1, [["plain", "nan"]])
    return run.finish()


@pytest.fixture
def run_dir(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "stored"))


def change_lines(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = read_lines(path)
    change(lines)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def found(report: VerifyReport, file: str) -> str:
    assert not report.ok
    return "\n".join(str(difference) for difference in report.differences if difference.file == file)


def test_the_run_and_the_recorded_one_hold(original):
    for path in (original, DEMO):
        report = verify_run(path)
        assert report.ok and not report.empty and not report.not_compared, str(report)
        assert repr(report).endswith("every digest, row and step holds")


def test_a_valid_ledger_row_that_the_receipt_does_not_name_is_found(run_dir):
    def append(lines):
        row = dict(lines[-1])
        row |= {"model_call_id": "added", "staging_key": f"{PLAIN}/added", "response_id": "chatcmpl-added"}
        lines.append(row)

    change_lines(run_dir / LEDGER, append)
    report = verify_run(run_dir)
    assert (
        found(report, LEDGER)
        == f"{LEDGER}, rollout {PLAIN}, call added: the ledger has this call, the receipt does not"
    )
    assert len(report.differences) == 1


def test_a_failure_row_appended_and_one_removed_are_found(run_dir):
    failure = {"model_call_id": "lost", "failure_reason": "unresolved_parent"}
    change_lines(run_dir / LEDGER, lambda lines: lines.append(failure))
    other = f"ledger/{UNCAPTURED}.lineage.jsonl"
    change_lines(run_dir / other, lambda lines: lines.pop())
    report = verify_run(run_dir)
    assert "call lost: the ledger has this failure (unresolved_parent), the receipt does not" in found(report, LEDGER)
    assert "the receipt names this failure (worker_capture_failed" in found(report, other)


def test_ledger_rows_repeated_or_in_another_order_are_found(run_dir):
    change_lines(run_dir / LEDGER, lambda lines: lines.append(lines[0]))
    assert "the ledger has this call 2 times" in found(verify_run(run_dir), LEDGER)
    change_lines(run_dir / LEDGER, lambda lines: lines.pop())
    assert verify_run(run_dir).ok
    change_lines(run_dir / LEDGER, lambda lines: lines.reverse())
    assert "its calls are in another order than the receipt's" in found(verify_run(run_dir), LEDGER)


def test_what_came_after_the_freeze_or_has_no_receipt_is_no_difference(run_dir):
    store = LedgerStore(run_dir / "ledger")
    store.freeze(PLAIN)
    with pytest.raises(RolloutFrozen):
        store.record_failure(PLAIN, "late", Cause.WORKER_CAPTURE_FAILED)
    store.record_failure("stored.9.0.0", "in-flight", Cause.WORKER_CAPTURE_FAILED)
    assert verify_run(run_dir).ok


def test_every_column_of_a_ledger_row_that_has_a_second_copy_is_compared(tmp_path):
    run_dir = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    file = "ledger/demo.0.0.0.lineage.jsonl"
    changed = {name: "0" * 64 for name in ("staging_digest", "digest", "extras_digest", "chain_hash", "fingerprint")}
    changed |= {name: "1" * 64 for name in ("cumulative_hash", "output_fingerprint", "continuation_fingerprint")}
    changed |= {"admitted_at": 1.0, "response_id": "other", "staging_key": "other", "staging_chain": ["other"]}
    changed |= {"weight_version": 77, "delta_len": 70, "prev_len": 1, "fingerprint_version": 1}
    changed |= {"mode": "token_in", "parent_call_id": "other"}
    # The id says which row it is, and with the old cum_len of 71 the changed row is still a valid one.
    assert set(read_lines(run_dir / file)[0]) == {*changed, "model_call_id", "cum_len", "context_len", "context_digest"}
    rewrite_json_line(run_dir / file, 0, changed)
    text = found(verify_run(run_dir), file)
    for name in changed:
        alias = {"staging_digest": ": digest", "digest": ": column digest"}.get(name, name)
        assert f"{alias} is " in text, name


def test_a_missing_ledger_names_its_rollout(run_dir):
    (run_dir / LEDGER).unlink()
    report = verify_run(run_dir)
    assert [(d.file, d.rollout_id) for d in report.differences] == [(LEDGER, PLAIN)]
    assert "this ledger is missing" in report.differences[0].what
    for path in (run_dir / "ledger").iterdir():
        path.unlink()
    assert {d.rollout_id for d in verify_run(run_dir).differences} == {PLAIN, UNCAPTURED}


def test_a_run_without_its_ledgers_says_that_they_were_not_compared(run_dir):
    shutil.rmtree(run_dir / "ledger")
    report = verify_run(run_dir)
    assert report.ok and report.ledger_rows == 0
    assert repr(report).endswith("every digest, row and step holds · ledger/ not there: not compared")


def test_a_receipts_reward_that_is_not_the_outcomes_is_found(run_dir):
    def change(lines):
        lines[0]["receipt"]["reward"] += 0.5

    change_lines(run_dir / RECEIPTS, change)
    report = verify_run(run_dir)
    assert "the receipt's reward is" in found(report, RECEIPTS) and len(report.differences) == 1


def test_emptied_failures_of_a_receipt_are_found_in_ledger_and_calls(run_dir):
    assert read_lines(run_dir / RECEIPTS)[1]["failures"]
    rewrite_json_line(run_dir / RECEIPTS, 1, {"failures": []})
    report = verify_run(run_dir)
    assert "the ledger has this failure" in found(report, f"ledger/{UNCAPTURED}.lineage.jsonl")
    assert "the part holds this failed call, the receipt does not name it" in found(report, CALLS)


def test_fields_of_a_receipt_that_no_digest_covers_are_held_against_the_parts(run_dir):
    def change(lines):
        lines[0]["reward_components"] = {"guess": 7.0}
        lines[0]["receipt"]["terminal_attribution_reason"] = "said so"
        lines[0]["receipt"]["manifest"][0] |= {"admitted_at": 5.0, "response_id": "another"}
        lines[1]["failures"][0]["detail"] = "another"

    change_lines(run_dir / RECEIPTS, change)
    report = verify_run(run_dir)
    for file, names in (
        ("rows/g00000.parquet", ("reward_components", "terminal_attribution_reason", "detail")),
        (CALLS, ("admitted_at", "response_id", "detail")),
        (LEDGER, ("admitted_at", "response_id")),
    ):
        assert all(f"{name} is " in found(report, file) for name in names), str(report)


def test_the_command_takes_a_path_or_a_name_and_says_how_it_ended(run_dir, tmp_path, monkeypatch, capsys):
    reports = tmp_path / "work" / "reports"
    shutil.copytree(run_dir, reports / "first")
    (reports / "empty").mkdir()
    (reports / "empty" / "steps.jsonl").touch()
    monkeypatch.chdir(reports.parent)

    def verify(name: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["verify", name])
        return ended.value.code

    assert verify("first") == verify("reports/first") == verify(str(reports / "first")) == 0
    assert verify("empty") == 1
    assert verify("none") == 1
    assert "No run in reports/none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (0, {"context_digest": "0" * 64}, "context_digest is '000"),
        (1, {"context_len": 9}, "context_len is 9, the items of its request give 3"),
        (1, {"prompt_options": "other"}, "prompt_options is 'other', the items of its request give None"),
    ],
)
def test_a_row_that_the_items_of_its_request_contradict_is_found(tmp_path, line, change, said):
    run = StoredRun(tmp_path / "stored")
    run.step(1, [["plain"] * 3])
    run.finish()
    assert list((tmp_path / "stored" / "ledger").glob("*.items.jsonl")) and verify_run(tmp_path / "stored").ok
    rewrite_json_line(tmp_path / "stored" / LEDGER, line, change)
    (difference,) = verify_run(tmp_path / "stored").differences
    assert (difference.file, difference.rollout_id) == (LEDGER, PLAIN)
    assert difference.call_id and difference.what.startswith(said)


def test_a_note_of_items_that_is_none_counts_for_nothing(run_dir):
    (run_dir / "ledger" / f"{PLAIN}.items.jsonl").write_bytes(b'{\n{"model_call_id": 3}\n{"items": 1}\n')
    assert verify_run(run_dir).ok
