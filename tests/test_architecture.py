"""The rooms' directions: what `[tool.importlinter]` in pyproject.toml says of imports is so."""

from __future__ import annotations

from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).parents[1]


def test_rooms_import_one_way_and_never_in_a_circle(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    code = cli.lint_imports(config_filename="pyproject.toml", cache_dir=str(tmp_path))
    assert code == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out
