"""A class of one's own: a file that fails while it is imported is read again once it was mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import RecipeError
from workbench.own_code import load, raised


def test_a_file_that_failed_is_read_anew_and_one_that_did_not_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise ValueError('half written')\n")
    with pytest.raises(
        RecipeError, match=r"environment\.name .* cannot be imported \(ValueError: half written at mine.py:1\)"
    ):
        load(f"{file}:Mine", "environment.name")
    file.write_text("class Mine: ...\n")
    mine = load(f"{file}:Mine", "environment.name")
    assert mine.__name__ == "Mine" and load(f"{file}:Mine", "environment.name") is mine


def test_a_file_that_says_what_is_wrong_with_the_recipe_is_quoted(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from workbench.errors import RecipeError\nraise RecipeError('set MY_DATA first')\n")
    with pytest.raises(RecipeError, match=r"^set MY_DATA first$"):
        load(f"{file}:Mine", "environment.name")


def test_a_class_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from pathlib import Path\nclass Rhyme: ...\n")
    with pytest.raises(RecipeError, match=r"mine\.py has no 'Rime', did you mean Rhyme\? It has Rhyme; expected pack"):
        load(f"{file}:Rime", "environment.name:")
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(RecipeError, match=r"empty\.py has no 'Mine'\. It has no class; expected"):
        load(f"{empty}:Mine", "environment.name:")


def test_a_file_without_a_class_is_told_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"names a file and no class in it; expected mine\.py:Class"):
        load("mine.py", "environment.name:")


async def _say() -> tuple[str, dict[str, str]]:
    return "", {}


def test_a_call_that_was_not_awaited_is_asked_about() -> None:
    pending: Any = _say()
    uses = (lambda: tuple(pending), lambda: pending[0], lambda: pending.choices)
    for use in uses:
        with pytest.raises((TypeError, AttributeError)) as caught:
            use()
        assert raised(caught.value).endswith("; is an await missing there?")
    pending.close()
    assert raised(TypeError("expected a number")) == "TypeError: expected a number"
