"""Finding a browser: one that runs is taken, one is installed where there is none, and otherwise it is said how."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from browser_tool import chromium_tool


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool on a machine without any browser, whose PATH is `tmp_path`."""
    tool = chromium_tool()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WORKBENCH_CHROMIUM", raising=False)
    monkeypatch.setattr(tool, "_of_playwright", lambda: None)
    monkeypatch.setattr(tool, "_with_playwright", lambda: False)
    monkeypatch.setattr(tool.os, "geteuid", lambda: 0)
    return tool


def put(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_one_that_runs_is_taken_and_one_that_only_looks_like_it_is_not(tool: ModuleType, tmp_path: Path) -> None:
    put(tmp_path / "chromium", "echo 'install it from the shop' >&2", "exit 1")
    assert tool.find() is None
    right = put(tmp_path / "google-chrome", "echo Chromium 150.0")
    assert tool.find() == tool.get() == str(right)


def test_a_named_one_is_meant_even_if_it_does_not_run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "chromium", "echo Chromium 150.0")
    monkeypatch.setenv("WORKBENCH_CHROMIUM", str(tmp_path / "nowhere"))
    assert tool.get() is None


def test_root_on_debian_gets_one_installed(tool: ModuleType, tmp_path: Path) -> None:
    install = f"printf '#!/bin/sh\\necho Chromium 150.0\\n' > {tmp_path}/chromium && /bin/chmod +x {tmp_path}/chromium"
    put(tmp_path / "apt-get", f'[ "$1" = update ] || {{ {install}; }}')
    assert tool.get() == str(tmp_path / "chromium")


def test_where_none_can_be_had_it_says_how(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    put(tmp_path / "apt-get", "echo 'E: no network' >&2", "exit 100")
    assert tool.main() == 2
    said = capsys.readouterr().err
    assert "E: no network" in said
    assert "apt-get install chromium" in said and "playwright install" in said and "WORKBENCH_CHROMIUM=" in said
