"""A class of one's own: a file that fails while it is imported is read again once it was mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import RecipeError
from workbench.own_code import load


def test_a_file_that_failed_is_read_anew_and_one_that_did_not_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise ValueError('half written')\n")
    with pytest.raises(RecipeError, match=r"environment\.name .* cannot be imported \(ValueError: half written\)"):
        load(f"{file}:Mine", "environment.name")
    file.write_text("class Mine: ...\n")
    mine = load(f"{file}:Mine", "environment.name")
    assert mine.__name__ == "Mine" and load(f"{file}:Mine", "environment.name") is mine


def test_a_file_that_says_what_is_wrong_with_the_recipe_is_quoted(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from workbench.errors import RecipeError\nraise RecipeError('set MY_DATA first')\n")
    with pytest.raises(RecipeError, match=r"^set MY_DATA first$"):
        load(f"{file}:Mine", "environment.name")
