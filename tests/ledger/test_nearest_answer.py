"""What a scored response that no call gave nearly is: which answer, and in what they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from speech import Items, commit, model, tool_call, user

from workbench.ledger import LedgerStore
from workbench.ledger.items import LEAF_CHARS

R = "run.0.0.0"
LONG = "word " * LEAF_CHARS + "."
ANSWERS = ["It rains.", "Take an umbrella.", " Yes\n", LONG]


def left(text: Any, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"message": model(text, **fields)}]}


@pytest.fixture
def store(tmp_path: Path) -> LedgerStore:
    store, asked = LedgerStore(tmp_path), [user("q")]
    record = None
    for number, answer in enumerate(ANSWERS):
        record = commit(store, R, f"c{number}", asked, [model(answer)], parent=record)
        asked = [*asked, model(answer), user("more")]
    return store


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("It rains.\n", "the text that was left is the answer of call c0 with '\\n' after it. Next: "),
        (
            "loading the model\nTake an umbrella.\n",
            "is the answer of call c1 with 'loading the model\\n' before it and '\\n' after it.",
        ),
        ("Yes", "is the answer of call c2 without ' ' before it and '\\n' after it."),
        ("take an umbrella.", "is nearly the answer of call c1: only upper and lower case differ."),
        (LONG + "\n", "is nearly the answer of call c3: only white space at its ends differs."),
        (
            "Take an apple.",
            "nearest to the text that was left is the answer of call c1; from character 8 on 'umbrella.' was served "
            "and 'apple.' was left.",
        ),
        ("", "the response that was left has no text; call c3 answered 'word word"),
        (None, "the response that was left has no text; call c3 answered 'word word"),
        ("Quite another", "no answer that was served is like the text that was left; call c3 answered 'word word"),
    ],
)
def test_the_nearest_answer_and_in_what_it_differs(store: LedgerStore, text: str | None, says: str) -> None:
    said = store.nearest_answer(R, left(text))
    assert said is not None and says in said
    assert 'print(answer, end="")' in said and "the served response itself" in said


def test_the_same_text_without_its_tool_call_is_called_that(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("I look.", tool_calls=[tool_call("{}")])])
    said = store.nearest_answer(R, left("I look."))
    assert said is not None and "is the answer of call c0, whose tool calls or other parts are missing" in said


@pytest.mark.parametrize("response", [{}, {"choices": []}, {"output": ["x", 3]}])
def test_a_response_without_a_message_is_near_nothing(store: LedgerStore, response: dict[str, Any]) -> None:
    assert store.nearest_answer(R, response) is None


def test_without_a_served_text_nothing_is_near(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    assert store.nearest_answer(R, left("It rains.")) is None
    asked: Items = [user("q")]
    commit(store, R, "c0", asked, [])
    assert store.nearest_answer(R, left("It rains.")) is None
