"""Which rollouts train, which are put aside, and the one reason that each of those carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from speech import commit, model, user

from workbench.ledger import LedgerStore, assemble_receipt
from workbench.wire import Cause, RolloutReceipt

R = "run.0.0.0"
FOREIGN = Path(__file__).resolve().parents[1] / "conformance" / "foreign_ledger"


@pytest.fixture
def store(tmp_path: Path) -> LedgerStore:
    """A root and its child."""
    store = LedgerStore(tmp_path)
    root = commit(store, R, "c0", [user("q")], [model("A")])
    commit(store, R, "c1", [user("q"), model("A"), user("more")], [model("B")], parent=root, chain=[root.staging_key])
    return store


def receipt(store: LedgerStore, **given: Any) -> RolloutReceipt:
    return assemble_receipt(store.manifest(R), rollout_id=R, **{"reward": 1.0, **given})


SCORED = {"id": "resp-c1", "choices": [{"message": model("B")}]}


def test_a_scored_chat_completion_names_the_terminal(store: LedgerStore) -> None:
    made = receipt(store, response=SCORED)
    assert (made.terminal_model_call_id, made.terminal_selection) == ("c1", "response_id")
    assert made.terminal_attribution_reason == "corroborated_by=content"
    assert (made.capture_poisoned, made.failure_reason) == (False, None)


def test_a_call_that_never_returned_does_not_poison_off_the_chain(store: LedgerStore) -> None:
    store.record_failure(R, "c2", Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES)
    assert not receipt(store, response=SCORED).capture_poisoned


@pytest.mark.parametrize(
    "reason",
    [
        "unresolved_parent",
        "worker_response_missing_commit_coordinates",
        "worker_capture_failed",
        "invalid_worker_commit_coordinates",
        "ledger_row_missing_response_id",
        "ledger_row_missing_chain_hash",
    ],
)
def test_every_other_failure_poisons_and_is_the_cause(store: LedgerStore, reason: str) -> None:
    store.record_failure(R, "c2", Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES)
    store.record_failure(R, "c3", reason)
    made = receipt(store, response=SCORED)
    assert (made.capture_poisoned, made.failure_reason) == (True, reason)
    assert made.terminal_model_call_id == "c1", "an inspector may still want to know"


def test_a_failed_call_on_the_terminal_chain_poisons(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    root = commit(store, "other", "gone", [user("q")], [model("A")])
    commit(store, R, "c1", [user("q"), model("A"), user("more")], [model("B")], parent=root)
    store.record_failure(R, "gone", Cause.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES)
    assert receipt(store, response=SCORED).capture_poisoned


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"response": {"id": "resp-c0", "choices": [{"message": model("B")}]}}, "witness_disagreement"),
        ({"response": SCORED, "declared_response_id": "resp-zzz"}, "declared_terminal_not_captured"),
        ({"response": {"id": "zzz", "choices": [{"message": model("Z")}]}}, "missing_terminal"),
        ({"response": SCORED, "failure_reason": "rollout_failed"}, "rollout_failed"),
    ],
)
def test_a_masked_rollout_has_one_cause(store: LedgerStore, given: dict[str, Any], cause: str) -> None:
    made = receipt(store, **given)
    assert (made.capture_poisoned, made.failure_reason) == (True, cause)


def test_a_response_that_matches_nothing_lets_the_heuristic_choose_only_where_it_may(store: LedgerStore) -> None:
    made = receipt(store, response={"id": "zzz"}, on_no_witness="heuristic")
    assert (made.terminal_model_call_id, made.terminal_selection) == ("c1", "heuristic")
    assert made.terminal_attribution_reason == "response_id_no_match,response_has_no_output"


def test_where_a_witness_is_required_nothing_is_guessed_and_a_named_call_is_taken(store: LedgerStore) -> None:
    assert receipt(store).terminal_selection == "heuristic"
    refused = receipt(store, on_no_witness="refuse")
    assert (refused.terminal_model_call_id, refused.failure_reason) == (None, "missing_terminal")
    assert refused.terminal_attribution_reason == "no_response_object"
    named = receipt(store, response=SCORED, on_no_witness="refuse")
    assert (named.terminal_selection, named.capture_poisoned) == ("response_id", False)


def test_a_disagreement_never_falls_back(store: LedgerStore) -> None:
    disagreeing = {"id": "resp-c0", "choices": [{"message": model("B")}]}
    assert receipt(store, response=disagreeing, on_no_witness="heuristic").failure_reason == "witness_disagreement"
    undeclared = receipt(store, declared_response_id="zzz", on_no_witness="heuristic")
    assert undeclared.failure_reason == "declared_terminal_not_captured"


def test_nothing_recorded_is_no_records(tmp_path: Path) -> None:
    for given in ({}, {"response": SCORED}):
        made = receipt(LedgerStore(tmp_path), **given)
        assert (made.capture_poisoned, made.failure_reason) == (True, "no_records")


def test_a_manifest_of_another_rollout_is_no_receipt_of_this_one(store: LedgerStore) -> None:
    made = assemble_receipt(store.manifest(R), rollout_id="run.0.1.0", reward=1.0, response=SCORED)
    assert (made.capture_poisoned, made.failure_reason) == (True, "identity_mismatch")


def test_two_different_rows_of_one_call_are_believed_neither(store: LedgerStore) -> None:
    """A damaged file: the last call's row carries its parent's id, and the response names that row."""
    first, last = store.manifest(R).records
    renamed = last.model_copy(update={"model_call_id": first.model_call_id, "parent_call_id": None})
    for records, cause in (([first, renamed], "duplicate_call_id"), ([first, last, last], None)):
        manifest = store.manifest(R).model_copy(update={"records": records})
        made = assemble_receipt(manifest, rollout_id=R, reward=1.0, response=SCORED)
        assert (made.capture_poisoned, made.failure_reason) == (cause is not None, cause)
        guessed = assemble_receipt(manifest, rollout_id=R, reward=1.0)
        assert guessed.failure_reason == "duplicate_call_id", "without a witness nobody is sure of a doubled row"


def truths() -> list[Any]:
    lines = (FOREIGN / "truth.jsonl").read_bytes().splitlines()
    return [pytest.param(truth, id=truth["rollout_id"]) for truth in map(orjson.loads, lines)]


@pytest.mark.parametrize("truth", truths())
def test_a_ledger_written_elsewhere_reads_as_it_was_meant(truth: dict[str, Any]) -> None:
    rollout_id = truth["rollout_id"]
    manifest = LedgerStore(FOREIGN / "ledger").manifest(rollout_id)
    assert len(manifest.records) == truth["calls"]
    assert [[failure.model_call_id, failure.reason] for failure in manifest.failures] == truth["failures"]
    assert sum(record.parent_call_id is None for record in manifest.records) == truth["roots"]
    assert max(record.cum_len for record in manifest.records) == truth["longest_chain_tokens"]
    harmless = all(reason == "request_finished_without_staged_coordinates" for _, reason in truth["failures"])
    guessed = assemble_receipt(manifest, rollout_id=rollout_id, reward=0.0)
    assert guessed.terminal_model_call_id == truth["heuristic"]["terminal"]
    assert guessed.capture_poisoned == (truth["heuristic"]["terminal"] is None or not harmless)
    if truth["declared_response_id"]:
        declared = assemble_receipt(
            manifest, rollout_id=rollout_id, reward=0.0, declared_response_id=truth["declared_response_id"]
        )
        assert declared.terminal_model_call_id == truth["declared_terminal"]
