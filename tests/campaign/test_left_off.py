"""Where a stopped run stood, for every state that a kill can leave; and what `workbench resume` refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys

import orjson
import pytest

from workbench.campaign.cli import main
from workbench.campaign.left_off import read_left_off, remove_unfinished
from workbench.campaign.resume import resumable
from workbench.campaign.run_place import new_run_dir
from workbench.demo import recorded_run
from workbench.errors import RecipeError, RunStoreError, SetupError
from workbench.runs.frames import read_parts
from workbench.runs.shelf import overview
from workbench.runs.writer import RunWriter, write_part

LAST = "g00003"


@pytest.fixture
def run(tmp_path):
    """A finished run of four steps of one group each, g00000 to g00003, to take things away from."""
    return shutil.copytree(recorded_run(), tmp_path / "run")


def drop_lines(run, name, key, value):
    path = run / f"{name}.jsonl"
    lines = [line for line in path.read_bytes().splitlines() if orjson.loads(line).get(key) != value]
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def untake(run, step):
    """As if the run had been killed before the trainer took `step`."""
    (run / "train" / f"step-{step}.parquet").unlink()
    drop_lines(run, "steps", "step", step)


def unfinish(run, group_id):
    """As if it had been killed while the group's parts were being written."""
    (run / "receipts" / f"{group_id}.jsonl").unlink()
    drop_lines(run, "groups", "group_id", group_id)


def test_a_finished_run_has_nothing_open(run):
    left = read_left_off(run)
    assert (left.steps_done, left.unrecorded, left.open_groups, left.next_group) == (4, {}, [], 4)
    assert left.rejections.total() == 3
    # The rates of a run that goes on are still those of the whole run.
    (row,) = overview([run]).iter_rows(named=True)
    assert left.counts.rates()["token_in_rate_after_roots"] == row["token_in_rate_after_roots"]


def test_a_run_that_was_stopped_before_it_had_started_is_counted_as_resumed_too(run):
    assert read_left_off(run).segments == 1
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "resumed"}\n')
    assert read_left_off(run).segments == 2  # one event `started`, of the second time


def test_a_finished_group_that_no_step_took_is_waiting(run):
    untake(run, 4)
    left = read_left_off(run)
    assert left.steps_done == 3
    (waiting,) = left.open_groups
    assert (waiting.group_id, waiting.number, waiting.finished, waiting.recorded) == (LAST, 3, True, True)
    stored = read_parts("rows", [run / "rows" / f"{LAST}.parquet"])
    assert waiting.rollout_ids == stored["rollout_id"].to_list()


def test_a_stored_group_without_its_line_is_finished_all_the_same(run):
    untake(run, 4)
    drop_lines(run, "groups", "group_id", LAST)
    (waiting,) = read_left_off(run).open_groups
    assert (waiting.finished, waiting.recorded) == (True, False)


def test_rejections_of_a_group_whose_line_is_missing_are_counted_when_it_gets_one(run):
    told = [orjson.loads(line) for line in (run / "events.jsonl").read_bytes().splitlines()]
    rejected = [event["group_id"] for event in told if event["kind"] == "rollout_rejected"]
    whole = read_left_off(run).rejections.total()
    last = max(rejected)
    for step in range(4, int(last[1:]), -1):
        untake(run, step)
    assert read_left_off(run).rejections.total() == whole
    drop_lines(run, "groups", "group_id", last)
    assert read_left_off(run).rejections.total() == whole - rejected.count(last)


def test_a_group_that_is_half_stored_is_sampled_again_under_ids_that_nobody_used(run):
    untake(run, 4)
    unfinish(run, LAST)
    (run / "rows" / f".{LAST}.parquet.abc.tmp").touch()
    left = read_left_off(run)
    (again,) = left.open_groups
    assert (again.finished, again.attempt) == (False, 1)
    assert remove_unfinished(left) == [f"calls/{LAST}.parquet", f"rows/{LAST}.parquet", f"rows/.{LAST}.parquet.abc.tmp"]
    assert read_left_off(run).unfinished_parts == []
    # A later attempt that left no more than a ledger counts, too.
    (run / "ledger" / "demo.3.1.6.lineage.jsonl").touch()
    assert read_left_off(run).open_groups[0].attempt == 7


def test_drafts_of_folders_and_files_are_removed_and_named(run):
    (run / "weights" / ".v00009").mkdir(parents=True)
    (run / "weights" / ".v00009" / "model.safetensors").write_bytes(b"half")
    (run / "train" / ".step-9.parquet.tmp").write_bytes(b"half")
    assert sorted(remove_unfinished(read_left_off(run))) == ["train/.step-9.parquet.tmp", "weights/.v00009"]
    assert read_left_off(run).unfinished_parts == []


def test_groups_that_were_given_up_are_not_open(run):
    untake(run, 4)
    untake(run, 3)
    with RunWriter(run) as writer:
        writer.event("group_evicted", group_id=LAST)
        writer.event("group_started", group_id="g00004", rollout_ids=["demo.4.0.0", "demo.4.1.0"])
        writer.event("group_replaced", group_id="g00004")
    left = read_left_off(run)
    assert [group.group_id for group in left.open_groups] == ["g00002"]
    assert (left.replaced, left.evicted, left.next_group) == (1, 1, 5)


def test_a_step_without_its_line_was_taken(run):
    drop_lines(run, "steps", "step", 4)
    left = read_left_off(run)
    assert (left.steps_done, left.unrecorded) == (4, {4: [LAST]})


def test_torn_last_lines_were_never_written(run):
    before = read_left_off(run)
    for name in RunWriter.FILES:
        with (run / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"kind": "group_sta')
    assert read_left_off(run) == before


def swap_groups(run, step, group_id):
    """The part of `step` as if it had been taken on another group."""
    part = read_parts("train", [run / "train" / f"step-{step}.parquet"]).to_dict(as_series=False)
    part["group_id"] = [group_id] * len(part["group_id"])
    write_part(run / "train" / f"step-{step}.parquet", "train", part)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "train/step-2.parquet").unlink(), "train/step-2.parquet is missing, a later step is there"),
        (lambda run: (run / "train/step-4.parquet").unlink(), "steps.jsonl has step 4, but train/step-4.parquet is"),
        (lambda run: (run / "rows/g00001.parquet").unlink(), "groups.jsonl has group g00001, but not all of its parts"),
        (lambda run: swap_groups(run, 3, "g00000"), "group g00000 was trained on twice, in steps 1 and 3"),
        (
            lambda run: (run / "train/step-4.parquet").rename(run / "train/step-5.parquet"),
            "step-5.parquet holds rows of",
        ),
        (lambda run: (run / "train/step-1.parquet").write_bytes(b"PAR1"), "step-1.parquet is not a readable part"),
        (lambda run: (run / "events.jsonl").write_bytes(b"{\n{}\n"), "events.jsonl, line 1 is not JSON"),
        (
            lambda run: (run / "events.jsonl").write_text(
                '{"kind": "group_started", "group_id": "g00009", "rollout_ids": ["not-of-a-campaign"]}\n'
            ),
            "group g00009 was started with the rollout id 'not-of-a-campaign'; nobody can say where this run stood",
        ),
    ],
)
def test_a_damaged_run_is_not_gone_on_with(run, damage, message):
    damage(run)
    with pytest.raises(RunStoreError) as caught:
        read_left_off(run)
    assert message in str(caught.value)


def test_a_finished_run_goes_on_only_when_it_is_told_how_far(run):
    with pytest.raises(SetupError, match=r"is done, all 4 steps are taken.*train\.steps=8"):
        resumable(run)
    assert resumable(run, ["train.steps=6"]).train.steps == 6
    with pytest.raises(RecipeError, match="has taken 4 steps already; got 3"):
        resumable(run, ["train.steps=3"])


def test_only_reach_deadlines_and_the_machine_may_change(run):
    changes = ["train.steps=6", "train.timeout_s=5", "rollouts.max_inflight_groups=1", "checkpoint.every=1"]
    assert resumable(run, changes).checkpoint.every == 1
    for change in ("train.learning_rate=0.5", "environment.options.turns=3", "seed=1", "train.rollouts_per_group=8"):
        with pytest.raises(RecipeError, match="a resumed run keeps its recipe") as caught:
            resumable(run, ["train.steps=6", change])
        assert str(caught.value).startswith(change.partition("=")[0].removesuffix(".turns") + ":")


def test_a_new_run_is_only_advised_to_begin_from_a_checkpoint_that_is_there(run):
    with pytest.raises(RecipeError, match=r"Next: start a new run; this one left no checkpoint"):
        resumable(run, ["seed=1"])
    for step in (2, 10):
        (run / "checkpoints" / f"step-{step}" / "model").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"begin from model\.path=.*/checkpoints/step-10/model$"):
        resumable(run, ["seed=1"])


def test_a_served_run_is_not_gone_on_with(run):
    with RunWriter(run) as writer:
        writer.status(status="done", phase="stopped", command="serve")
    with pytest.raises(SetupError, match=r"is a served run.*workbench serve RECIPE"):
        resumable(run, ["train.steps=8"])


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_run_whose_status_cannot_be_read_goes_on_from_its_records_and_says_so(run, content, monkeypatch, capsys):
    untake(run, 4)
    (run / "status.json").write_bytes(content)
    gone_on = []
    monkeypatch.setattr("workbench.campaign.machines.doctor.refuse_unable", lambda recipe: None)
    monkeypatch.setattr("workbench.campaign.report.runner.resume_run", lambda recipe, path: gone_on.append(path) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(run)])
    assert (ended.value.code, gone_on) == (0, [run])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"workbench: {run / 'status.json'} is not a readable JSON object, so how the run ended")
    assert line.endswith("it goes on from its records")


def test_a_run_of_which_nobody_knows_whether_it_is_a_campaign_is_not_gone_on_with(run):
    (run / "status.json").write_bytes(b"{")
    events = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(events + b'{"kind": "serving"}\n')
    with pytest.raises(SetupError, match="is a served run"):
        resumable(run)
    (run / "events.jsonl").write_bytes(b"")
    with pytest.raises(RunStoreError, match=r"is not a readable JSON object, and no event says that a campaign began"):
        resumable(run)


def test_nothing_new_begins_in_the_place_of_a_run_whose_status_is_all_that_is_left(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "status.json").write_bytes(b"{")
    with pytest.raises(SetupError, match="mine already holds a run"):
        new_run_dir(tmp_path, "mine", named=True)


def test_what_cannot_be_resumed_is_said_in_one_line(run, tmp_path):
    with RunWriter(run) as writer:
        writer.status(status="running")
        with pytest.raises(RunStoreError, match="is still running"):
            resumable(run)
    (run / "recipe.yaml").unlink()
    with pytest.raises(RunStoreError, match=r"has no recipe\.yaml"):
        resumable(run)
    done = subprocess.run(
        [sys.executable, "-m", "workbench.campaign.cli", "resume", str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"workbench: No run in {tmp_path}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (f"rows/{LAST}.parquet", f"group {LAST} in .* cannot be read back"),  # waiting: it would be published again
        ("rows/g00002.parquet", "group g00002 in .* cannot be read back"),  # its step would be taken again
        ("rows/g00000.parquet", "group g00000 in .* cannot be read back"),  # the first, without any checkpoint
        ("train/step-3.parquet", "step-3.parquet"),
    ],
)
def test_a_damaged_part_that_is_needed_to_go_on_is_named_before_anything_starts(run, part, says):
    untake(run, 4)
    with RunWriter(run) as writer:
        writer.status(status="stopped")
    assert resumable(run).train.steps == 4
    damaged = run / part
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(RunStoreError, match=rf"{says}.*Next: workbench verify"):
        resumable(run)


def test_a_damaged_part_before_the_last_checkpoint_hinders_nobody(run):
    untake(run, 4)
    with RunWriter(run) as writer:
        writer.status(status="stopped")
    (run / "rows" / "g00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunStoreError, match=r"Nothing was started: .*put it back from a copy"):
        resumable(run)
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    assert resumable(run).train.steps == 4
