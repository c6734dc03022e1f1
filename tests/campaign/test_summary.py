"""Summary and progress: numbers that are queries, lines that say what is known and no more.

Long because each line of a summary, and of the progress that comes before it, has a run of its own.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_run import StoredRun, make_run

from workbench import runs
from workbench.campaign.record_demo import record_demo
from workbench.campaign.report.listing import list_lines, listing
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.progress import ProgressLine, describe
from workbench.campaign.report.runner import NotebookResult, conclude, resume_run
from workbench.campaign.report.summary import summarise
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.errors import RunStoreError, SetupError
from workbench.finalizer import parts
from workbench.finalizer.stored import read_group
from workbench.inspect import CaptureRate, Engagement, PoisonTable, SweepView
from workbench.inspect.rejected import nothing_trained, rejected_words
from workbench.runs import schema
from workbench.runs.gradient import NO_GRADIENT
from workbench.runs.shelf import overview
from workbench.runs.writer import RunWriter


def test_the_summary_names_notebook_rates_rejections_versions_and_rewards(tmp_path):
    run_dir = make_run(tmp_path / "stored")
    summary = summarise(run_dir, notebook=run_dir / "campaign.ipynb", outcome=Outcome("done"), seconds=95.0)
    run = runs.open(run_dir)
    roots = (run.calls["mode"] == "text").sum()
    children = (run.calls["mode"] == "token_in").sum()
    assert summary.token_in_rate == children / run.calls.height
    assert summary.token_in_rate_after_roots == children / (run.calls.height - roots)
    assert summary.rows_per_group == [4, 4, 4, 4] and summary.weight_version == summary.steps == 2
    assert [row["cause"] for row in summary.rejected].count("unresolved_parent") == 2
    assert summary.trained_tokens == run.logprobs().height
    equal = [row for row in run.logprobs().iter_rows(named=True) if row["weight_version"] == row["step"] - 1]
    assert 0 < summary.on_policy_tokens == len(equal) <= summary.trained_tokens
    mean = sum(abs(row["delta"]) for row in equal) / len(equal)
    assert summary.mean_abs_logprob_delta_on_policy == pytest.approx(mean)
    text = summary.text()
    for words in (
        "Run stored: done (1.6 min)", "campaign.ipynb", "rows in every group: 4", "2 passed, worst mean |Δ| 0.0300",
        "rejected rollouts          4", "stored.1.1.0 and 1 more  unresolved_parent", "weight version 2",
    ):  # fmt: skip
        assert words in text
    assert orjson.loads(orjson.dumps(summary.as_dict()))["rollouts"] == 16


def test_the_summary_of_a_run_that_never_came_to_a_step_has_dashes(tmp_path):
    StoredRun(tmp_path / "early").writer.close()
    outcome = Outcome("failed", "ProbeFailed", "no log-probs")
    summary = summarise(tmp_path / "early", notebook=Path("n.ipynb"), outcome=outcome, seconds=3.0)
    assert summary.token_in_rate_after_roots is None and summary.error == "ProbeFailed: no log-probs"
    assert "token_in_rate_after_roots  –" in summary.text()
    assert "  mean |Δ log-prob|          –, no token\n    at equal weights         –, no token\n" in summary.text()


def test_calls_of_rollouts_that_were_still_played_are_counted_apart(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "plain"]])
    finished = runs.open(stored.run_dir).calls.height
    stored.play("run.9.0.0", 2, kind="plain")
    stored.finish()
    summary = summarise(stored.run_dir, notebook=Path("n.ipynb"), outcome=Outcome("stopped"), seconds=3.0)
    assert (summary.calls, summary.unfinished_calls) == (finished, 2)
    assert f"2 of 2 valid, {finished} calls, and 2 of unfinished rollouts, in no rate" in summary.text()


def test_summary_page_and_list_of_runs_count_the_same_calls(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "edit"]])
    stored.play("run.9.0.0", 3, kind="edit")
    stored.finish()
    run = runs.open(stored.run_dir)
    summary = summarise(stored.run_dir, notebook=Path("n.ipynb"), outcome=Outcome("stopped"), seconds=3.0)
    marks = {each.what: each.found for each in Engagement(run).evidence}
    assert (summary.calls, summary.unfinished_calls) == (5, 3) and marks["calls staged"] == "4 of 5"
    rates = summary.token_in_rate, summary.token_in_rate_after_roots
    assert marks["token_in_rate"] == f"{rates[0]:.4g}, after roots {rates[1]:.4g} (2 of 3)"
    assert f"token_in_rate_after_roots {rates[1]:.4g} of the whole run" in repr(CaptureRate(run))
    (row,) = overview([stored.run_dir]).iter_rows(named=True)
    assert (row["token_in_rate"], row["token_in_rate_after_roots"]) == rates
    html = Engagement(run).html()
    assert "1 call not staged: unresolved_parent 1." in html
    assert "Counted, here and in the summary: 5 calls of finalised rollouts. 3 more, of 1 rollout never " in html
    assert "2 calls left no tokens, 1 of them of rollouts that were not finalised; " in PoisonTable(run).html()
    whole = runs.open(make_run(tmp_path / "whole"))
    assert "Counted" not in Engagement(whole).html() and "not finalised" not in PoisonTable(whole).html()


def test_rollouts_that_ended_early_are_counted_by_reason_wherever_rollouts_are(tmp_path, monkeypatch):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "early", "nan"], ["early", "plain", "plain"]])
    stored.finish()
    run = runs.open(stored.run_dir)
    assert run.rollouts["ended_early"].drop_nulls().to_list() == ["window full: 40 tokens, at most 32"] * 2
    assert [orjson.loads(text) for text in run.groups["ended_early"]] == [{"window full": 1}] * 2
    assert orjson.loads(run.steps["ended_early"][0]) == {"window full": 2}
    summary = summarise(stored.run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert summary.ended_early == {"window full": 2}
    said = "2 of 6 rollouts: window full (2). Those with a vote train as far as they came. Next, if not meant: a large"
    assert f"  ENDED EARLY                {said}" in summary.text()
    assert summary.text().index("ENDED EARLY") < summary.text().index("notebook ")
    few = dataclasses.replace(summary, rollouts=60).text()
    assert "  ended early                2 of 60 rollouts" in few and "EARLY" not in few
    assert (f"Ended early: {said}" in Engagement(run).html()) and Engagement(run).remarks()[0][1]
    (line,) = list_lines(overview([stored.run_dir]))[2:]
    assert line == "  2 of 6 rollouts ended early"
    assert "Ended early, which alone costs no vote: 2 of 6 rollouts: window full (2)." in PoisonTable(run).html()


def test_a_run_from_before_ended_early_was_stored_opens_and_is_gone_on_with(tmp_path, monkeypatch):
    older = tuple(column for column in schema.TABLES["rows"] if column.name != "ended_early")
    rows_as_now = parts.row_records
    with monkeypatch.context() as before:
        before.setitem(schema.TABLES, "rows", older)
        before.setattr(
            parts,
            "row_records",
            lambda *a: [{n: v for n, v in r.items() if n != "ended_early"} for r in rows_as_now(*a)],
        )
        stored = StoredRun(tmp_path / "run")
        stored.step(1, [["plain", "plain"]])
        stored.finish()
    (part,) = (tmp_path / "run" / "rows").glob("g*.parquet")
    assert "ended_early" not in pq.read_schema(part).names
    assert runs.open(stored.run_dir).rollouts["ended_early"].to_list() == [None, None]
    group = read_group(stored.run_dir, part.stem)
    assert [summary.ended_early for summary in group.summaries] == [None, None]


def test_the_list_of_runs_has_the_rates_of_the_summary(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "plain"]])
    stored.play("run.9.0.0", 2, kind="edit")
    stored.finish()
    summary = summarise(stored.run_dir, notebook=Path("n.ipynb"), outcome=Outcome("stopped"), seconds=3.0)
    assert summary.unfinished_calls
    (row,) = overview([stored.run_dir]).iter_rows(named=True)
    assert row["token_in_rate"] == summary.token_in_rate
    assert row["token_in_rate_after_roots"] == summary.token_in_rate_after_roots == 1.0
    head, line = list_lines(overview([stored.run_dir]))[:2]
    assert re.split(" {2,}", head)[4] == "after roots" and re.split(" {2,}", line)[4] == "1"


def test_a_stopped_runs_summary_counts_the_groups_that_verify_finds(tmp_path):
    """Two groups of which the campaign had not heard when it was stopped, and one that was being written."""
    run_dir = make_run(tmp_path / "stored")
    lines = (run_dir / "groups.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    (run_dir / "groups.jsonl").write_bytes(b"".join(lines[:2]))
    (run_dir / "receipts" / "g00003.jsonl").unlink()
    (run_dir / "train" / "step-2.parquet").unlink()
    steps = (run_dir / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "steps.jsonl").write_bytes(steps[0])
    with RunWriter(run_dir) as writer:
        writer.event("stopped", reason="interrupted")
        writer.status(status="stopped")
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("stopped"), seconds=3.0)
    verified = verify_run(run_dir)
    assert verified.ok, verified
    assert (summary.groups, summary.rollouts) == (verified.groups, verified.rollouts) == (3, 12)
    assert summary.rows_per_group == [4, 4, 4]


def test_a_step_that_was_taken_before_the_stop_is_told_beside_those_with_a_line(tmp_path):
    run_dir = make_run(tmp_path / "stored")
    lines = (run_dir / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "steps.jsonl").write_bytes(b"".join(lines[:-1]))
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("stopped"), seconds=3.0)
    assert (summary.steps, summary.unrecorded_steps) == (len(lines) - 1, 1)
    assert f"optimiser steps            {len(lines) - 1}, and 1 more whose weights were not out yet, " in summary.text()


def test_rollouts_that_were_rejected_alike_are_one_line_with_their_number_and_an_example(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", *["edit"] * 15, "nan"]])
    summary = summarise(stored.finish(), notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert len(summary.rejected) == 16
    *_, count, alike, other = summary.text().splitlines()
    assert count == "  rejected rollouts          16"
    assert alike.startswith("    run.0.1.0 and 14 more  unresolved_parent  history_edited (")
    assert other.startswith("    run.0.16.0  worker_capture_failed at call ")
    assert max(map(len, (alike, other))) <= 160
    different = [
        row | {"detail": f"{row['detail']}; the {k}. sentence {'long ' * 60}"} for k, row in enumerate(summary.rejected)
    ]
    many = dataclasses.replace(summary, rejected=different).text().splitlines()
    assert many[-1] == "    and 4 more (unresolved_parent 3, worker_capture_failed 1), all in summary.json"
    assert len(many[-2]) == 160 and many[-2].endswith("…"), "cut to the terminal"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the stored step's own mean over no token
def test_a_run_in_which_every_rollout_was_rejected_trained_nothing_and_says_why(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["edit"] * 3, ["edit"] * 3])
    summary = summarise(stored.finish(), notebook=tmp_path / "run" / "n.ipynb", outcome=Outcome("done"), seconds=3.0)
    head, first, following, *_ = summary.text().splitlines()
    assert head == "Run run: done, but nothing was trained (3 s)"
    said = "6 of 6 rollouts were rejected, 6 of them as unresolved_parent: history_edited ("
    assert first.startswith(f"  nothing was trained        {said}")
    assert following.strip() == f"Next: workbench inspect {tmp_path}/run run.0.0.0"
    failed = dataclasses.replace(summary, status="failed").text()
    assert failed.startswith("Run run: failed, and nothing was trained (3 s)")
    assert "optimiser steps            1 taken on no row, weight version 1" in summary.text()
    assert "nothing was trained" not in summarise_one_valid(tmp_path / "other")


def test_the_commonest_of_some_rejections_is_told_with_how_common_it_is_and_one_full_stop():
    def row(number: int, cause: str, detail: str | None) -> dict[str, str | None]:
        return {"rollout_id": f"r{number}", "cause": cause, "detail": detail}

    def said(*rows: tuple[str, str | None]) -> str:
        return rejected_words([row(number, *told) for number, told in enumerate(rows)], 9)[0]

    assert said(("rollout_failed", "Next: more.")) == "1 of 9 rollouts was rejected, as rollout_failed: Next: more"
    two = said(("rollout_failed", "a b."), ("rollout_failed", "a b."), ("empty_manifest", None))
    assert two == "3 of 9 rollouts were rejected, 2 of them as rollout_failed: a b"
    most = said(("rollout_failed", "c d"), ("rollout_failed", "a b."), ("rollout_failed", "a b."))
    assert most.endswith("3 of them as rollout_failed, most often (2 times): a b")
    assert said(("rollout_failed", "c d"), ("rollout_failed", "a b.")).endswith("rollout_failed, for example: c d")
    even = [("rollout_failed", "c d")] * 2 + [("rollout_failed", "a b.")] * 2
    assert said(*even).endswith("4 of them as rollout_failed, for example: c d")
    tie = said(("unresolved_parent", None), ("ambiguous_terminal", None))
    assert tie.endswith("1 of them as ambiguous_terminal"), "the one that the table of causes has first"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the stored step's own mean over no token
def test_a_run_that_came_to_its_end_and_trained_nothing_keeps_the_reason_in_the_list_of_runs(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["edit"] * 3])
    run_dir = stored.finish()
    why = nothing_trained(run_dir)
    assert why is not None
    assert why.startswith("nothing was trained: 3 of 3 rollouts were rejected, 3 of them as unresolved_parent")
    with RunWriter(run_dir) as writer:
        writer.status(status="done", error=why)
    assert list_lines(listing(tmp_path))[2].strip().startswith(why[:60])
    assert nothing_trained(make_run(tmp_path / "other")) is None
    RunWriter(tmp_path / "empty").close()
    assert nothing_trained(tmp_path / "empty") is None


def test_a_run_in_which_no_step_had_a_gradient_says_so_on_top_and_keeps_its_state(tmp_path):
    stored = StoredRun(tmp_path / "same", reward=0.5)
    stored.step(1, [["plain", "plain"], ["plain", "retry"]])
    summary = summarise(stored.finish(), notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert summary.status == "done" and not summary.nothing_trained
    head, first, *_ = summary.text().splitlines()
    why = "no optimiser step had a gradient from a reward: the rewards were equal in each of the 2 groups. Next"
    assert head == "Run same: done (3 s)" and first.startswith(f"  NOTHING LEARNED            {why}")
    run = runs.open(stored.run_dir)
    assert repr(run).endswith("NOTHING LEARNED") and Engagement(run).remarks() == [
        (f"NOTHING LEARNED: {ends(first)}", True)
    ]
    assert list_lines(listing(tmp_path))[2].strip() == f"NOTHING LEARNED: {NO_GRADIENT}"
    sweep = SweepView(tmp_path)
    assert sweep.sentence() == "1 run · 1 done · NOTHING LEARNED in 1 of them" and "NOTHING LEARNED" in sweep.html()

    alone = StoredRun(tmp_path / "alone")
    alone.step(1, [["plain", *["edit"] * 7], ["edit"] * 7 + ["plain"]])
    summary = summarise(alone.finish(), notebook=tmp_path / "alone" / "n.ipynb", outcome=Outcome("done"), seconds=3.0)
    _, first, second, *_ = summary.text().splitlines()
    assert "only one rollout had a vote in each of the 2 groups" in first and "more train.rollouts_per_group" in first
    said = "14 of 16 rollouts were rejected, 14 of them as unresolved_parent"
    assert second.startswith(f"  REJECTED                   {said}")
    assert second.endswith(f"Next: workbench inspect {tmp_path}/alone alone.0.1.0")
    assert Engagement(runs.open(alone.run_dir)).remarks()[1][0].startswith(f"Rejected: {said}")

    learned = runs.open(make_run(tmp_path / "learned"))
    assert "NOTHING LEARNED" not in repr(learned) + Engagement(learned).html()
    told = summarise(learned.path, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert told.nothing_learned is None and "  REJECTED " in told.text() and len(told.rejected) == 4
    few = dataclasses.replace(told, rollouts=40).text()
    assert "  REJECTED " not in few, "no more than one in ten"


def ends(line: str) -> str:
    """A remark of the summary as the page has it."""
    return " ".join(line.split()[2:]) + "."


def summarise_one_valid(run_dir):
    stored = StoredRun(run_dir)
    stored.step(1, [["plain", "edit"]])
    return summarise(stored.finish(), notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0).text()


def test_a_run_that_trained_nothing_is_told_of_and_not_said_to_go_on(tmp_path, capsys):
    RunWriter(tmp_path).close()
    ended = NotebookResult(tmp_path / "campaign.ipynb", tmp_path / "campaign.html", Outcome("done"), 1, None)
    assert conclude(ended) == 1
    assert capsys.readouterr().err == f"workbench: the run trained nothing; see {tmp_path}/campaign.ipynb\n"


def test_valid_rollouts_that_their_step_left_out_are_counted(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    told = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert told.untrained_rollouts == 0 and "left out of their step" not in told.text()
    part = run_dir / "train" / "step-1.parquet"
    rows = pq.read_table(part)
    tree = rows.to_pylist()
    out = next(row for row in tree if row["sample_mask"] == 1)
    out |= {"left_out": "reward_components", "loss_mask": [0] * len(out["loss_mask"])}
    pq.write_table(pa.Table.from_pylist(tree, schema=rows.schema), part)
    told = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert "left out of their step     1 valid; Optimisation(run) says why" in told.text()


def test_the_rewards_of_a_summary_are_of_steps_that_were_taken(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    (run_dir / "steps.jsonl").write_bytes(b"")
    (run_dir / "train" / "step-1.parquet").unlink()
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("failed"), seconds=3.0)
    assert (summary.steps, summary.reward_first_step, summary.reward_last_step) == (0, None, None)


def test_the_rewards_of_a_summary_are_those_of_the_steps_whichever_groups_they_took(tmp_path):
    stored = StoredRun(tmp_path / "fifo")
    early, late = stored.group(1, 0, ["plain", "edit"]), stored.group(2, 1, ["plain", "plain"])
    stored.take(1, [late])
    stored.take(2, [early])
    stored.group(3, 2, ["plain"])
    run_dir = stored.finish()
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    rewards = runs.open(run_dir).steps["reward_mean"].to_list()
    assert [summary.reward_first_step, summary.reward_last_step] == rewards and rewards[0] != rewards[1]
    assert [(row["rollout_id"], row["step"]) for row in summary.rejected] == [("fifo.0.1.0", 2)]
    assert summary.untrained_rollouts == 0


def test_a_run_whose_recipe_is_at_fault_is_not_said_to_go_on(tmp_path, capsys):
    RunWriter(tmp_path).close()
    outcome = Outcome("failed", "RecipeError", "train.advantage.name: gdpo needs the parts.")
    conclude(NotebookResult(tmp_path / "campaign.ipynb", tmp_path / "campaign.html", outcome, 2, None))
    said = "workbench: the run failed: RecipeError: train.advantage.name: gdpo needs the parts; see"
    assert capsys.readouterr().err == f"{said} {tmp_path}/campaign.ipynb; mend the recipe and run again\n"


def test_progress_says_what_the_status_knows():
    assert describe({}) == "starting the kernel"
    assert describe({"status": "running", "phase": "set-up"}) == "set-up"
    status = {"phase": "training", "step": 3, "steps": 6, "weight_version": 2, "token_in_rate_after_roots": 1.0}
    assert describe(status | {"reward_mean": 0.25, "rejected": 1}) == (
        "step 3/6 · training · reward 0.250 · 1 rejected · token_in after roots 1 · weights v2"
    )


def test_progress_writes_a_line_a_change_where_there_is_no_terminal(tmp_path):
    stream = io.StringIO()
    line = ProgressLine(tmp_path, stream)
    for phase in ("set-up", "set-up", "sampling"):
        (tmp_path / "status.json").write_bytes(orjson.dumps({"phase": phase}))
        line.tick()
    (tmp_path / "status.json").write_bytes(b'{"phase": "half')
    line.tick()
    line.close()
    assert [text.split("  ")[1] for text in stream.getvalue().splitlines()] == [
        "set-up",
        "sampling",
        "starting the kernel",
    ]


def test_on_a_terminal_progress_is_one_line_that_fits_it(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "20")
    line = ProgressLine(tmp_path, Terminal())
    line.close()
    assert line._stream.getvalue() == ""
    for status in ({"phase": "starting the policy worker and trainer"}, {"phase": "x"}, ["no status"]):
        (tmp_path / "status.json").write_bytes(orjson.dumps(status))
        line.tick()
    line.close()
    first, second, third = line._stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert (len(first), first[:10]) == (19, "0:00  star")
    assert second.rstrip() == "0:00  x" and len(second) == 19, "what stood there is written over"
    assert third == "0:00  starting the "


def test_what_the_process_before_said_last_is_no_progress_of_the_one_that_goes_on(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.status(step=3, phase="stopped")
    stream = io.StringIO()
    line = ProgressLine(tmp_path, stream)
    line.tick()
    with RunWriter(tmp_path) as writer:
        writer.status(phase="starting ray")
    line.tick()
    assert stream.getvalue() == "0:00  starting the kernel\n0:00  starting ray\n"


def test_progress_goes_on_where_the_clock_was_set_back(tmp_path, monkeypatch):
    with RunWriter(tmp_path) as writer:
        writer.status(phase="stopped")
    stream = io.StringIO()
    line = ProgressLine(tmp_path, stream)
    monkeypatch.setattr("workbench.runs.writer.time.time", lambda: 5.0)
    with RunWriter(tmp_path) as writer:
        writer.status(phase="starting ray")
    line.tick()
    assert stream.getvalue() == "0:00  starting ray\n"


def test_nobody_at_the_terminal_any_more_ends_nothing(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    (tmp_path / "status.json").write_bytes(orjson.dumps({"phase": "x"}))
    with open(writing, "w") as stream:
        line = ProgressLine(tmp_path, stream)
        line.tick()
        line.tick("stopping")
        line.close()


def test_a_run_that_cannot_be_written_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(SetupError, match=r"cannot be written, and a run is gone on with .* resume the copy"):
        resume_run(load_recipe("cpu_smoke"), tmp_path)


@pytest.mark.parametrize(("status", "how"), [("stopped", "was stopped"), ("failed", "failed: ComponentDied: stopped")])
def test_whoever_is_told_that_a_run_ended_is_told_how_to_go_on_with_it(tmp_path, capsys, status, how):
    outcome = Outcome(status, "ComponentDied", "stopped")
    ended = NotebookResult(tmp_path / "campaign.ipynb", tmp_path / "campaign.html", outcome, 70, None)
    assert conclude(ended) == 70
    said = f"workbench: the run {how}; see {tmp_path}/campaign.ipynb"
    assert capsys.readouterr().err == f"{said}\n"  # nothing was begun that could be gone on with
    RunWriter(tmp_path).close()
    conclude(ended)
    assert capsys.readouterr().err == f"{said}; to go on with it: workbench resume {tmp_path}\n"


@pytest.mark.parametrize("error", ["SetupError", "RecipeError"])
def test_a_run_that_could_not_start_is_no_run_to_go_on_with(tmp_path, capsys, error):
    with RunWriter(tmp_path) as writer:
        outcome = Outcome("failed", error, "no")
        ended = NotebookResult(tmp_path / "campaign.ipynb", tmp_path / "campaign.html", outcome, 2, None)
        conclude(ended)
        assert capsys.readouterr().err.endswith("campaign.ipynb; mend the recipe and run again\n")
        writer.event("group_started", group_id="g00000", rollout_ids=["run.0.0.0"])
        conclude(ended)
        on = f"; to go on with it: workbench resume {tmp_path}" if error == "SetupError" else ""
        assert capsys.readouterr().err.endswith(f"campaign.ipynb{on}\n")


def test_a_count_down_is_one_line_where_there_is_no_terminal(tmp_path):
    stream = io.StringIO()
    line = ProgressLine(tmp_path, stream)
    for left in (45, 44, 43):
        (tmp_path / "status.json").write_bytes(orjson.dumps({"phase": f"stopping part {left}"}))
        line.tick("stopping on SIGINT", f"; killed in {left} s")
    assert stream.getvalue() == "0:00  stopping on SIGINT; killed in 45 s\n"


def test_a_recorded_run_is_small_verifies_and_names_no_path_of_this_machine(tmp_path, capsys):
    source = make_run(tmp_path / "stored", steps=3)
    target = record_demo(source, tmp_path / "demo")
    assert "every digest, row and step holds" in capsys.readouterr().out
    copy = runs.open(target)
    assert copy.rollouts.height >= 8 and copy.vocabulary().special
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert size <= 350_000
    texts = [p.read_text() for p in target.rglob("*") if p.suffix in (".json", ".jsonl", ".yaml")]
    assert not any(str(tmp_path) in text for text in texts)


def test_a_recorded_run_has_the_groups_that_its_steps_took_whenever_they_were_sampled(tmp_path, monkeypatch):
    stored = StoredRun(tmp_path / "stored")
    made = [stored.group(step, number, ["plain", "retry"]) for number, step in enumerate((1, 1, 2))]
    stored.take(1, [made[0], made[2]])  # the third was sampled for step 2, the second waits
    stored.take(2, [made[1]])
    stored.finish()
    whole = record_demo(stored.run_dir, tmp_path / "whole")
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    monkeypatch.setattr("workbench.campaign.record_demo.MAX_BYTES", size - 1)
    copy = runs.open(record_demo(stored.run_dir, tmp_path / "demo"))
    taken = {made[0].group_id, made[2].group_id}
    assert copy.steps["step"].to_list() == [1]
    assert set(copy.rollouts["group_id"]) == set(copy.groups["group_id"]) == taken


def test_a_run_of_which_not_even_a_step_is_small_enough_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.campaign.record_demo.MAX_BYTES", 1_000)
    with pytest.raises(RunStoreError, match=r"Not even one step of .* fits into 1,000 bytes"):
        record_demo(make_run(tmp_path / "stored", steps=2), tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_a_run_that_does_not_verify_is_not_recorded(tmp_path):
    source = make_run(tmp_path / "stored", steps=1)
    (source / "rows" / "g00000.parquet").unlink()
    with pytest.raises(RunStoreError, match="Only a run that verifies"):
        record_demo(source, tmp_path / "demo")


def test_a_run_with_a_damaged_part_has_no_summary_that_counts_less(tmp_path):
    run_dir = make_run(tmp_path / "cut", steps=1)
    (run_dir / "rows" / "g00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunStoreError, match=r"rows/g00000.parquet is not a readable part"):
        summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
