"""The notebooks in JupyterLab, run and looked at as a person would, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_page import DARK, LIGHT, NotebookPage
from playwright.sync_api import Browser, expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def chain_page(browser: Browser, lab) -> Iterator[NotebookPage]:
    page = NotebookPage(browser, lab.notebook("02_prefix_chain.ipynb"))
    page.run_all()
    yield page
    page.page.close()


def test_the_chain_is_seen_with_its_counts(chain_page: NotebookPage, screenshots: Path) -> None:
    seen = chain_page.output("chain = PrefixChain")
    expect(seen).to_contain_text("Rollout demo.0.0.0 · 4 calls · 1 side branch · 164 tokens (48 sampled)")
    for theme in (LIGHT, DARK):
        chain_page.theme(theme)
        chain_page.save(seen, screenshots / f"chain-{theme.split()[-1].lower()}.png")
        chain_page.page.screenshot(path=screenshots / f"lab-{theme.split()[-1].lower()}.png")
    assert chain_page.errors == []
