"""Refused requests of a run: counted by rollout and reason, shown where one looks, and in nobody's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from click.testing import CliRunner
from stored_run import StoredRun

from workbench import runs
from workbench.campaign.cli import main
from workbench.campaign.report.listing import list_lines, listing
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.summary import summarise
from workbench.campaign.verify import verify_run
from workbench.inspect import PoisonTable
from workbench.runs.refused import REFUSED_FILE
from workbench.wire import Cause

SAID = "Message 1 (user) has no text or list as its `content`. Next: put what it says into `content`."


def line(rollout_id: str | None, code: str = "content_not_read", status: int = 400, **fields: Any) -> dict[str, Any]:
    return {"at": 1.0, "rollout_id": rollout_id, "status": status, "code": code, **fields}


def stored_run(folder: Path, lines: list[dict[str, Any]], after: bytes = b"") -> Path:
    stored = StoredRun(folder / "run")
    stored.step(1, [["plain", "plain"]])
    if lines:
        (stored.run_dir / REFUSED_FILE).write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in lines) + after)
    return stored.finish()


def summary_of(run_dir: Path) -> Any:
    return summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=1.0)


def test_refused_requests_are_counted_by_rollout_and_reason_wherever_one_looks(tmp_path: Path) -> None:
    lines = [
        line("run.0.0.0", message=SAID),
        line("run.0.0.0", message=SAID),
        {"at": 1.0, "more_within_s": 9.0},
        line("run.0.1.0", "rollout_frozen", 409, message="It is closed."),
        line("run.0.0.0", times=5),
        {"at": 1.0, "rollout_id": "run.0.0.0", "field": "top_p", "came": "0.5", "used": "1.0"},
        line(None, "unknown_route", 404, message="No such route."),
    ]
    run_dir = stored_run(tmp_path, lines)
    run = runs.open(run_dir)
    assert run.refused.select("rollout_id", "code", "by", "requests", "message").rows() == [
        ("run.0.0.0", "content_not_read", "gateway", 7, SAID),
        ("run.0.1.0", "rollout_frozen", "gateway", 1, "It is closed."),
        (None, "unknown_route", "gateway", 1, "No such route."),
    ]
    words = "8 in 2 rollouts and 1 outside of any rollout: content_not_read (7), rollout_frozen (1), unknown_route (1)"
    summary = summary_of(run_dir)
    assert f"refused requests           {words}\n" in summary.text() and f"run.0.0.0: {SAID}\n" in summary.text()
    (first, *_) = orjson.loads(orjson.dumps(summary.as_dict()))["refused"]
    assert (first["rollout_id"], first["code"], first["requests"]) == ("run.0.0.0", "content_not_read", 7)
    page = PoisonTable(run).html()
    assert (
        f"Requests that the gateway refused, and of which there is no call: {words}." in page
        and "400 content_not_read" in page
    )
    listed = CliRunner().invoke(main, ["inspect", str(run_dir)]).output
    assert f"refused requests: {words}" in " ".join(listed.split())
    shown = CliRunner().invoke(main, ["inspect", str(run_dir), "run.0.0.0"]).output
    assert f"refused by the gateway, 7 ×: 400 content_not_read: {SAID}" in shown
    nothing_else = CliRunner().invoke(
        main, ["inspect", str(stored_run(tmp_path / "b", [line("run.7.0.0")])), "run.7.0.0"]
    )
    assert "refused by the gateway, 1 ×: 400 content_not_read" in nothing_else.output


def test_what_the_engine_refused_counts_too_and_what_it_failed_at_does_not(tmp_path: Path) -> None:
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "plain"]])
    reason = Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
    for call_id, said in (("c1", "HTTP 400 worker_error"), ("c2", "HTTP 502 worker_unreachable"), ("c3", None)):
        stored.ledger.record_failure("run.9.0.0", call_id, reason, said)
    run_dir = stored.finish()
    refused = runs.open(run_dir).refused
    assert refused.rows() == [("run.9.0.0", 400, "worker_error", "engine", 1, None)]
    assert "refused requests           1 in 1 rollout: worker_error (1)\n" in summary_of(run_dir).text()


def test_a_run_without_such_a_file_or_with_a_broken_one_opens_lists_and_verifies(tmp_path: Path) -> None:
    before = stored_run(tmp_path / "before", [])
    assert runs.open(before).refused.is_empty() and "refused requests" not in summary_of(before).text()
    assert "that the gateway refused" not in PoisonTable(runs.open(before)).html()
    broken = stored_run(tmp_path / "after", [line("run.0.0.0", message=SAID)], b'no json\n{"at": 1.0, "roll')
    run = runs.open(broken)
    assert run.refused["requests"].to_list() == [1] and run.damage == []
    assert str(verify_run(broken)) == str(verify_run(before)).replace(str(before), str(broken))
    assert len(list_lines(listing(tmp_path / "after"))) == len(list_lines(listing(tmp_path / "before")))
