"""Verification of a stored run: everything holds, and one changed bit anywhere is found and named.

Long because each kind of file in a run is changed in each way that matters, most in a few lines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_run import make_run, rewrite_json_line

from workbench import runs
from workbench.campaign.verify import VerifyReport, verify_run
from workbench.campaign.verify.report import NOT_COVERED
from workbench.errors import RunStoreError
from workbench.runs import schema
from workbench.runs.writer import RunWriter, write_part


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("verify") / "stored", steps=1)


@pytest.fixture
def run_dir(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "stored"))


def change_part(path: Path, table: str, change: Callable[[list[dict]], None]) -> None:
    rows = pq.read_table(path).to_pylist()
    change(rows)
    names = [column.name for column in schema.columns(table)]
    write_part(path, table, {name: [row[name] for row in rows] for name in names})


def only_difference(report: VerifyReport, file: str, rollout: str, what: str) -> None:
    assert not report.ok and repr(report).startswith("NOT as recorded: ")
    assert {d.file for d in report.differences} == {file}, str(report)
    assert {d.rollout_id for d in report.differences} == {rollout}, str(report)
    assert any(what in d.what for d in report.differences), str(report)


def test_a_run_as_it_was_written_holds(original):
    report = verify_run(original)
    assert report.ok, str(report)
    assert (report.groups, report.rollouts, report.rows_valid) == (2, 8, 6)
    assert report.calls > 16 and report.ledger_rows == report.calls - report.calls_not_captured
    assert report.calls == runs.open(original).calls.height and report.tokens > 500
    assert repr(report).endswith("every digest, row and step holds")


def test_one_changed_token_of_a_call_is_found(run_dir):
    def change(rows):
        row = next(r for r in rows if r["rollout_id"] == "stored.0.0.0" and r["disposition"] == "staged")
        row["token_ids"][3] += 1

    change_part(run_dir / "calls" / "g00000.parquet", "calls", change)
    report = verify_run(run_dir)
    assert {"calls/g00000.parquet", "rows/g00000.parquet"} == {d.file for d in report.differences}
    assert {d.rollout_id for d in report.differences} == {"stored.0.0.0"}
    whats = " ".join(d.what for d in report.differences)
    assert "digest is" in whats and "chain_hash is" in whats and "cumulative_hash is" in whats
    assert "cause is None, recomputed 'corrupt_digest'" in whats


@pytest.mark.parametrize("part", ["calls/g00000.parquet", "rows/g00000.parquet", "train/step-1.parquet"])
def test_a_flipped_bit_of_any_column_of_a_part_is_found_whatever_the_column_means(run_dir, part):
    path = run_dir / part
    whole = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    for number in range(group.num_columns):
        column = group.column(number)
        first = column.dictionary_page_offset or column.data_page_offset
        broken = bytearray(whole)
        broken[first + column.total_compressed_size - 2] ^= 1
        path.write_bytes(broken)
        named = {d.file for d in verify_run(run_dir).differences}
        assert part in named, column.path_in_schema


def test_a_group_and_a_step_that_are_gone_altogether_are_named_from_the_logs(run_dir):
    (run_dir / "train" / "step-1.parquet").unlink()
    for part in ("calls/g00001.parquet", "rows/g00001.parquet", "receipts/g00001.jsonl"):
        (run_dir / part).unlink()
    named = {difference.file for difference in verify_run(run_dir).differences}
    assert named == {"calls/g00001.parquet", "train/step-1.parquet"}


def test_a_log_that_a_finished_run_has_lost_is_named_once_and_a_lost_line_by_what_it_was_about(run_dir):
    for log, noun in (("steps.jsonl", "1 step"), ("groups.jsonl", "2 groups")):
        whole = (run_dir / log).read_bytes()
        for lost, says in ((lambda path: path.unlink(), "missing"), (lambda path: path.write_bytes(b""), "holds no ")):
            lost(run_dir / log)
            (difference,) = verify_run(run_dir).differences
            assert difference.file == log and says in difference.what
            assert difference.what.endswith(f"{noun} were trained and the run is done")
        (run_dir / log).write_bytes(b"{broken\n" + whole)
        (difference,) = verify_run(run_dir).differences
        assert f"{log}, line 1 is not JSON" in difference.what
        (run_dir / log).write_bytes(whole)
    first, second = (run_dir / "groups.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "groups.jsonl").write_bytes(second)
    (difference,) = verify_run(run_dir).differences
    assert str(difference) == "groups.jsonl: has no line of group g00000, which was trained"
    # One that was stopped may have come to its parts and not to their lines.
    (run_dir / "groups.jsonl").write_bytes(first)
    (run_dir / "steps.jsonl").unlink()
    with RunWriter(run_dir) as writer:
        writer.event("stopped", reason="interrupted")
        writer.status(status="stopped")
    assert verify_run(run_dir).ok


def test_a_group_that_a_kill_left_half_written_is_no_difference_and_said_to_be_unfinished(run_dir):
    """Only where nobody has heard of it: not in a run that is done, not where a line or a step names it."""
    for kind in ("calls", "rows"):
        part = run_dir / kind / "g00001.parquet"
        (run_dir / kind / "g00099.parquet").write_bytes(part.read_bytes())
    (difference,) = verify_run(run_dir).differences
    assert (difference.file, difference.what) == ("receipts/g00099.jsonl", "the group's receipts are missing")
    with RunWriter(run_dir) as writer:
        writer.event("stopped", reason="interrupted")
        writer.status(status="stopped")
    for _ in range(2):
        report = verify_run(run_dir)
        assert report.ok, str(report)
        assert repr(report).endswith(
            "every digest, row and step holds · unfinished, so it counts as never sampled: g00099"
        )
        (run_dir / "rows" / "g00099.parquet").unlink(missing_ok=True)
    (run_dir / "receipts" / "g00001.jsonl").unlink()
    assert {d.file for d in verify_run(run_dir).differences} == {"receipts/g00001.jsonl"}
    (run_dir / "groups.jsonl").write_bytes(b"")
    assert {d.file for d in verify_run(run_dir).differences} == {"receipts/g00001.jsonl"}


def test_a_run_without_a_finished_group_is_not_said_to_hold(tmp_path):
    (tmp_path / "steps.jsonl").touch()
    report = verify_run(tmp_path)
    assert report.ok and report.empty
    assert repr(report) == f"Nothing to verify in {report.run}: no group was finished"


def test_a_part_whose_columns_are_of_another_type_is_named_and_no_exception(run_dir):
    path = run_dir / "train" / "step-1.parquet"
    table = pq.read_table(path)
    index = table.column_names.index("rollout_id")
    pq.write_table(table.set_column(index, "rollout_id", table["rollout_id"].cast("binary")), path)
    (difference,) = verify_run(run_dir).differences
    assert (
        difference.file == "train/step-1.parquet"
        and "not a readable part" in difference.what
        and "Next" not in difference.what
    )


@pytest.mark.parametrize(
    ("part", "column", "value"),
    [
        *(("calls", column, value) for column in ("snapshot", "extras") for value in ("{no json", "[1]")),
        ("calls", "snapshot", '{"unheard_of": 1}'),
        ("calls", "staging", "unheard_of"),
        *(("rows", column, "{no json") for column in ("route_plan", "reward_components")),
        *(("rows", column, "{no json") for column in ("weight_version_spans", "link_spans")),
        ("rows", "route_plan", '{"dims": 1}'),
    ],
)
def test_a_cell_that_cannot_be_read_is_named_and_no_exception(run_dir, part, column, value):
    # As somebody would write it who changes a part on purpose: every checksum of the file is right.
    path = run_dir / part / "g00000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    report = verify_run(run_dir)
    assert f"{part}/g00000.parquet" in {difference.file for difference in report.differences}, str(report)


def lose_a_row(rows):
    del rows[0]


def say_one_twice(rows):
    rows.append({**rows[0]})


def name_another(rows):
    rows[0]["rollout_id"] = "stored.9.9.9"


@pytest.mark.parametrize("part", ["calls/g00000.parquet", "rows/g00000.parquet", "train/step-1.parquet"])
@pytest.mark.parametrize("change", [lose_a_row, say_one_twice, name_another])
def test_a_row_that_was_removed_added_or_given_to_another_rollout_is_found(run_dir, part, change):
    change_part(run_dir / part, part.partition("/")[0], change)
    report = verify_run(run_dir)
    assert part in {difference.file for difference in report.differences}, str(report)


def test_a_ledger_that_cannot_be_read_is_named(run_dir):
    path = sorted((run_dir / "ledger").glob("*.lineage.jsonl"))[0]
    path.write_bytes(b"{torn\n" + path.read_bytes())
    assert {difference.file for difference in verify_run(run_dir).differences} == {f"ledger/{path.name}"}


def test_one_changed_token_of_a_side_branch_is_found(run_dir):
    def change(rows):
        row = next(r for r in rows if r["rollout_id"] == "stored.0.2.0" and r["on_chain"] is False)
        row["logprobs"][-1] -= 0.25

    change_part(run_dir / "calls" / "g00000.parquet", "calls", change)
    assert not verify_run(run_dir).ok


def test_changed_extras_are_found(run_dir):
    def change(rows):
        row = next(r for r in rows if r["rollout_id"] == "stored.0.0.0" and r["disposition"] == "staged")
        row["extras"] = orjson.dumps({**orjson.loads(row["extras"]), "finish_reason": "length"}).decode()

    change_part(run_dir / "calls" / "g00000.parquet", "calls", change)
    assert any("extras_digest is" in d.what for d in verify_run(run_dir).differences)


def test_one_changed_bit_of_a_rows_logprob_is_found_with_its_position(run_dir):
    def change(rows):
        at = rows[1]["token_mask"].index(1)
        rows[1]["logprobs"][at] *= 1 + 2**-20

    change_part(run_dir / "rows" / "g00000.parquet", "rows", change)
    report = verify_run(run_dir)
    only = [d for d in report.differences if d.file.startswith("rows/")]
    assert len(only) == 1 and "logprobs differs at 1 positions, first at" in only[0].what


def test_a_rejected_rollout_made_valid_is_found(run_dir):
    def change(rows):
        rows[1]["sample_mask"], rows[1]["cause"] = 1, None

    change_part(run_dir / "rows" / "g00001.parquet", "rows", change)
    report = verify_run(run_dir)
    assert any("sample_mask is 1, recomputed 0" in d.what for d in report.differences)


def test_a_changed_receipt_is_found(run_dir):
    rewrite_json_line(run_dir / "receipts" / "g00000.jsonl", 0, {"task_id": "another"})
    only_difference(verify_run(run_dir), "rows/g00000.parquet", "stored.0.0.0", "task_id is")


def test_a_changed_ledger_row_is_found(run_dir):
    rewrite_json_line(run_dir / "ledger" / "stored.0.0.0.lineage.jsonl", 1, {"staging_digest": "0" * 64})
    only_difference(verify_run(run_dir), "ledger/stored.0.0.0.lineage.jsonl", "stored.0.0.0", "digest is '000")


@pytest.mark.parametrize("part", ["calls/g00000.parquet", "rows/g00000.parquet", "train/step-1.parquet"])
@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[:200]), lambda path: path.unlink()])
def test_a_damaged_or_missing_part_is_one_difference(run_dir, part, change):
    change(run_dir / part)
    assert [difference.file for difference in verify_run(run_dir).differences] == [part]


def test_each_damaged_part_of_a_group_is_named(run_dir):
    for part in ("calls/g00000.parquet", "rows/g00000.parquet"):
        (run_dir / part).write_bytes(b"PAR1")
    named = [difference.file for difference in verify_run(run_dir).differences]
    assert named == ["calls/g00000.parquet", "rows/g00000.parquet"]


def test_a_missing_and_a_damaged_part_are_named(run_dir):
    (run_dir / "calls" / "g00000.parquet").unlink()
    part = run_dir / "rows" / "g00001.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    files = {d.file for d in verify_run(run_dir).differences}
    assert {"calls/g00000.parquet", "rows/g00001.parquet"} <= files


def test_a_trainer_record_of_other_numbers_is_found(run_dir):
    def change(rows):
        record = next(r for r in rows if r["sample_mask"] == 1)
        at = next(i for i, d in enumerate(record["delta"]) if d)
        record["delta"][at] += 0.5

    change_part(run_dir / "train" / "step-1.parquet", "train", change)
    report = verify_run(run_dir)
    assert [d.file for d in report.differences] == ["train/step-1.parquet"]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunStoreError, match="No run in"):
        verify_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [b"{", *lines[1:]], "is not a group's receipts"),
        (lambda lines: [lines[0].replace(b'"index":0', b'"index":"none"'), *lines[1:]], "is not a group's receipts"),
        (lambda lines: [lines[0].replace(b'"index":0', b'"index":7'), *lines[1:]], "expected one rollout an index"),
    ],
)
def test_receipts_that_are_none_or_of_another_group_are_named(run_dir, change, says):
    path = run_dir / "receipts" / "g00000.jsonl"
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
    report = verify_run(run_dir)
    assert {d.file for d in report.differences} == {"receipts/g00000.jsonl"}, str(report)
    assert says in report.differences[0].what


def test_a_call_that_contradicts_itself_is_found(run_dir):
    def change(rows):
        next(r for r in rows if r["disposition"] == "staged")["logprobs"][0] = float("nan")

    change_part(run_dir / "calls" / "g00000.parquet", "calls", change)
    assert any("contradicts itself" in d.what for d in verify_run(run_dir).differences)


def test_a_trainers_record_of_another_length_is_found(run_dir):
    def change(rows):
        row = next(r for r in rows if r["sample_mask"] == 1)
        for name in ("trainer_logprobs", "delta", "loss_mask"):
            row[name] = row[name][:-1]

    change_part(run_dir / "train" / "step-1.parquet", "train", change)
    assert any("log-probs for a row of" in d.what for d in verify_run(run_dir).differences)


def test_of_very_many_differences_some_are_shown_and_all_are_counted():
    report = VerifyReport("stored")
    for number in range(30):
        report.differs("rows/g0.parquet", f"r{number}", None, "another token")
    assert str(report).splitlines()[-1] == "  showing 20 of 30 differences; all: .differences"


def test_lines_and_files_that_cannot_be_read_are_all_named(run_dir):
    for file in ("events.jsonl", "ledger/stored.0.0.0.events.jsonl"):
        path = run_dir / file
        path.write_bytes(b"{broken\n" + (path.read_bytes() if path.exists() else b""))
    (run_dir / "status.json").write_bytes(b'{"status": "do')
    report = verify_run(run_dir)
    assert [d.file for d in report.differences] == ["status.json", "events.jsonl", "ledger/stored.0.0.0.events.jsonl"]
    assert "line 1 is not JSON" in str(report)


@pytest.mark.parametrize(
    "file", ["events.jsonl", "ledger/stored.0.0.0.lineage.jsonl", "ledger/stored.0.1.0.replay.jsonl"]
)
def test_a_torn_last_line_is_a_remark_and_no_difference(run_dir, file):
    """A crash in mid-append: nobody was told of it, so nothing that the run claims is wrong."""
    with (run_dir / file).open("ab") as log:
        log.write(b'{"model_call_id": "4f')
    report = verify_run(run_dir)
    assert report.ok and repr(report).endswith("every digest, row and step holds · 1 remark")
    (remark,) = report.remarks
    assert remark.startswith(f"{file}: its last line is torn") and "Next: nothing to do" in remark
    assert str(report).splitlines()[-1] == f"  remark: {remark}"


def test_a_line_that_is_being_written_is_not_torn(run_dir):
    with RunWriter(run_dir), (run_dir / "events.jsonl").open("ab") as log:
        log.write(b'{"kind": "st')
        log.flush()
        assert verify_run(run_dir).remarks == []


def test_a_torn_line_that_the_run_counted_on_is_both(run_dir):
    path = run_dir / "groups.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    report = verify_run(run_dir)
    (difference,) = report.differences
    assert str(difference) == "groups.jsonl: has no line of group g00001, which was trained"
    assert [remark.partition(":")[0] for remark in report.remarks] == ["groups.jsonl"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name:\n  a: [", "is not YAML (expected the node content, but found '<stream end>' at line 2)"),
        (b"name: !!int x", "is not YAML (invalid literal"),
        (b"\xff\xfe\x00", "is not YAML ("),
        (b"- a list", "is no recipe (expected keys and values, got list)"),
        (None, "cannot be read (Is a directory)"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named_with_what_to_do(run_dir, content, says):
    (run_dir / "recipe.yaml").unlink()
    if content is None:
        (run_dir / "recipe.yaml").mkdir()
    else:
        (run_dir / "recipe.yaml").write_bytes(content)
    (difference,) = verify_run(run_dir).differences
    assert difference.file == "recipe.yaml" and says in difference.what
    assert difference.what.endswith(". Next: restore it from a copy of the run; workbench resume goes by it")


def test_a_recipe_that_is_missing_is_a_remark_where_the_run_has_not_finished(run_dir):
    (run_dir / "recipe.yaml").unlink()
    with RunWriter(run_dir) as writer:
        writer.event("stopped", reason="interrupted")
        writer.status(status="stopped")
    report = verify_run(run_dir)
    assert report.ok
    assert report.remarks == [
        "recipe.yaml: this file is missing, so what the run was to do is not known. "
        "Next: restore it from a copy of the run; workbench resume goes by it"
    ]


def test_every_broken_line_of_a_log_is_named(run_dir):
    path = run_dir / "groups.jsonl"
    path.write_bytes(b"{broken\n" * 2 + path.read_bytes())
    assert [d.file for d in verify_run(run_dir).differences] == ["groups.jsonl"] * 2


@pytest.mark.parametrize(("steps", "name"), [(1, "weight_version"), (3, "group_ids")])
def test_a_line_that_says_its_things_under_another_name_is_named(tmp_path, steps, name):
    path = make_run(tmp_path / "stored", steps=steps) / "steps.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first.replace(name.encode(), b"we<on") + b"\n" + rest)
    (difference,) = verify_run(path.parent).differences
    assert difference.what == f"the line of 1 has no {name}"


def test_a_line_of_a_newer_version_that_says_more_holds(tmp_path):
    path = make_run(tmp_path / "stored", steps=2) / "steps.jsonl"
    rewrite_json_line(path, 1, {"new": 1.0})
    assert verify_run(path.parent).ok


def changed_step(run_dir: Path, **change: object) -> list[str]:
    rewrite_json_line(run_dir / "steps.jsonl", 0, change)
    return [str(difference) for difference in verify_run(run_dir).differences]


def test_a_step_whose_line_says_something_else_than_its_rows_is_named(run_dir):
    (line,) = (orjson.loads(line) for line in (run_dir / "steps.jsonl").read_bytes().splitlines())
    (said,) = changed_step(run_dir, reward_mean=0.9)
    assert said == f"steps.jsonl: step 1: reward_mean is 0.9, recomputed {line['reward_mean']!r}"
    rates = ("token_in_rate", "token_in_rate_after_roots", "valid_rows", "reward_std", "calls", "rejections")
    for name in (*rates, "advantage_abs_mean", "token_lag_mean", "mean_abs_logprob_delta", "sampled_tokens"):
        (said,) = changed_step(run_dir, reward_mean=line["reward_mean"], **{name: 77})
        assert f"steps.jsonl: step 1: {name} is 77, recomputed" in said
        rewrite_json_line(run_dir / "steps.jsonl", 0, line)
    report = verify_run(run_dir)
    assert report.ok and report.steps == 1
    assert str(report).splitlines()[-1].strip() == NOT_COVERED and "tools/recompute_run.py" in NOT_COVERED


def test_a_group_whose_line_says_something_else_than_its_rows_is_named(run_dir):
    rewrite_json_line(run_dir / "groups.jsonl", 1, {"valid_rows": 4})
    (said,) = verify_run(run_dir).differences
    assert str(said).startswith("groups.jsonl: group g00001: valid_rows is 4, recomputed ")


@pytest.mark.parametrize("change", ["advantage", "left_out", "loss_mask"])
def test_a_vote_that_the_rewards_and_the_recipe_do_not_give_is_named_with_its_rollout(run_dir, change):
    def spoil(rows):
        row = next(row for row in rows if row["rollout_id"] == "stored.0.1.0")
        if change == "loss_mask":
            row["loss_mask"][row["loss_mask"].index(1)] = 0
        else:
            row[change] = row["advantage"] + 0.01 if change == "advantage" else "off_policy"

    change_part(run_dir / "train" / "step-1.parquet", "train", spoil)
    only_difference(verify_run(run_dir), "train/step-1.parquet", "stored.0.1.0", f"{change} ")


def test_advantages_that_were_shuffled_are_those_of_the_group_in_any_order(run_dir):
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("options: {}", "options: {}, shuffle: true"))

    def turn(rows):
        first = [row for row in rows if row["group_id"] == "g00000"]
        given = [row["advantage"] for row in first]
        for row, value in zip(first, given[1:] + given[:1], strict=True):
            row["advantage"] = value

    change_part(run_dir / "train" / "step-1.parquet", "train", turn)
    assert verify_run(run_dir).ok
    change_part(run_dir / "train" / "step-1.parquet", "train", lambda rows: rows[0].update(advantage=5.0))
    assert "advantage is" in str(verify_run(run_dir))


def test_what_cannot_be_recomputed_for_want_of_a_recipe_is_said_and_no_difference(run_dir):
    (run_dir / "recipe.yaml").write_text("name: stored\n")
    report = verify_run(run_dir)
    assert report.ok and report.not_compared == [
        "advantages and votes of the steps: not compared, recipe.yaml names no estimator"
    ]
    (said,) = changed_step(run_dir, token_in_rate=0.123)
    assert "token_in_rate is 0.123" in said


def test_a_row_that_was_changed_is_one_difference_and_not_its_groups_and_steps_as_well(run_dir):
    change_part(run_dir / "rows" / "g00000.parquet", "rows", lambda rows: rows[0].update(reward=0.99))
    assert {difference.file for difference in verify_run(run_dir).differences} == {"rows/g00000.parquet"}


def test_lines_that_a_resume_wrote_are_no_difference(run_dir):
    """Of a step taken again log-probs may differ by what another machine does; of one that was loaded the trainer said
    nothing, and what is said is what its groups give."""
    (line,) = (orjson.loads(line) for line in (run_dir / "steps.jsonl").read_bytes().splitlines())
    off = line["mean_abs_logprob_delta"] + 1e-4
    assert changed_step(run_dir, mean_abs_logprob_delta=off)
    assert changed_step(run_dir, mean_abs_logprob_delta=off, retaken_mean_abs_delta=1e-4) == []
    groups = [orjson.loads(line) for line in (run_dir / "groups.jsonl").read_bytes().splitlines()]
    pooled = {"step": 1, "weight_version": 1, "group_ids": [group["group_id"] for group in groups]}
    pooled |= {name: sum(group[name] for group in groups) for name in ("rows", "tokens", "valid_rows")}
    assert pooled["tokens"] < line["tokens"]
    (run_dir / "steps.jsonl").write_bytes(orjson.dumps(pooled) + b"\n")
    assert verify_run(run_dir).ok
    (said,) = changed_step(run_dir, tokens=5)
    assert "tokens is 5" in said


def test_calls_of_an_attempt_that_a_stop_ended_are_told_of_though_its_group_was_sampled_again(run_dir):
    for path in (run_dir / "ledger").glob("stored.0.0.0.*.jsonl"):
        ended = path.read_text().replace("stored.0.0.0", "stored.0.0.9")
        path.with_name(path.name.replace("stored.0.0.0", "stored.0.0.9")).write_text(ended)
    started = {"kind": "group_started", "group_id": "g00000", "rollout_ids": ["stored.0.0.9"]}
    with (run_dir / "events.jsonl").open("ab") as events:
        events.write(orjson.dumps(started) + b"\n")
    calls = runs.open(run_dir).calls.filter(rollout_id="stored.0.0.9")
    assert calls.height > 1 and set(calls["group_id"]) == {"g00000"}
    report = verify_run(run_dir)
    assert report.not_compared == [f"{calls.height} calls of 1 rollout without a receipt"]
