"""The reader: a run opens while it is written, after it ended and after it crashed, and its frames join by ids."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from stored_run import END, Rollout, StoredRun, make_run

from workbench import runs
from workbench.errors import RunStoreError
from workbench.runs import frames, frames_page, reader, schema, staged
from workbench.runs.tokens import call_path_tokens
from workbench.wire.extras import ROUTED_EXPERTS
from workbench.wire.routes import encode_routes


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> runs.Run:
    return runs.open(make_run(tmp_path_factory.mktemp("runs") / "stored"))


def test_every_frame_has_its_declared_columns_and_dtypes(run):
    for table in ("campaign", "steps", "groups", "rollouts", "calls"):
        frame = getattr(run, table)
        declared = frames.polars_dtypes("campaigns" if table == "campaign" else table)
        assert {name: frame.schema[name] for name in declared} == declared, table
        assert frame.height > 0, table
        assert frame["run"].to_list() == ["stored"] * frame.height, table


def test_the_status_file_is_read_a_few_times_a_frame_and_not_once_a_row(tmp_path, monkeypatch):
    read, times = reader.read_status, []

    def counted(path):
        times.append(path)
        return read(path)

    monkeypatch.setattr(reader, "read_status", counted)
    opened = runs.open(make_run(tmp_path / "stored"))
    for table in ("steps", "groups", "rollouts", "calls", "events"):
        times.clear()
        assert getattr(opened, table).height > 0 and len(times) <= 1, table


def test_frames_join_by_ids(run):
    per_group = run.rollouts.group_by("group_id").len().join(run.groups, on="group_id")
    assert (per_group["len"] == per_group["rows"]).all()
    assert set(run.calls["rollout_id"]) == set(run.rollouts["rollout_id"])
    assert run.calls["group_id"].null_count() == 0
    assert set(run.rollouts["step"]) == set(run.steps["step"])


def test_the_campaign_row_says_what_there_is(run):
    row = run.campaign.row(0, named=True)
    assert (row["state"], row["steps"], row["groups"], row["rollouts"]) == ("done", 2, 4, 16)
    assert row["valid_rollouts"] == 12 and row["weight_version"] == 2
    assert (row["model"], row["environment"], row["capture_enabled"]) == ("made-up", "guess_number", True)
    assert repr(run) == "Run stored · done · 2 steps · 4 groups · 12 of 16 rollouts valid · weight version 2"


def test_relations_tell_what_each_call_is(run):
    def words(rollout_id: str) -> list[str]:
        return run.calls.filter(pl.col("rollout_id") == rollout_id).sort("order")["relation"].to_list()

    assert words("stored.0.0.0") == ["chain", "chain"]
    assert words("stored.0.1.0") == ["chain", "retry", "chain", "chain"]
    assert words("stored.0.2.0") == ["chain", "chain", "chain", "branch", "chain"]
    assert words("stored.1.1.0")[-1] == "unresolved"
    assert words("stored.1.2.0")[-1] == "failed"


def test_an_unresolved_call_carries_its_drift(run):
    lost = run.calls.filter(pl.col("relation") == "unresolved").row(0, named=True)
    assert lost["detail"] == "history_edited" and lost["near_item"] == 0
    assert lost["near_call_id"] in run.calls["model_call_id"].to_list()


def test_tokens_are_the_rows_own_ids_with_call_version_and_both_logprobs(run):
    tokens = run.tokens("stored.0.1.0")
    row = pl.read_parquet(run.path / "rows" / "g00000.parquet").filter(pl.col("rollout_id") == "stored.0.1.0")
    assert tokens["token_id"].to_list() == row["token_ids"][0].to_list()
    assert tokens["sampled"].to_list() == [bool(m) for m in row["token_mask"][0].to_list()]
    sampled = tokens.filter("sampled")
    assert sampled["delta"].null_count() == 0 and tokens.filter(~pl.col("sampled"))["delta"].null_count() > 0
    gap = (sampled["trainer_logprob"] - sampled["logprob"] - sampled["delta"]).abs().max()
    assert gap < 1e-5
    chain = run.calls.filter((pl.col("rollout_id") == "stored.0.1.0") & pl.col("on_chain")).sort("order")
    assert tokens["model_call_id"].unique(maintain_order=True).to_list() == chain["model_call_id"].to_list()
    assert set(tokens["weight_version"]) == {0}


def test_tokens_of_one_call_are_the_path_to_it(run):
    calls = run.calls.filter(pl.col("rollout_id") == "stored.0.1.0").sort("order").to_dicts()
    retry = next(call for call in calls if call["relation"] == "retry")
    tokens = run.tokens("stored.0.1.0", retry["model_call_id"])
    assert tokens.height == retry["cum_len"]
    assert tokens["model_call_id"].unique(maintain_order=True).to_list() == [
        retry["parent_call_id"],
        retry["model_call_id"],
    ]
    assert tokens["token_id"][-1] == END


def test_tokens_of_a_rejected_rollout_are_what_was_staged_not_its_placeholder(run):
    rejected = run.rollouts.filter(pl.col("sample_mask") == 0).row(0, named=True)
    tokens = run.tokens(rejected["rollout_id"])
    assert tokens.height > rejected["tokens"] and tokens["trainer_logprob"].null_count() == tokens.height


def test_logprobs_hold_every_trained_sampled_token_once(run):
    table = run.logprobs()
    expected = run.rollouts.filter(pl.col("sample_mask") == 1)["sampled_tokens"].sum()
    assert table.height == expected
    assert table.select("rollout_id", "position").is_duplicated().any() is False
    assert np.isfinite(table["delta"].to_numpy()).all()


def test_receipts_are_wire_records(run):
    receipt = run.receipt("stored.0.1.0")
    assert receipt.terminal_selection == "declared" and len(receipt.manifest) == 4
    with pytest.raises(RunStoreError, match="No receipt"):
        run.receipt("stored.9.9.9")


def test_unknown_names_are_answered_with_what_there_is(run, tmp_path):
    with pytest.raises(RunStoreError, match="no rollout 'nobody'; it has 16"):
        run.tokens("nobody")
    with pytest.raises(RunStoreError, match="no staged tokens of call 'x'"):
        run.tokens("stored.0.0.0", "x")
    with pytest.raises(RunStoreError, match="runs beside it: stored"):
        runs.open(run.path.parent / "other")
    with pytest.raises(RunStoreError, match="holds ledgers and no run"):
        runs.open(run.path / "ledger")
    assert type(runs.open_any(run.path)) is runs.Run and type(runs.open_any(run.path / "ledger")) is runs.ForeignLedger


def test_a_run_is_readable_while_it_is_written(tmp_path):
    stored = StoredRun(tmp_path / "live")
    run = runs.open(tmp_path / "live")
    assert run.campaign["state"][0] == "running" and run.steps.is_empty()
    rollout, _ = stored.play("live.0.0.0", 2, kind="plain")
    assert run.calls["rollout_id"].to_list() == ["live.0.0.0"] * len(rollout.ids)
    assert run.calls["sampled_tokens"].null_count() == run.calls.height
    stored.step(1, [["plain", "retry"]])
    assert run.steps.height == 1 and run.rollouts.height == 2
    stored.step(2, [["plain", "edit"]])
    assert run.steps.height == 2 and run.groups["step"].to_list() == [1, 2]
    stored.finish()
    assert run.campaign["state"][0] == "done"


def test_a_crashed_run_opens_and_says_so(tmp_path):
    stored = StoredRun(tmp_path / "crash")
    stored.step(1, [["plain", "retry"]])
    stored.writer.close()
    with (tmp_path / "crash" / "events.jsonl").open("ab") as events:
        events.write(b'{"at": 1.0, "kind": "torn')
    run = runs.open(tmp_path / "crash")
    row = run.campaign.row(0, named=True)
    assert row["state"] == "stopped" and "is gone" in row["error"]
    assert run.rollouts.height == 2
    assert "torn" not in run.events["kind"].to_list()


def test_a_broken_line_is_named_and_costs_nothing_but_itself(tmp_path):
    path = make_run(tmp_path / "broken", steps=2)
    with (path / "groups.jsonl").open("ab") as groups:
        groups.write(b'{"group": "g7"}\n')
    (told,) = runs.open(path).damage
    assert told.endswith("expected group_id to be a text, got no such key")
    (path / "groups.jsonl").write_bytes(b"".join((path / "groups.jsonl").read_bytes().splitlines(keepends=True)[:-1]))
    steps, rollouts = runs.open(path).steps, runs.open(path).rollouts
    lines = (path / "steps.jsonl").read_bytes().splitlines()
    (path / "steps.jsonl").write_bytes(b"\n".join([lines[0], b"{broken", b"[1]", b'{"step": "2"}', lines[1]]) + b"\n")
    run = runs.open(path)
    assert run.steps.equals(steps) and run.rollouts.equals(rollouts)
    assert [re.search(r"steps.jsonl, line (\d)", told)[1] for told in run.damage] == ["2", "3", "4"]
    assert "3 broken lines left out (steps.jsonl, line 2 is not JSON" in repr(run)
    with pytest.raises(RunStoreError, match=r"steps.jsonl, line 2 is not JSON"):
        frames.read_lines(path / "steps.jsonl")


def test_a_torn_last_line_is_said_unless_somebody_is_writing_it(tmp_path):
    stored = StoredRun(tmp_path / "torn")
    stored.step(1, [["plain", "retry"]])
    with (tmp_path / "torn" / "groups.jsonl").open("ab") as file:
        file.write(b'{"group_id": "g0')
    run = runs.open(tmp_path / "torn")
    assert run.damage == [] and "torn line" not in repr(run)
    stored.writer.close()
    assert repr(run).endswith("1 torn line left out (groups.jsonl: its last line is torn)")


def test_a_recipe_that_cannot_be_read_does_not_keep_a_run_closed(tmp_path):
    path = make_run(tmp_path / "recipe", steps=1)
    (path / "recipe.yaml").write_text("name: [")
    run = runs.open(path)
    assert run.recipe == {} and run.rollouts.height
    assert repr(run).endswith(" · 1 unreadable file left out (recipe.yaml is not YAML)")


def test_a_row_is_called_trained_only_where_a_step_had_it_in_its_loss(tmp_path):
    path = make_run(tmp_path / "trained", steps=1)
    run = runs.open(path)
    of = dict(run.rollouts.select("rollout_id", "trained_step").rows())
    valid = run.rollouts.filter(pl.col("sample_mask") == 1)["rollout_id"].to_list()
    assert {rollout for rollout, step in of.items() if step == 1} == set(valid) and set(of.values()) == {1, None}
    part = path / "train" / "step-1.parquet"
    rows = pl.read_parquet(part)
    out = [[0] * len(mask) if rollout == valid[0] else mask for rollout, mask in rows["rollout_id", "loss_mask"].rows()]
    rows = rows.with_columns(
        pl.Series("loss_mask", out, dtype=rows.schema["loss_mask"]),
        left_out=pl.when(rollout_id=valid[0]).then(pl.lit("off_policy")).otherwise("left_out"),
    )
    rows.write_parquet(part)
    assert runs.open(path).rollouts.filter(rollout_id=valid[0])["trained_step"].to_list() == [None]
    part.unlink()
    assert runs.open(path).rollouts["trained_step"].null_count() == len(of)


@pytest.mark.parametrize("table", ["rows", "calls"])
def test_a_damaged_part_costs_its_own_rollouts_and_is_named(tmp_path, table):
    path = make_run(tmp_path / "cut", steps=2)
    whole = runs.open(shutil.copytree(path, tmp_path / "whole"))
    part = path / table / "g00000.parquet"
    part.write_bytes(part.read_bytes()[:200])
    run = runs.open(path)
    healthy = pl.col("group_id") != "g00000"
    for frame in ("rollouts", "calls"):
        assert getattr(run, frame).filter(healthy).equals(getattr(whole, frame).filter(healthy)), frame
    assert run.tokens("cut.2.0.0").equals(whole.tokens("cut.2.0.0"))
    logprobs = whole.logprobs()
    assert run.logprobs().equals(logprobs.filter(healthy) if table == "rows" else logprobs)
    (told,) = run.damage
    assert told.startswith(f"{part} is not a readable part of table {table}: ")
    assert told.endswith(f" Next: workbench verify {path} names all that is damaged.")
    assert repr(run).endswith(
        f"1 damaged part left out ({table}/g00000.parquet is not a readable part of table {table})"
    )
    read = run.tokens if table == "rows" else run.staged
    with pytest.raises(RunStoreError, match=rf"{table}/g00000.parquet is not a readable part"):
        read("cut.0.0.0")
    with pytest.raises(RunStoreError, match=rf"no rollout 'nobody'; .*{table}/g00000.parquet is not a readable part"):
        read("nobody")


def test_token_arrays_that_do_not_hold_are_named_once_somebody_read_them(tmp_path):
    path = make_run(tmp_path / "flipped", steps=1)
    part = path / "rows" / "g00000.parquet"
    group, broken = pq.read_metadata(part).row_group(0), bytearray(part.read_bytes())
    column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith("logprobs"))
    broken[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 2] ^= 1
    part.write_bytes(broken)
    run = runs.open(path)
    assert run.rollouts.height == 8 and run.damage == []
    assert run.tokens("flipped.1.0.0").height
    with pytest.raises(RunStoreError, match=r"rows/g00000.parquet is not a readable part"):
        run.tokens("flipped.0.0.0")
    assert [told.partition(" ")[0] for told in run.damage] == [str(part)]


def test_a_damaged_part_of_the_trainer_costs_what_the_trainer_said_and_no_rollout(tmp_path):
    path = make_run(tmp_path / "cut", steps=2)
    (path / "train" / "step-1.parquet").write_bytes(b"PAR1")
    run = runs.open(path)
    trained = run.rollouts.filter(pl.col("trained_step").is_not_null())
    assert set(trained["step"]) == {2} and run.rollouts.height == 16
    assert run.tokens("cut.0.0.0")["trainer_logprob"].null_count() == run.tokens("cut.0.0.0").height
    assert list(run.unread("cut.0.0.0")) == ["train"] and run.unread("cut.2.0.0") == {}
    assert "train/step-1.parquet is not a readable part" in repr(run)


def test_a_broken_line_of_other_receipts_keeps_no_receipt_closed(tmp_path):
    path = make_run(tmp_path / "stored", steps=1)
    receipts = path / "receipts" / "g00000.jsonl"
    receipts.write_bytes(b"{broken\n" + b"".join(receipts.read_bytes().splitlines(keepends=True)[1:]))
    run = runs.open(path)
    assert run.receipt("stored.0.1.0").manifest and run.receipt("stored.1.0.0").manifest
    with pytest.raises(RunStoreError, match=r"No receipt of rollout 'stored.0.0.0' in .*g00000.jsonl, line 1 is not"):
        run.receipt("stored.0.0.0")


def test_reading_adds_no_column_that_is_declared_twice():
    for table, added in frames.ADDED.items():
        assert not {column.name for column in added} & {column.name for column in schema.columns(table)}


def test_the_page_lists_the_columns_that_the_frames_of_a_real_run_have():
    run = runs.open(Path(runs.__file__).parents[1] / "demo" / "run")
    sections = frames_page.docs().split("\n## run.")[1:]
    listed = {section.partition("\n")[0]: section.partition("\n## ")[0] for section in sections}
    assert list(listed) == ["campaign", "steps", "groups", "rollouts", "calls", "events"]
    for frame, section in listed.items():
        always, _, carried = section.partition("\nBeside these")
        names, more = (re.findall(r"^\| `(\w+)` ", text, re.MULTILINE) for text in (always, carried))
        columns = getattr(run, frame).columns
        assert columns[: len(names)] == names, frame
        assert set(columns[len(names) :]) <= set(more) and not set(more) & set(names), frame


def test_a_diagnosis_that_comes_after_its_row_is_seen_by_an_open_run(tmp_path):
    path = make_run(tmp_path / "stored")
    events = path / "ledger" / "stored.1.1.0.events.jsonl"
    told = events.read_bytes()
    events.unlink()
    run = runs.open(path)
    assert run.calls.filter(rollout_id="stored.1.1.0")["drift"].count() == 0
    events.write_bytes(told)
    seen = run.calls.filter(rollout_id="stored.1.1.0")["drift"]
    assert seen.count() and run.damage == []
    events.write_bytes(b"\xff\xfe\n" + told)
    assert run.calls.filter(rollout_id="stored.1.1.0")["drift"].equals(seen)
    assert len(run.damage) == 1 and "stored.1.1.0.events.jsonl, line 1" in repr(run)


def test_a_rollout_in_flight_is_not_called_unknown(tmp_path):
    stored = StoredRun(tmp_path / "fly")
    stored.step(1, [["plain"]])
    assert Rollout(stored, "fly.9.0.0").call("yes<|im_end|>", tail="<|im_start|>user\nwell?")
    run = runs.open(tmp_path / "fly")
    assert run.calls.filter(rollout_id="fly.9.0.0").height == 1
    assert repr(run).startswith("Run fly · running · 1 step · 1 group · 1 of 1 rollouts valid")
    for read in (run.tokens, run.staged):
        with pytest.raises(RunStoreError, match=r"fly.9.0.0 of run fly is not finalised yet; its 1 recorded call can"):
            read("fly.9.0.0")
        with pytest.raises(RunStoreError, match=r"Run fly has no rollout 'nobody'"):
            read("nobody")
    stored.writer.close()
    with pytest.raises(RunStoreError, match="not finalised and never was: the run ended before"):
        run.tokens("fly.9.0.0")


def test_a_value_that_does_not_fit_its_column_is_named_with_column_and_table():
    with pytest.raises(RunStoreError, match="Column group_ids of table steps does not hold"):
        frames.frame_of("steps", [{"step": 1, "group_ids": 5}])


def test_further_words_and_numbers_of_a_record_are_columns_behind_the_declared_ones():
    frame = frames.frame_of("steps", [{"step": 1, "note": "slow", "celsius": 61.5}, {"step": 2}, {"mixed": 1}])
    assert frame.columns[-3:] == ["note", "celsius", "mixed"]
    assert frame["note"].to_list() == ["slow", None, None]
    mixed = frames.frame_of("steps", [{"mixed": 1}, {"mixed": "one"}])
    assert "mixed" not in mixed.columns  # no one dtype holds both


def test_a_file_that_is_gone_has_no_torn_line_and_no_part(tmp_path):
    assert not frames.has_torn_line(tmp_path / "gone.jsonl")
    assert frames.read_parts("rows", [tmp_path / "gone.parquet"]).is_empty()


def test_a_part_of_an_older_or_another_writer_is_read_by_its_columns(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    path = run_dir / "calls" / "g00000.parquet"
    whole, table = frames.read_parts("calls", [path]), pq.read_table(path)
    optional = [column.name for column in schema.columns("calls") if column.optional]
    older = table.drop_columns(optional).select([n for n in table.column_names[::-1] if n not in optional])
    pq.write_table(older, path)
    read = frames.read_parts("calls", [path])
    assert read.schema == whole.schema
    assert read.drop(optional).equals(whole.drop(optional))
    assert all(read[name].null_count() == read.height for name in optional)
    pq.write_table(older.drop_columns(["token_ids"]), path)
    with pytest.raises(RunStoreError, match=r"g00000\.parquet is not a part of table calls: it lacks token_ids"):
        frames.read_parts("calls", [path])


def test_a_rollout_without_staged_tokens_says_why_there_are_none():
    call = {"model_call_id": "c0", "token_ids": None, "terminal": False, "failure_reason": None, "staging": None}
    for calls, why in (
        ([], "it has no recorded calls"),
        ([call | {"failure_reason": "unresolved_parent"}, call], "unknown, unresolved_parent"),
    ):
        with pytest.raises(RunStoreError, match=f"Rollout r has no staged tokens: {why}"):
            call_path_tokens("r", calls, None)


def test_a_path_through_a_call_that_was_not_staged_is_named(tmp_path):
    run = runs.open(make_run(tmp_path / "stored", steps=1))
    calls = [call for call in run._table("calls", "stored.0.1.0").to_dicts() if call["parent_call_id"] is not None]
    with pytest.raises(RunStoreError, match=r"continues '.*', which was not staged"):
        call_path_tokens("stored.0.1.0", calls, None)


def test_a_trained_row_that_is_gone_costs_its_log_probs_alone(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    before = runs.open(run_dir).logprobs()
    (run_dir / "rows" / "g00000.parquet").unlink()
    after = runs.open(run_dir).logprobs()
    assert after.height and after.equals(before.filter(pl.col("group_id") != "g00000"))


# The same two bytes, spelled as no encoder spells them.
ODD_BASE64 = encode_routes(np.zeros((1, 1, 1), np.int16)).replace("AAA=", "AAB=")


@pytest.mark.parametrize("odd", ["no envelope", ODD_BASE64])
def test_routes_in_another_form_than_ours_stay_where_they_are(odd):
    for extras in ({ROUTED_EXPERTS: odd}, {ROUTED_EXPERTS: [[[1]]]}, None):
        assert staged.apart(extras) == (extras, None)
    values = np.arange(6, dtype=np.int16).reshape(3, 2, 1)
    ours = encode_routes(values)
    without, routes = staged.apart({"finish_reason": "stop", ROUTED_EXPERTS: ours})
    assert routes == values.tobytes() and staged.together(dict(without), routes)[ROUTED_EXPERTS] == ours
