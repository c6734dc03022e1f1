"""Names of parsers are read from the installed vLLM; where that is not possible, nothing is claimed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.serving import parsers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("def broken(:", None),
        ("OTHER = {'a': 1}", None),
        ("_TOOL_PARSERS_TO_REGISTER = {'qwen3_coder': ('a', 'b'), 'hermes': ('c', 'd')}", ["hermes", "qwen3_coder"]),
    ],
)
def test_names_are_those_of_the_table_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: list[str] | None
) -> None:
    (tmp_path / "tool_parsers").mkdir()
    if text is not None:
        (tmp_path / "tool_parsers" / "__init__.py").write_text(text)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert parsers.offered("tool_call_parser") == expected


def test_without_vllm_no_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert parsers.offered("reasoning_parser") is None
