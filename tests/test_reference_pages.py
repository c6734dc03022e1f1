"""The pages under docs/reference/ are what the code declares, and every link in the documents leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_the_pages_say_what_the_code_declares(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import reference_pages

    assert not reference_pages.stale(), "run: python tools/reference_pages.py"


def test_asking_for_help_or_for_what_there_is_not_writes_no_page():
    pages = {page: page.stat().st_mtime_ns for page in (ROOT / "docs" / "reference").iterdir()}
    for option, code in (("--help", 0), ("--chek", 2)):
        asked = [sys.executable, "tools/reference_pages.py", option]
        assert subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == code
    assert pages == {page: page.stat().st_mtime_ns for page in pages}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target
