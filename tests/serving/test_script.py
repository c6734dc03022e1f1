"""The scripted engine's script: where replies come from, and what is said of one that cannot be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import SetupError
from workbench.serving.scripted import Script


def answer(rollout_id: str, number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"text": f"{rollout_id} {number} {len(messages)}"}


@pytest.mark.parametrize("source", [answer, f"{__name__}:answer"])
def test_a_function_is_asked_with_rollout_number_and_messages(source: Any) -> None:
    script = Script(source)
    said = [script.reply(name, [{}] * count).text for name, count in (("a", 1), ("b", 1), ("a", 3))]
    assert said == ["a 0 1", "b 0 1", "a 1 3"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"script\.jsonl, line 1: "),
        ('\n{"text": "a", "token_ids": [1]}', r"script\.jsonl, line 2: .*either text or token_ids"),
        ("{}", r"script\.jsonl, line 1: .*either text or token_ids"),
    ],
)
def test_a_line_that_says_nothing_or_two_things_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "script.jsonl").write_text(text)
    with pytest.raises(SetupError, match=r"(?s)" + says):
        Script(tmp_path / "script.jsonl")


def test_a_script_that_is_not_there_and_a_rollout_without_a_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        Script(tmp_path / "nowhere.jsonl")
    (tmp_path / "script.jsonl").write_text('{"text": "a", "rollout": "run.*"}')
    script = Script(tmp_path / "script.jsonl")
    assert script.reply("run.0.0.0", []).text == "a"
    with pytest.raises(SetupError, match="no line for rollout 'other'"):
        script.reply("other", [])


def raising(rollout_id: str, number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    raise KeyError("said")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            raising,
            r"function \(test_script\.py:\d+\), asked for call 0 of rollout 'r\.0', raised KeyError: 'said' at test_",
        ),
        (lambda *_: None, r"returned None; expected a line as a dict, like \{'text': 'Yes\.'\}"),
        (lambda *_: {"text": object()}, r"returned what is no line: text: Input should be a valid string$"),
        (lambda *_: {"text": "a", "logprobs": ["b"]}, r"returned what is no line: logprobs\.0: "),
        (lambda *_: {}, r"returned what is no line: a line has either text or token_ids$"),
    ],
)
def test_a_function_that_gives_no_line_is_named_with_what_came(function: Any, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Script(function).reply("r.0", [])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.at_all:answer", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{__name__}:nothing", "cannot be loaded: AttributeError: "),
        (f"{__name__}:__doc__", "is a str; expected a function, or a JSONL file"),
    ],
)
def test_a_function_that_is_not_there_is_named(source: str, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Script(source)
