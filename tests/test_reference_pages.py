"""The pages under docs/reference/ are what the code declares, and every link in the documents leads somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_the_pages_say_what_the_code_declares(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import reference_pages

    assert not reference_pages.stale(), "run: python tools/reference_pages.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target
