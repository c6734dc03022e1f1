"""Executed notebooks as pages, opened with scripts off: what a reader without a kernel, and without trust, sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, BrowserContext, expect

from workbench import runs
from workbench.campaign.report.html_export import export_html
from workbench.demo import recorded_run
from workbench.inspect import LogprobDelta, PoisonTable, PrefixChain, telling_rollout

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

RECORDED = runs.open(recorded_run())
SEEN = {
    "02_prefix_chain.ipynb": (
        "Explore one rollout's prefix chain",
        repr(PrefixChain(RECORDED, telling_rollout(RECORDED))),
        "retry: the same request again",
    ),
    "03_tokens_and_logprobs.ipynb": (
        "Tokens and log-probabilities",
        repr(LogprobDelta(RECORDED)),
        "token_mult_prob_error",
    ),
    "04_poisoning.ipynb": (
        "Poisoning: everything that can go wrong, on purpose",
        "Drift · 10 causes provoked, 10 named by the product",
        "The history lost the reasoning that the model had written.",
    ),
    "10_campaign.ipynb": (
        "A capture campaign",
        repr(PoisonTable(RECORDED)),
        "The request continues no recorded call, so its prefix is unknown.",
    ),
}


@pytest.fixture(scope="module")
def without_scripts(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1100, "height": 900})
    context.route(re.compile("^https?:"), lambda route: route.abort())
    yield context
    context.close()


@pytest.mark.parametrize("kind", ["nbconvert", "report"])
@pytest.mark.parametrize("name", SEEN)
def test_title_counts_picture_and_table_are_there_without_scripts(
    executed_notebooks, without_scripts: BrowserContext, tmp_path: Path, screenshots: Path, name: str, kind: str
) -> None:
    notebook = nbformat.read(executed_notebooks[name], as_version=4)
    path = tmp_path / "page.html"
    if kind == "report":
        export_html(notebook, path, "page")
    else:
        path.write_text(HTMLExporter(embed_images=True).from_notebook_node(notebook)[0], encoding="utf-8")
    title, counts, in_table = SEEN[name]
    page = without_scripts.new_page()
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    expect(page.locator("h1").first).to_contain_text(title)
    expect(page.get_by_text(counts).first).to_be_visible()
    expect(page.locator("table :is(th, td)", has_text=in_table).first).to_be_visible()
    pictures = [picture.bounding_box() for picture in page.locator("img").all()]
    assert pictures and all(box and box["width"] > 300 and box["height"] > 60 for box in pictures)
    assert "Loading widget" not in page.content()
    assert kind != "report" or not [url for url in asked_for if url.startswith("http")], "a report fetches nothing"
    page.screenshot(path=screenshots / f"page-{name[:2]}-{kind}.png", full_page=True)
    page.close()
