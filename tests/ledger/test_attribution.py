"""Witnesses in shapes the corpora do not have; the expected reasons are those of the contract's implementation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from speech import commit, model, user

from workbench.ledger import LedgerStore, attribute_terminal
from workbench.ledger.attribution import DECLARED_FAILURES
from workbench.wire import CallRecord
from workbench.wire.causes import REASONS

R = "run.0.0.0"
CALL = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "t", "output": "7"}
THOUGHT = {"type": "reasoning", "summary": []}


@pytest.fixture
def records(tmp_path: Path) -> list[CallRecord]:
    """c0 says A; its child c1 thinks between a tool call and B; a second root, c2, says C."""
    store = LedgerStore(tmp_path)
    c0 = commit(store, R, "c0", [user("q")], [model("A")])
    ask = [user("q"), model("A"), user("more")]
    c1 = commit(store, R, "c1", ask, [CALL, THOUGHT, model("B")], parent=c0, chain=[c0.staging_key])
    c2 = commit(store, R, "c2", [user("other")], [model("C")])
    return [c0, c1, c2.model_copy(update={"response_id": "5"})]


@pytest.mark.parametrize(
    ("response", "declared", "expected"),
    [
        ([{"id": "resp-c0"}], None, (None, "", "no_response_object")),
        ("resp-c0", None, (None, "", "no_response_object")),
        (None, "", (None, "", "no_response_object")),
        ({"id": "resp-c0"}, "", ("c0", "response_id", "response_has_no_output")),
        ({"id": 5}, None, ("c2", "response_id", "response_has_no_output")),
        ({"id": 0}, None, (None, "", "response_has_no_id,response_has_no_output")),
        ({"id": ["resp-c0"]}, None, (None, "", "response_id_no_match,response_has_no_output")),
        ({"output": [3, "s", None]}, None, (None, "", "response_has_no_id,no_model_authored_output")),
        ({"output": ["s", model("C"), 3]}, None, ("c2", "content", "response_has_no_id")),
        ({"output": [CALL, THOUGHT, model("B")]}, None, ("c1", "content", "response_has_no_id")),
        # Reasoning breaks the last run, so the run is B alone; without it the run is the whole answer of c1.
        (
            {"output": [model("X"), RESULT, CALL, THOUGHT, model("B")]},
            None,
            (None, "", "response_has_no_id,no_content_match"),
        ),
        ({"output": [model("X"), RESULT, CALL, model("B")]}, None, ("c1", "content", "response_has_no_id")),
        ({"output": [model("X"), THOUGHT, model("C")]}, None, ("c2", "content", "response_has_no_id")),
        ({"output": [user("x"), model("C"), THOUGHT]}, None, ("c2", "content", "response_has_no_id")),
        (
            {"output": [model("X"), RESULT, model("C"), THOUGHT]},
            None,
            (None, "", "response_has_no_id,no_content_match"),
        ),
    ],
)
def test_what_the_witnesses_say(
    records: list[CallRecord], response: Any, declared: str | None, expected: tuple[str | None, str, str]
) -> None:
    found = attribute_terminal(records, response, declared)
    assert (found.terminal, found.method, found.reason) == expected
    assert set(found.reason.split(",")) - {""} <= REASONS.keys()


def test_every_code_that_the_witnesses_may_say_is_explained() -> None:
    source = Path(inspect.getfile(attribute_terminal)).read_text().split("class Attribution")[1]
    codes = re.findall(r'"((?:no|response|content)_[a-z_]+|witness_\w+|corroborated_by)', source)
    assert {*codes, *DECLARED_FAILURES} - {"response_id"} <= REASONS.keys()


def test_witnesses_that_name_different_tokens_mask_the_rollout_and_are_both_kept(records: list[CallRecord]) -> None:
    found = attribute_terminal(records, {"id": "resp-c0", "output": [model("C")]}, None)
    assert (found.terminal, found.method) == (None, "")
    assert found.reason == "witness_disagreement[response_id=c0;content=c2]"


def test_the_same_words_sampled_twice_are_no_witness(tmp_path: Path) -> None:
    """A first request that was tried again and got the same answer in other tokens: neither is taken for the other."""
    store = LedgerStore(tmp_path)
    tries = [commit(store, R, f"c{n}", [user("q")], [model("A")]) for n in range(2)]
    found = attribute_terminal(tries, {"output": [model("A")]}, None)
    assert (found.terminal, found.method, found.reason) == (None, "", "response_has_no_id,content_ambiguous")
    found = attribute_terminal(tries, {"id": "resp-c1", "output": [model("A")]}, None)
    assert (found.terminal, found.method, found.reason) == ("c1", "response_id", "content_ambiguous")


def test_the_same_words_in_the_same_tokens_are_one_answer(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    tries = [commit(store, R, f"c{n}", [user("q")], [model("A")], sequence="one") for n in (1, 0)]
    found = attribute_terminal(tries, {"output": [model("A")]}, None)
    assert (found.terminal, found.method) == ("c0", "content")


def test_a_call_fingerprinted_another_way_is_no_witness(records: list[CallRecord]) -> None:
    """Of equal fingerprints of another version nobody knows that they are of equal words."""
    older = [record.model_copy(update={"fingerprint_version": 1}) for record in records]
    assert attribute_terminal(records, {"output": [model("C")]}).terminal == "c2"
    said = attribute_terminal(older, {"output": [model("C")]})
    assert (said.terminal, said.reason) == (None, "response_has_no_id,no_content_match")


def test_the_last_run_of_a_response_is_one_answer_and_not_a_whole_conversation(records: list[CallRecord]) -> None:
    """c1's conversation is A, then what it answered; a run of just these items is no single answer of any call."""
    run = [model("A"), CALL, model("B")]
    assert attribute_terminal(records, {"output": run}).terminal == "c1", "as a whole it is c1's conversation"
    said = attribute_terminal(records, {"output": [model("X"), RESULT, *run]})
    assert (said.terminal, said.reason) == (None, "response_has_no_id,no_content_match")
