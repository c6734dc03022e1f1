"""What the documents show can be done: their Python runs, their commands and targets exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from workbench.campaign.cli import main
from workbench.demo import recorded_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.md")]
)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


async def run_like_a_notebook(code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "document"}
    compiled = compile(code, "document", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if inspect.iscoroutine(pending := eval(compiled, names)):
        await pending
    return names


async def test_the_first_lines_of_the_readme_capture_and_open_a_rollout():
    names = await run_like_a_notebook(blocks(ROOT / "README.md", "python")[0])
    assert "2 calls" in repr(names["chain"]) and "verified" in repr(names["chain"])


@pytest.mark.parametrize("document", ["README.md", "docs/recipes.md", "docs/stopping_and_resuming.md"])
async def test_python_in_the_documents_runs(document):
    programs = blocks(ROOT / document, "python")
    assert programs
    for code in programs:
        await run_like_a_notebook(code.replace("reports/<run>", str(recorded_run())))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_exist(document):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"make {target}"
    for command in re.findall(r"(?:^|`)(?:\.venv/bin/)?workbench ([a-z]+)", text, re.MULTILINE):
        assert command in main.commands, f"workbench {command}"
