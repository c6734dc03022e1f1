"""Every cause of drift as agents bring it about, in each API: the cause, the call, the item, the place in it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from ledger.speech import commit
from tellers import Items, Teller

from workbench.ledger import Drift, LedgerStore
from workbench.wire import CallRecord, Cause

R = "run.0.0.0"
ROME, OSLO = '{"query":"Rome","n":1}', '{"query":"Oslo"}'
CALLS = [("c1", ROME), ("c2", OSLO)]
RESULTS = [("c1", "rain and wind"), ("c2", "sun")]
DIALECTS = ("chat", "responses", "messages")


class Talk:
    """A rollout of two recorded calls: two tool calls after some thinking, then an answer."""

    def __init__(self, name: str, directory: Path) -> None:
        self.say = say = Teller(name)
        self.store = LedgerStore(directory)
        self.question = say.user("how is the weather?")
        self.asked = say.model("I look.", CALLS, thinking="two towns")
        self.results = say.results(RESULTS)
        self.answered = say.model("It rains in Rome.")
        self.more = say.user("and tomorrow?")
        self.root = self.record("c0", self.question, self.asked)
        self.child = self.record("c1", self.question + self.asked + self.results, self.answered, self.root)

    def record(self, call_id: str, history: Items, answer: Items, parent: CallRecord | None = None) -> CallRecord:
        return commit(
            self.store,
            R,
            call_id,
            self.say.request_items(history),
            self.say.dialect.response_items(self.say.served(answer)),
            parent=parent,
            chain=[parent.staging_key] if parent else [],
            dialect=self.say.name,
        )

    def history(self, **changed: Items) -> Items:
        parts = {name: getattr(self, name) for name in ("question", "asked", "results", "answered", "more")} | changed
        return [item for part in parts.values() for item in part]

    def drift(self, history: Items, tools: list[str] | None = None, **options: Any) -> Drift:
        items = self.say.request_items(history, tools or ["search"])
        drift = self.store.admit(R, items, "c9", dialect=options.pop("dialect", self.say.name), **options).drift
        assert drift is not None
        (event,) = self.store.events(R)
        assert event["cause"] == drift.cause and event.get("path") == (drift.difference and drift.difference.path)
        return drift


@pytest.fixture(params=DIALECTS)
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Talk:
    return Talk(request.param, tmp_path)


def where(drift: Drift) -> tuple[str, str | None, str | None]:
    assert drift.difference is not None, drift
    return drift.difference.path, drift.difference.was, drift.difference.came


def test_the_whole_history_resolves(talk: Talk) -> None:
    admitted = talk.store.admit(R, talk.say.request_items(talk.history()), "c9", dialect=talk.say.name)
    assert admitted.resolution.parent == "c1"


def test_thinking_that_did_not_come_back(talk: Talk) -> None:
    """verl #6854, #3720: the turn was `<think>R</think>A`, the client echoes `A`."""
    drift = talk.drift(talk.history(asked=talk.say.model("I look.", CALLS)))
    assert drift.cause is Cause.TEMPLATE_STRIPPED_REASONING
    path, was, came = where(drift)
    assert came != was
    if talk.say.name == "responses":  # a whole item of its own
        assert (was, came) == ("reasoning", "assistant")
    else:
        assert path.startswith("content") and was is not None and "two towns" in was


def test_a_tool_call_in_another_spelling(talk: Talk) -> None:
    """smg #1836: arguments that mean the same and are not the same."""
    drift = talk.drift(
        talk.history(asked=talk.say.model("I look.", [("c1", ROME.replace("1", "1.0")), CALLS[1]], "two towns"))
    )
    assert drift.cause is Cause.TOOL_CALL_RESERIALISED
    path, was, came = where(drift)
    assert path.endswith(".n") and (was, came) == ("1", "1.0")


def test_a_changed_argument_is_an_edit(talk: Talk) -> None:
    """smg #1836: a changed value is not the same parent."""
    changed = [CALLS[0], ("c2", OSLO.replace("Oslo", "Bergen"))]
    drift = talk.drift(talk.history(asked=talk.say.model("I look.", changed, "two towns")))
    path, was, came = where(drift)
    assert (drift.cause, was, came) == (Cause.HISTORY_EDITED, "Oslo", "Bergen")
    assert path.endswith(".query")


def test_a_tool_call_that_was_dropped(talk: Talk) -> None:
    dropped = talk.history(
        asked=talk.say.model("I look.", CALLS[:1], "two towns"), results=talk.say.results(RESULTS[:1])
    )
    assert talk.drift(dropped).cause is Cause.TOOL_CALL_DROPPED


def test_a_tool_result_that_was_shortened(talk: Talk) -> None:
    drift = talk.drift(talk.history(results=talk.say.results([("c1", "rain"), RESULTS[1]])))
    path, was, came = where(drift)
    assert (drift.cause, was, came) == (Cause.HISTORY_EDITED, "rain and wind", "rain")
    assert path in ("content", "output", "content[0].content")
    assert drift.nearest_call == "c1"


def test_a_history_that_was_compacted_in_silence(talk: Talk) -> None:
    """NeMo RL #3910: the agent replaces its history by a summary, without saying so."""
    drift = talk.drift(talk.say.user("in short: I asked, you looked") + talk.answered + talk.more)
    assert drift.cause is Cause.CONTEXT_COMPACTED
    assert drift.position == 0  # of the messages; the request envelope is none of them
    assert where(drift)[1:] == ("how is the weather?", "in short: I asked, you looked")


def test_a_declared_compaction_is_a_root_linked_to_what_it_replaces(talk: Talk) -> None:
    """NeMo RL #3910, declared: a root, and no drift."""
    items = talk.say.request_items(talk.say.user("in short") + talk.answered + talk.more)
    admitted = talk.store.admit(R, items, "c9", dialect=talk.say.name, replaces_response_id="resp-c1")
    assert (admitted.resolution.status, admitted.compaction_of, admitted.drift) == ("root", "c1", None)


def test_another_tool_list(talk: Talk) -> None:
    """verifiers #955: same messages, but tool list B where A was."""
    drift = talk.drift(talk.history(), tools=["fetch"])
    path, was, came = where(drift)
    assert (drift.cause, drift.position, was, came) == (Cause.TOOLS_CHANGED, None, "search", "fetch")
    assert path.startswith("tools[0]") and path.endswith("name")


def test_other_template_arguments(talk: Talk) -> None:
    drift = talk.drift(talk.history(), prompt_options={"chat_template_kwargs": {"enable_thinking": False}})
    assert drift.cause is Cause.TOOLS_CHANGED and drift.difference is None


def test_an_answer_in_other_words(talk: Talk) -> None:
    drift = talk.drift(talk.history(answered=talk.say.model("It rains in Roma.")))
    path, was, came = where(drift)
    assert (drift.cause, drift.nearest_call) == (Cause.ASSISTANT_TEXT_CHANGED, "c1")
    assert (was, came) == ("It rains in Rome.", "It rains in Roma.") and path.startswith("content")
    assert drift.difference is not None and drift.difference.at == len("It rains in Rom")


def test_text_before_a_tool_call_that_was_dropped(talk: Talk) -> None:
    drift = talk.drift(talk.history(asked=talk.say.model(None, CALLS, "two towns")))
    assert drift.cause is Cause.ASSISTANT_TEXT_CHANGED


@pytest.mark.parametrize(("talk", "other"), itertools.permutations(DIALECTS, 2), indirect=["talk"])
def test_a_switch_of_dialect(talk: Talk, other: str) -> None:
    told = Talk.history(_Retold(other, talk))  # type: ignore[arg-type]
    drift_or_parent = talk.store.admit(R, Teller(other).request_items(told), "c9", dialect=other)
    # Never wrong: the right parent, or none and the reason.
    assert drift_or_parent.resolution.status == "unresolved"
    assert drift_or_parent.drift is not None and drift_or_parent.drift.cause is Cause.DIALECT_CHANGED


class _Retold:
    """The same conversation in another API."""

    def __init__(self, name: str, talk: Talk) -> None:
        say = Teller(name)
        self.question, self.more = say.user("how is the weather?"), say.user("and tomorrow?")
        self.asked = say.model("I look.", CALLS, thinking="two towns")
        self.results, self.answered = say.results(RESULTS), say.model("It rains in Rome.")


def test_two_calls_that_said_the_same_in_other_tokens(talk: Talk) -> None:
    """A retry that gave the same text by other tokens: either could be the parent, so neither is."""
    talk.record("c2", talk.question + talk.asked + talk.results, talk.answered, talk.root)
    drift = talk.drift(talk.history())
    assert (drift.cause, drift.nearest_call) == (Cause.DUPLICATE_OUTPUT, "c1")
    assert "c1, c2" in drift.detail


def test_a_turn_that_nobody_sampled(talk: Talk) -> None:
    made_up = talk.history(more=talk.more + talk.say.model("made up") + talk.say.user("so?"))
    assert talk.drift(made_up).cause is Cause.UNKNOWN_HISTORY


def test_a_history_of_another_task(talk: Talk) -> None:
    drift = talk.drift(talk.say.user("x") + talk.say.model("y") + talk.say.user("z"), tools=["fetch"])
    assert (drift.cause, drift.nearest_call, drift.difference) == (Cause.UNKNOWN_HISTORY, None, None)


def test_a_long_text_is_told_by_an_excerpt_around_the_difference(tmp_path: Path) -> None:
    say, store = Teller("chat"), LedgerStore(tmp_path)
    text = "word " * 300
    commit(store, R, "c0", say.request_items(say.user("q")), say.model(text + "end" + text))
    items = say.request_items(say.user("q") + say.model(text + "END" + text) + say.user("more"))
    difference = store.admit(R, items, "c1").drift.difference  # type: ignore[union-attr]
    assert difference is not None and difference.at == len(text)
    assert difference.was is not None and difference.was.startswith("…word word") and "word endword" in difference.was
    assert difference.came is not None and "word ENDword" in difference.came and len(difference.came) < 70
