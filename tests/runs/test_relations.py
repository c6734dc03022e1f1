"""Relations: one word a call, whatever the shape of the tree."""

from __future__ import annotations

from workbench.runs.relations import contenders, relate


def call(call_id: str, parent: str | None = None, context: str | None = None, failure: str | None = None) -> dict:
    return {"model_call_id": call_id, "parent_call_id": parent, "context_digest": context, "failure_reason": failure}


def test_a_sibling_with_the_same_request_is_a_retry_and_another_request_a_branch():
    calls = [call("a"), call("b", "a", "x"), call("c", "a", "x"), call("d", "a", "y")]
    assert relate(calls, {"a", "c"}) == ["chain", "retry", "chain", "branch"]


def test_descendants_have_their_ancestors_word():
    calls = [call("a"), call("b", "a", "x"), call("c", "b"), call("d", "a", "y"), call("e", "c")]
    assert relate(calls, {"a", "d"}) == ["chain", "branch", "branch", "chain", "branch"]


def test_a_second_root_is_a_conversation_of_its_own_or_a_retry():
    calls = [call("a", None, "x"), call("b", None, "x"), call("c", None, "y"), call("d", "c")]
    assert relate(calls, {"b"}) == ["retry", "chain", "side_root", "side_root"]


def test_without_a_terminal_nothing_is_called_the_chain():
    calls = [call("a", None, "x"), call("b", "a", "y"), call("c", "a", "y"), call("d", None, None, "unresolved_parent")]
    assert relate(calls, set()) == ["earliest", "earliest", "retry", "unresolved"]


def test_a_circle_of_parents_ends():
    calls = [call("a", "b"), call("b", "a"), call("c", "c")]
    assert len(relate(calls, set())) == 3


def test_failures_are_told_apart():
    calls = [call("a", None, None, "worker_capture_failed"), call("b", None, None, "unresolved_parent")]
    assert relate(calls, set()) == ["failed", "unresolved"]


def test_calls_between_which_no_terminal_could_be_chosen_are_named():
    calls = [call("a"), call("b", "a", "x"), call("c", "a", "x"), call("d", None, None, "worker_capture_failed")]
    assert set(contenders(calls, "ambiguous_terminal", None)) == {"b", "c"}
    both_went_on = [*calls, call("e", "b"), call("f", "c")]
    assert set(contenders(both_went_on, "ambiguous_terminal", None)) == {"b", "c"}
    assert contenders(calls, "unresolved_parent", None) == contenders(calls, None, None) == {}
    named = contenders(calls, "witness_disagreement", "witness_disagreement[response_id=b;content=c]")
    assert named == {"b": "the last call, says response_id", "c": "the last call, says content"}
