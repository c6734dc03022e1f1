"""Every unresolved request says which call it nearly continued, where they part, and why."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from speech import Items, commit, model, tool_call, user

from workbench.ledger import LedgerStore, diagnose_drift
from workbench.ledger.differences import first_difference
from workbench.ledger.items import LEAF_CHARS, CallItems, ItemDigest, read_items, write_items
from workbench.ledger.relatives import history, shared_items
from workbench.wire import Cause
from workbench.wire.fingerprints import request_envelope

R = "run.0.0.0"
SYSTEM = {"role": "system", "content": "be brief"}


def envelope(*names: str) -> Items:
    item = request_envelope(None, [{"type": "function", "function": {"name": name}} for name in names])
    return [item] if item else []


HISTORIES: dict[str, tuple[Items, Items, Items, Cause, int | None]] = {
    # what was asked, what was answered, what came next, cause, first differing item
    "only the answer came back": (
        [user("q")],
        [model("<think>R</think>A")],
        [user("q"), model("A"), user("more")],
        Cause.TEMPLATE_STRIPPED_REASONING,
        1,
    ),
    "an answer whose thinking began in the prompt": (
        [user("q")],
        [model("R</think>\n\nA")],
        [user("q"), model("A"), user("more")],
        Cause.TEMPLATE_STRIPPED_REASONING,
        1,
    ),
    "another text": (
        [user("q")],
        [model("A")],
        [user("q"), model("B"), user("more")],
        Cause.ASSISTANT_TEXT_CHANGED,
        1,
    ),
    "empty arguments as an object": (
        [user("q")],
        [model(None, tool_calls=[tool_call("")])],
        [user("q"), model(None, tool_calls=[tool_call("{}")]), user("more")],
        Cause.TOOL_CALL_RESERIALISED,
        1,
    ),
    "another tool call id": (
        [user("q")],
        [model(None, tool_calls=[tool_call("{}")])],
        [user("q"), model(None, tool_calls=[tool_call("{}", call_id="t2")]), user("more")],
        Cause.TOOL_CALL_RESERIALISED,
        1,
    ),
    "a changed argument": (
        [user("q")],
        [model(None, tool_calls=[tool_call('{"a":1}')])],
        [user("q"), model(None, tool_calls=[tool_call('{"a":2}')]), user("more")],
        Cause.HISTORY_EDITED,
        1,
    ),
    "numbers of the same value, spelled otherwise": (
        [user("q")],
        [model(None, tool_calls=[tool_call('{"a":{"b":[1.0]}}')])],
        [user("q"), model(None, tool_calls=[tool_call('{"a":{"b":[1]}}')]), user("more")],
        Cause.TOOL_CALL_RESERIALISED,
        1,
    ),
    "arguments that are a list, spelled otherwise": (
        [user("q")],
        [model(None, tool_calls=[tool_call("[1.0]")])],
        [user("q"), model(None, tool_calls=[tool_call("[1]")]), user("more")],
        Cause.TOOL_CALL_RESERIALISED,
        1,
    ),
    "a tool call that was not made": (
        [user("q")],
        [model("let me see")],
        [user("q"), model("let me see", tool_calls=[tool_call("{}")]), user("more")],
        Cause.HISTORY_EDITED,
        1,
    ),
    "a dropped tool call": (
        [user("q")],
        [model("let me see", tool_calls=[tool_call("{}")])],
        [user("q"), model("let me see"), user("more")],
        Cause.TOOL_CALL_DROPPED,
        1,
    ),
    "another question": (
        [SYSTEM, user("q")],
        [model("A")],
        [SYSTEM, user("Q"), model("A"), user("more")],
        Cause.HISTORY_EDITED,
        1,
    ),
    "another tool list": (
        [*envelope("a"), user("q")],
        [model("A")],
        [*envelope("b"), user("q"), model("A"), user("more")],
        Cause.TOOLS_CHANGED,
        None,
    ),
    "a tool list where there was none": (
        [user("q")],
        [model("A")],
        [*envelope("b"), user("q"), model("A"), user("more")],
        Cause.TOOLS_CHANGED,
        None,
    ),
    "a tool list that is gone": (
        [*envelope("a"), user("q")],
        [model("A")],
        [user("q"), model("A"), user("more")],
        Cause.TOOLS_CHANGED,
        None,
    ),
    "another question, behind tools": (
        [*envelope("a"), SYSTEM, user("q")],
        [model("A")],
        [*envelope("a"), SYSTEM, user("Q"), model("A"), user("more")],
        Cause.HISTORY_EDITED,
        1,
    ),
    "a turn that the agent made up": (
        [user("q")],
        [model("A")],
        [user("q"), model("A"), user("more"), model("made up"), user("and")],
        Cause.UNKNOWN_HISTORY,
        1 + 1,
    ),
    "nothing in common": (
        [user("q")],
        [model("A")],
        [user("x"), model("y"), user("z")],
        Cause.UNKNOWN_HISTORY,
        None,
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_cause_and_first_differing_item(name: str, tmp_path: Path) -> None:
    asked, answered, came, cause, position = HISTORIES[name]
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", asked, answered)
    drift = store.admit(R, came, "c1").drift
    assert drift is not None
    assert (drift.cause, drift.position) == (cause, position), drift.detail
    assert drift.nearest_call == (None if name == "nothing in common" else "c0")
    assert "_ng_request_envelope" not in drift.detail, "what only the gateway calls so"
    if name == "another question, behind tools":
        assert drift.detail.startswith("item 1 (from 0): a user item was changed")
    assert [event["cause"] for event in store.events(R)] == [cause.value]


@pytest.mark.parametrize(
    ("was", "came", "says"),
    [
        (
            model(None, tool_calls=[tool_call('{"a":[1,2]}')]),
            model(None, tool_calls=[tool_call('{"a":[1,3]}')]),
            "tool_calls[0].function.arguments.a[1]: '2' was recorded, '3' came",
        ),
        (
            model('{"a":1}'),
            model('{"a": 1}'),
            """content: '{"a":1}' was recorded, '{"a": 1}' came; only white space in it differs""",
        ),
        (
            model(None, tool_calls=[tool_call('{"a":"1"}')]),
            model(None, tool_calls=[tool_call('{"a":1}')]),
            """tool_calls[0].function.arguments.a: '"1"' was recorded, '1' came; only its JSON type differs""",
        ),
        (
            model("x" * 3 * LEAF_CHARS + "y"),
            model("x" * 3 * LEAF_CHARS + "z"),
            f"content: they part after the first {LEAF_CHARS:,} characters",
        ),
        ({"role": "user", "content": ["one", "two"]}, user("one"), "content[1]: 'two' was recorded, nothing came"),
        (model("same"), model("same"), "None"),
    ],
)
def test_the_first_place_in_which_two_items_differ(was: dict[str, Any], came: dict[str, Any], says: str) -> None:
    assert str(first_difference(ItemDigest.of(was), ItemDigest.of(came))) == says


THOUGHT, TEXT = Cause.TEMPLATE_STRIPPED_REASONING, Cause.ASSISTANT_TEXT_CHANGED
LONG = "word " * LEAF_CHARS
ENDS, SPACE = "only white space at its ends differs", "only white space in it differs"
EDITS: list[tuple[str, str, Cause, str | None]] = [
    # what the model said, what came back, cause, what alone differs
    (" It rains.", "It rains.", TEXT, ENDS),
    ("It rains.\n", "It rains.", TEXT, ENDS),
    ("It rains.", "It rains.\n", TEXT, ENDS),
    (LONG, LONG.strip(), TEXT, ENDS),
    ("It  rains.", "It rains.", TEXT, SPACE),
    (f"{LONG}\n\n{LONG}", f"{LONG}\n{LONG}", TEXT, SPACE),
    ("It\r\nrains.", "It\nrains.", TEXT, "only its line ends differ (CR LF and LF)"),
    ("It rains.\r\n", "It rains.", TEXT, ENDS),
    ("caf\u00e9", "cafe\u0301", TEXT, "only the Unicode form of its characters differs"),
    ("It rains.", "it rains.", TEXT, "only upper and lower case differ"),
    ("It rains.", "it  rains.", TEXT, None),
    ("It rains.", "It snows.", TEXT, None),
    ("It rains.", "", TEXT, None),
    ("<think>R</think>A", "A", THOUGHT, None),
    ("<think>R</think>\n\nA", "A", THOUGHT, None),
    ("<think>R</think>\n\nA\n", "A", THOUGHT, None),
    ("\n<think>R</think> A", "\nA", THOUGHT, None),
    ("<think>\n\n</think>\n\nA", "A", THOUGHT, None),
    ("<think>R</think>A", "<think></think>A", THOUGHT, None),
    ("<think>R</think>A<think>S</think>B", "A<think>S</think>B", THOUGHT, None),
    ("<think>R</think>A", "B", TEXT, None),
    ("<think>R</think> A", "<think>R</think>A", TEXT, SPACE),
    ("<think>R</think>A ", "<think>R</think>A", TEXT, ENDS),
    ("<think>R</think>A", "<think>S</think>A", TEXT, None),
    ("A", "<think>R</think>A", TEXT, None),
]


@pytest.mark.parametrize(("said", "came", "cause", "only"), EDITS)
def test_an_edit_of_an_answer_is_called_the_smallest_thing_that_is_true(
    said: str, came: str, cause: Cause, only: str | None, tmp_path: Path
) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model(said)])
    drift = store.admit(R, [user("q"), model(came), user("more")], "c1").drift
    assert drift is not None and drift.difference is not None
    assert (drift.cause, drift.difference.only) == (cause, only), drift.detail
    assert drift.detail.endswith(f"; {only}" if only else " came") or LONG in (said, came)


CALL, RESPELLED = tool_call('{"a":1,"b":"x y"}'), Cause.TOOL_CALL_RESERIALISED
TOOL_EDITS: list[tuple[dict[str, Any], Cause, str]] = [
    # the turn that came back for CALL with the text "I look.", the cause, what is said of it
    (
        model("I look.", tool_calls=[tool_call('{"a":1.0,"b":"x y"}')]),
        Cause.TOOL_CALL_RESERIALISED,
        "spelled otherwise",
    ),
    (model("I look.", tool_calls=[CALL | {"id": "t2"}]), Cause.TOOL_CALL_RESERIALISED, "came back under another id"),
    (model("I look. ", tool_calls=[CALL]), TEXT, ENDS),
    (model("I look. ", tool_calls=[tool_call('{ "b": "x y", "a": 1 }')]), TEXT, ENDS),
    (model("I see.", tool_calls=[CALL | {"id": "t2"}]), RESPELLED, "its turn was changed too"),
    (model("I look.", tool_calls=[tool_call('{"a":1,"b":"x  y"}')]), Cause.HISTORY_EDITED, SPACE),
    (model("I look.", tool_calls=[tool_call('{"a":"1","b":"x y"}')]), Cause.HISTORY_EDITED, "its JSON type differs"),
    (model([{"type": "text", "text": "I "}, {"type": "text", "text": "look."}], tool_calls=[CALL]), TEXT, "its parts"),
]


@pytest.mark.parametrize(("came", "cause", "says"), TOOL_EDITS)
def test_an_edit_of_a_turn_with_a_tool_call(came: dict[str, Any], cause: Cause, says: str, tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("I look.", tool_calls=[CALL])])
    drift = store.admit(R, [user("q"), came, user("more")], "c1").drift
    assert drift is not None
    assert drift.cause is cause, drift.detail
    assert says in drift.detail


def test_spacing_and_order_of_keys_in_a_tool_call_are_no_edit(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("I look.", tool_calls=[CALL])])
    came = model("I look.", tool_calls=[tool_call('{ "b": "x y", "a": 1 }')])
    assert store.admit(R, [user("q"), came, user("more")], "c1").resolution.parent == "c0"


def test_tool_calls_in_another_order_are_called_that(tmp_path: Path) -> None:
    store, calls = LedgerStore(tmp_path), [CALL, tool_call("{}", call_id="t2")]
    commit(store, R, "c0", [user("q")], [model(None, tool_calls=calls)])
    drift = store.admit(R, [user("q"), model(None, tool_calls=calls[::-1]), user("more")], "c1").drift
    assert drift is not None and "its tool calls came back in another order" in drift.detail


def test_of_an_edited_question_too_it_is_said_what_alone_differs(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q\n")], [model("A")])
    drift = store.admit(R, [user("q"), model("A"), user("more")], "c1").drift
    assert drift is not None
    assert (drift.cause, drift.difference and drift.difference.only) == (Cause.HISTORY_EDITED, ENDS)


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "user", "content": 5},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": {"n": {1}}},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": {"n": 2**70}},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"n": 1e30}'},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "[" * 900 + "]" * 900},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": {1: 2, "n": [{2**70: 1}]}},
        {"role": "user", "content": [{"type": "text", "text": "half a pair: \ud800"}]},
        {"role": "_ng_request_envelope", "content": "{no json"},
        "no object",
    ],
)
def test_an_item_that_has_no_fingerprint_is_still_told_apart(odd: Any) -> None:
    assert ItemDigest.of(odd) == ItemDigest.of(odd)
    assert ItemDigest.of(odd).digest != ItemDigest.of(user("q")).digest


@pytest.mark.parametrize("depth", [300, 990])
def test_of_json_that_is_nested_deeply_too_it_is_said_where_it_differs(depth: int) -> None:
    deep, other = "[" * depth + "]" * depth, "[" * (depth - 1) + "1" + "]" * (depth - 1)
    for was, came in ((deep, "[1]"), (deep, other)):
        difference = first_difference(ItemDigest.of(user(was)), ItemDigest.of(user(came)))
        assert difference is not None
        assert difference.path.startswith("content")
        assert difference.was != difference.came


def test_a_silent_compaction_names_the_first_differing_item(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    asked: Items = [SYSTEM, user("q0")]
    record, chain = None, []
    for number in range(4):
        record = commit(store, R, f"c{number}", asked, [model(f"a{number}")], parent=record, chain=list(chain))
        chain.append(record.staging_key)
        asked = [*asked, model(f"a{number}"), user(f"q{number + 1}")]
    compacted = [SYSTEM, user("summary: q0, a0, q1, a1"), model("a3"), user("q4")]
    drift = store.admit(R, compacted, "c9").drift
    assert drift is not None
    assert (drift.cause, drift.nearest_call, drift.position) == (Cause.CONTEXT_COMPACTED, "c3", 1)


def test_a_child_stores_only_what_it_adds(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    asked: Items = [user("q0")]
    record = None
    for number in range(20):
        record = commit(store, R, f"c{number}", asked, [model(f"a{number}")], parent=record)
        asked = [*asked, model(f"a{number}"), user(f"q{number + 1}")]
    sizes = [len(line) for line in (tmp_path / f"{R}.items.jsonl").read_bytes().splitlines()]
    assert max(sizes[2:]) - min(sizes[2:]) < 20
    edited = [*asked]
    edited[10] = user("something else")
    drift = store.admit(R, edited, "c99").drift
    assert drift is not None
    assert (drift.cause, drift.position, drift.nearest_call) == (Cause.HISTORY_EDITED, 10, "c19")


def test_a_line_that_somebody_died_in_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'{"model_call_id": "tor')
    write_items(path, CallItems.of("a", [{"role": "user", "content": "x"}], []))
    assert [call.model_call_id for call in read_items(path)] == ["a"]


def test_lost_or_broken_item_lines_cost_the_diagnosis_only(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")])
    (tmp_path / f"{R}.items.jsonl").write_bytes(b'{"broken\n{"model_call_id": 3}\n')
    drift = store.admit(R, [user("q"), model("B"), user("more")], "c1").drift
    assert drift is not None and drift.cause == Cause.UNKNOWN_HISTORY


def test_a_switch_of_dialect_is_named(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")], dialect="responses")
    item: dict[str, Any] = model("A", tool_calls=[tool_call("{}")])
    drift = store.admit(R, [user("q"), item, user("more")], "c1", dialect="chat").drift
    assert drift is not None and drift.cause == Cause.DIALECT_CHANGED


def test_a_call_in_custody_is_never_said_to_have_no_tokens(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")])
    commit(store, R, "c1", [user("z")], [])
    other = store.admit(R, [user("q"), model("A"), user("more")], "c2", after_response_id="elsewhere").drift
    empty = store.admit(R, [user("z"), user("more")], "c3", after_response_id="resp-c1").drift
    assert other is not None and "names another response" in other.detail
    assert empty is not None and "returned no item" in empty.detail
    store.record_failure(R, "c4", Cause.WORKER_CAPTURE_FAILED)
    store.note_items(R, "c4", [user("f")], [model("B")], parent=None)
    lost = store.admit(R, [user("f"), model("B"), user("more")], "c5").drift
    assert lost is not None and "no tokens in custody" in lost.detail


def test_items_that_cannot_be_written_cost_a_diagnosis_and_not_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, items: CallItems) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("workbench.ledger.store.write_items", full)
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")])
    assert [record.model_call_id for record in store.manifest(R).records] == ["c0"]
    assert f"the items of call {R}/c0 could not be kept" in caplog.text
    drift = store.admit(R, [user("q"), model("B"), user("more")], "c1").drift
    assert drift is not None and drift.cause == Cause.UNKNOWN_HISTORY


@pytest.mark.parametrize("seed", range(40))
def test_what_calls_share_with_a_request_is_what_their_whole_histories_share(seed):
    draw = random.Random(seed)
    words = [{"role": "user", "content": f"w{number}"} for number in range(draw.choice((2, 5, 30)))]

    def some(most: int) -> list[dict[str, str]]:
        return draw.choices(words, k=draw.randint(0, most))

    calls: list[CallItems] = []
    whole: list[list[str]] = []
    for number in range(draw.randint(1, 30)):
        parent = draw.choice([None, *range(number), "unheard-of"])
        known = isinstance(parent, int)
        skip = draw.randint(0, len(whole[parent]) + 2) if known else 0
        # The first `skip` items of a request are the parent's, so what is recorded begins behind them.
        call = CallItems.of(f"c{number}", some(4), some(2), parent=f"c{parent}" if parent is not None else None)
        calls.append(replace(call, skip=skip))
        whole.append((whole[parent][:skip] if known else []) + [item.digest for item in call.items])
    came = [ItemDigest.of(item).digest for item in some(8)]
    if draw.random() < 0.7:
        kept = draw.choice(whole)
        came = kept[: draw.randint(0, len(kept))] + came
    leading = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, came, strict=False))) for one in whole
    ]
    at_all = [sum((Counter(one) & Counter(came)).values()) for one in whole]
    assert shared_items(calls, came) == list(zip(leading, at_all, strict=True))
    for order, expected in enumerate(whole):
        assert [item.digest for item in history(calls, order)] == expected


def test_a_diagnosis_takes_time_in_proportion_to_what_was_recorded():
    """Generous: with histories spelled out for every call, eight times the calls took 64 times as long."""

    def seconds(count: int) -> float:
        calls, items = [], []
        for number in range(count):
            added = [{"role": "user", "content": f"task {number}"}]
            answer = [{"role": "assistant", "content": f"answer {number}"}]
            calls.append(CallItems.of(f"c{number}", items + added, answer, parent=f"c{number - 1}", skip=len(items)))
            items += added + answer
        took = []
        for _ in range(3):
            began = time.process_time()
            diagnose_drift(calls, [{"role": "user", "content": "something else"}])
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(1_600) < 24 * seconds(200)
