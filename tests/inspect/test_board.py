"""CampaignBoard: what the files say, while they are written, after the end and after a crash."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import orjson
import pytest
from stored_run import StoredRun

from workbench import runs
from workbench.demo import recorded_run
from workbench.errors import RunStoreError
from workbench.inspect import CampaignBoard, set_mode
from workbench.inspect.board_frame import board_frame, clock
from workbench.inspect.live import board as live_board

FOREIGN = Path(__file__).parents[1] / "conformance" / "foreign_ledger" / "ledger"


def tiles(frame: dict) -> dict[str, str | None]:
    return {tile["label"]: tile["value"] for tile in frame["tiles"]}


@pytest.fixture
def stored(tmp_path):
    playing = StoredRun(tmp_path / "watched")
    yield playing
    playing.writer.close()


def start_group(stored: StoredRun, group_id: str) -> float:
    stored.writer.event(
        "group_started", step=2, group_id=group_id, rollout_ids=[f"watched.{group_id}.0.0"], task_id="t"
    )
    return runs.open(stored.run_dir).events["at"].max()


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_of_a_run_that_has_ended_no_step_is_still_to_come(stored, state):
    stored.writer.status(status=state)
    stored.writer.close()
    frame = CampaignBoard(runs.open(stored.run_dir)).frame
    assert frame["no_step"] == "no optimiser step"
    assert all("yet" not in (tile["why"] or "") for tile in frame["tiles"])


def test_a_board_follows_a_run_as_it_is_written(stored):
    run = runs.open(stored.run_dir)
    board = CampaignBoard(run)
    assert repr(board) == "Campaign watched · running · set-up · step 0 · rollouts valid 0 of 0"
    assert tiles(board.frame)["reward, last step"] is None and "no optimiser step yet" in board.html()

    started = start_group(stored, "g90000")
    start_group(stored, "g90001")
    frame = board_frame(run, started + 65)
    assert frame["in_flight"] == 2 and tiles(frame)["oldest running rollout"] == "watched.g90000.0.0, 1 min 05 s"
    stored.writer.event("group_evicted", step=2, group_id="g90001", cause="stale")
    assert [group["group"] for group in board_frame(run, started + 65)["flying"]] == ["g90000"]

    stored.step(1, [["plain", "nan"]])
    stored.writer.status(phase="training", step=1, steps=3)
    board.refresh()
    assert "training · step 1 of 3" in repr(board) and f"{run.steps['reward_mean'][-1]:.3f}" in repr(board)
    assert board.frame["causes"] == [{"cause": "worker_capture_failed", "rollouts": 1}]
    assert board.frame["series"]["step"] == [1]


def test_tokens_a_second_are_of_the_whole_step_though_its_groups_were_ready_when_it_began(stored):
    seconds = {"rollout_s": 0.0001, "train_s": 9.0, "publish_s": 0.5, "sync_s": 0.4999}
    stored.writer.step({"step": 1, "weight_version": 1, "sampled_tokens": 1_000, **seconds})
    frame = board_frame(runs.open(stored.run_dir), 0.0)
    assert tiles(frame)["tokens/s sampled, last step"] == "100.0"


def test_a_run_that_failed_says_so_and_has_nothing_in_flight(stored):
    start_group(stored, "g90000")
    stored.writer.event("failed", error="ComponentDied", message="the policy worker is gone")
    stored.writer.status(status="failed", phase="failed", error="ComponentDied: the policy worker is gone")
    stored.writer.close()
    board = CampaignBoard(runs.open(stored.run_dir))
    assert board.frame["state"] == "failed" and board.frame["in_flight"] == 0
    assert "Last error: ComponentDied: the policy worker is gone" in board.html()
    assert "the run has failed" in board.html()


def test_a_served_run_shows_its_rollouts_and_calls_and_no_steps(stored):
    stored.writer.status(command="serve", phase="serving")
    board = CampaignBoard(runs.open(stored.run_dir))
    assert repr(board) == "Served run watched · running · serving · rollouts 0 · calls 0 · rollouts valid 0 of 0"
    assert board.snapshot().png

    stored.group(None, 0, ["plain", "nan"])
    stored.play("open.1", 2, kind="edit")
    board.refresh()
    calls = runs.open(stored.run_dir).calls
    lost = calls["failure_reason"].count()
    assert repr(board).endswith(f"serving · rollouts 3 · calls {calls.height} · rollouts valid 1 of 2")
    shown = tiles(board.frame)
    assert (shown["calls captured"], shown["rollouts without a receipt"]) == (
        f"{calls.height - lost} of {calls.height}",
        "1",
    )
    assert sum(row["calls"] for row in board.frame["calls"]) == calls.height
    assert [row["captured"] for row in board.frame["calls"]] == [True, True, False, False]
    words = board.html() + " ".join(text.get_text() for ax in board.figure().axes for text in ax.texts)
    assert "step" not in words and "not captured: unresolved_parent" in words
    assert repr(runs.open(stored.run_dir)).startswith(
        f"Served run watched · running · {calls.height} calls · 1 group ·"
    )


def test_groups_in_flight_and_the_last_thing_that_went_wrong_stand_in_the_page(stored):
    for number in range(30):
        start_group(stored, f"g9{number:04d}")
    stored.writer.event("rollout_rejected", rollout_id="watched.9.0.0", cause="no_root", detail="a row is lost")
    board = CampaignBoard(runs.open(stored.run_dir))
    page = board.html()
    assert "g90000" in page and re.search(r"Showing \d+ of 30 groups in flight", page)
    assert "Last rejection: rollout_rejected: watched.9.0.0 no_root, a row is lost" in page
    assert "Last error: none" in page
    stored.writer.event("group_replaced", group_id="g90000", error="ComponentDied", message="a worker is gone")
    page = CampaignBoard(runs.open(stored.run_dir)).html()
    assert "Last error: group_replaced: g90000 ComponentDied, a worker is gone" in page and "Last rejection" in page


def test_a_board_that_is_only_looked_at_keeps_its_snapshot_for_a_while(stored, monkeypatch):
    monkeypatch.setattr("IPython.display.publish_display_data", lambda *_, **__: None)
    board = CampaignBoard(runs.open(stored.run_dir))
    board.show_snapshot()
    stored.writer.status(phase="training")
    board.refresh()
    assert board.frame["phase"] == "training" and not board.keep()


def test_a_read_that_fails_is_said_in_the_live_board_and_another_message_is_not_its(stored, monkeypatch):
    board = CampaignBoard(runs.open(stored.run_dir))
    widget, answers = board.live, []
    monkeypatch.setattr(type(widget), "send", lambda self, content, buffers=None: answers.append(content))
    widget._asked(widget, {"kind": "hello"}, [])
    assert answers == []

    def refresh():
        raise RunStoreError("steps.jsonl, line 3, is no JSON")

    monkeypatch.setattr(board, "refresh", refresh)
    monkeypatch.setattr(live_board, "LEAST_S", 0.0)
    widget._asked(widget, {"kind": "read"}, [])
    assert answers[0]["note"] == "steps.jsonl, line 3, is no JSON"


def test_a_ledger_without_a_rejected_rollout_says_so(tmp_path):
    stored = StoredRun(tmp_path / "good")
    stored.step(1, [["plain", "plain"]])
    board = CampaignBoard(runs.open_ledger(stored.finish() / "ledger"))
    assert board.frame["causes"] == [] and board.snapshot().png


def test_the_browser_is_answered_at_most_twice_a_second(stored, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live_board.time, "monotonic", lambda: now[0])
    board = CampaignBoard(runs.open(stored.run_dir))
    widget = board.live
    answers: list[dict] = []
    monkeypatch.setattr(type(widget), "send", lambda self, content, buffers=None: answers.append(content))
    reads: list[float] = []
    refresh = board.refresh
    monkeypatch.setattr(board, "refresh", lambda: (reads.append(now[0]), refresh())[1])
    for _ in range(40):
        now[0] += 0.1
        widget._asked(widget, {"kind": "read"}, [])
    assert len(answers) == 40 and {answer["kind"] for answer in answers} == {"done"}
    assert 4 <= len(reads) <= 8
    stored.writer.status(phase="weight sync")
    now[0] += 1
    widget._asked(widget, {"kind": "read"}, [])
    assert widget.frame["phase"] == "weight sync" and "weight sync" in widget.sentence


def test_the_last_frame_takes_the_snapshots_place(stored, monkeypatch):
    published: list[tuple[str, str, bool]] = []

    def publish(data, metadata=None, *, transient=None, update=False):
        kind = next(iter(set(data) - {"text/plain"}))
        published.append((kind, (transient or {}).get("display_id", ""), update))

    monkeypatch.setattr("IPython.display.publish_display_data", publish)
    set_mode("both")
    try:
        board = CampaignBoard(runs.open(stored.run_dir))
        board._ipython_display_()
        assert [(kind, update) for kind, _, update in published[1:]] == [("image/png", False), ("text/html", False)]
        assert not board.keep()
        stored.finish()
        board.refresh()
        assert board.keep() and [update for *_, update in published[3:]] == [True, True]
        assert [name for _, name, _ in published[1:3]] == [name for _, name, _ in published[3:]]
        assert not board.keep()
    finally:
        set_mode(None)


def test_a_ledger_has_a_board_that_says_what_it_cannot_know():
    board = CampaignBoard(runs.open_ledger(FOREIGN))
    assert repr(board) == "Ledger ledger · rollouts rejected 12 of 32"
    assert "a ledger holds custody rows only" in board.html() and board.snapshot().png
    assert sum(cause["rollouts"] for cause in board.frame["causes"]) == 12


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.9, "59 s"), (65, "1 min 05 s"), (7_800, "2 h 10 min")]
)
def test_durations_are_for_people(seconds, words):
    assert clock(seconds) == words


def test_a_share_is_drawn_between_nothing_and_all():
    rewards, *shares = CampaignBoard(runs.open(recorded_run())).draw().axes
    assert all(ax.get_ylim() == (-0.04, 1.08) for ax in shares) and rewards.get_ylim() != (-0.04, 1.08)


def test_steps_without_a_reward_are_said_to_have_none_and_have_no_axis(tmp_path):
    shutil.copytree(recorded_run(), tmp_path / "run")
    path = tmp_path / "run" / "steps.jsonl"
    lines = [orjson.loads(line) | {"reward_mean": None} for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    board = CampaignBoard(runs.open(tmp_path / "run"))
    (tile,) = (tile for tile in board.frame["tiles"] if tile["label"] == "reward, last step")
    assert tile["value"] is None and tile["why"] == "the step has none"
    rewards, *shares = board.draw().axes
    assert [text.get_text() for text in rewards.texts] == ["no step has one"] and not rewards.lines
    assert all(ax.lines for ax in shares)
