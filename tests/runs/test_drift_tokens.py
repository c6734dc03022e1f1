"""The first differing token: found among the recorded ids by their bytes, or not named at all."""

from __future__ import annotations

import polars as pl
import pytest
from stored_run import END, START, VOCABULARY, encode, make_run

from workbench import runs
from workbench.runs.drift import drift_frame, first_differing_token, sentences

IDS = encode("<|im_start|>user\nsay \U0001f3b2 hello<|im_end|>\n<|im_start|>assistant\nIt rains in Rome.<|im_end|>")


@pytest.mark.parametrize(
    ("was", "came", "byte"),
    [
        ("It rains in Rome.", "It rains in Roma.", b"e"),
        ("…rains in Rome.", "…rains in Rome", b"."),  # it came shorter
        ("say \U0001f3b2 hello", "say \U0001f3b1 hello", "\U0001f3b2".encode()[-1:]),  # inside of a character
        ("say \U0001f3b2", "", b"s"),
    ],
)
def test_the_token_holds_the_first_differing_byte(was: str, came: str, byte: bytes) -> None:
    position = first_differing_token(IDS, was, came, VOCABULARY)
    assert position is not None and VOCABULARY.pieces[IDS[position]] == byte


@pytest.mark.parametrize("was", ["nowhere", "", "…", "in", "s"])
def test_a_text_that_stands_nowhere_or_twice_names_no_token(was: str) -> None:
    assert first_differing_token(IDS, was, "x", VOCABULARY) is None


def test_what_was_added_is_placed_behind_what_was_there() -> None:
    position = first_differing_token(IDS, "It rains in Rome.", "It rains in Rome. Yes.", VOCABULARY)
    assert position == len(IDS) - 1 and IDS[position] == END and IDS[0] == START


def test_an_unresolved_call_of_a_run_names_the_token(tmp_path) -> None:
    run = runs.open(make_run(tmp_path / "stored"))
    drift = run.drift()
    row = drift.row(0, named=True)
    assert (row["cause"], row["near_item"], row["near_path"]) == ("history_edited", 0, "content")
    assert (row["near_was"], row["near_came"]) == ("A number from 1 to 20 \U0001f3b2", "Another task")
    path = run.tokens(row["rollout_id"], row["near_call_id"])
    at = row["token_position"]
    assert VOCABULARY.pieces[row["token_id"]] == b" "  # "A" is the same in both
    assert bytes(path["token_id"].to_list()[at - 1 : at + 7]) == b"A number"
    assert path["model_call_id"][at] == row["token_call_id"]
    assert f"first token {at}" in sentences(drift)[0]
    of_one = run.drift(row["rollout_id"])
    assert of_one.equals(drift.filter(pl.col("rollout_id") == row["rollout_id"]))
    assert run.drift("stored.0.0.0").is_empty()


def test_without_a_vocabulary_or_tokens_the_diagnosis_stands_alone(tmp_path) -> None:
    run = runs.open(make_run(tmp_path / "stored"))
    (run.path / "vocabulary.json").unlink()
    row = drift_frame(run).row(0, named=True)
    assert row["near_path"] == "content" and row["token_position"] is None
    ledger = drift_frame(runs.open_ledger(run.path / "ledger"))
    assert ledger.filter(pl.col("token_id").is_not_null()).is_empty() and ledger.height == drift_frame(run).height


def test_without_the_deltas_of_its_group_a_diagnosis_names_no_token(tmp_path) -> None:
    run = runs.open(make_run(tmp_path / "stored"))
    row = run.drift().row(0, named=True)
    group_id = run.rollouts.filter(rollout_id=row["rollout_id"])["group_id"].item()
    for table in ("calls", "rows"):
        (run.path / table / f"{group_id}.parquet").unlink()
    without = runs.open(run.path).drift(row["rollout_id"]).row(0, named=True)
    assert (without["near_path"], without["token_position"]) == ("content", None)
