"""Relations: one word a call, whatever the shape of the tree."""

from __future__ import annotations

from workbench.runs.relations import relate


def call(call_id: str, parent: str | None = None, context: str | None = None, failure: str | None = None) -> dict:
    return {"model_call_id": call_id, "parent_call_id": parent, "context_digest": context, "failure_reason": failure}


def test_a_sibling_with_the_same_request_is_a_retry_and_another_request_a_branch():
    calls = [call("a"), call("b", "a", "x"), call("c", "a", "x"), call("d", "a", "y")]
    assert relate(calls, {"a", "c"}) == ["trained", "retry", "trained", "branch"]


def test_descendants_have_their_ancestors_word():
    calls = [call("a"), call("b", "a", "x"), call("c", "b"), call("d", "a", "y"), call("e", "c")]
    assert relate(calls, {"a", "d"}) == ["trained", "branch", "branch", "trained", "branch"]


def test_a_second_root_is_a_conversation_of_its_own_or_a_retry():
    calls = [call("a", None, "x"), call("b", None, "x"), call("c", None, "y"), call("d", "c")]
    assert relate(calls, {"b"}) == ["retry", "trained", "side_root", "side_root"]


def test_without_a_terminal_nothing_is_called_trained():
    calls = [call("a", None, "x"), call("b", "a", "y"), call("c", "a", "y"), call("d", None, None, "unresolved_parent")]
    assert relate(calls, set()) == ["candidate", "candidate", "retry", "unresolved"]


def test_a_circle_of_parents_ends():
    calls = [call("a", "b"), call("b", "a"), call("c", "c")]
    assert len(relate(calls, set())) == 3


def test_failures_are_told_apart():
    calls = [call("a", None, None, "worker_capture_failed"), call("b", None, None, "unresolved_parent")]
    assert relate(calls, set()) == ["failed", "unresolved"]
