"""Live views in a column of 440 px, as a window of 480 px leaves: nothing shrinks to where it cannot be read, and
nothing but what scrolls by itself is wider than its column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from mounted import error, mount
from notebook_page import contrast
from playwright.sync_api import Browser, Page

from workbench import runs
from workbench.campaign.report.html_export import export_html
from workbench.demo import recorded_run
from workbench.inspect import (
    CampaignBoard,
    LogprobDelta,
    Optimisation,
    PoisonTable,
    PrefixChain,
    RowDiff,
    TokenStrip,
    telling_rollout,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
WIDTH, LEAST_PX = 440, 8.9

#: Words with the height of their letters as they are on the screen (an SVG is scaled), and what overflows the view.
_LOOK = """() => {
  const view = document.querySelector("[data-wb]"), small = [], wide = [];
  const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.getClientRects().length || parent.closest("title")) continue;
    const matrix = parent.getScreenCTM ? parent.getScreenCTM() : null;
    const px = parseFloat(getComputedStyle(parent).fontSize) * (matrix ? matrix.a : 1);
    if (px < LEAST) small.push(`${node.textContent.trim()}: ${px.toFixed(1)} px`);
  }
  if (view.scrollWidth > view.clientWidth + 1) wide.push(`the view: ${view.scrollWidth} in ${view.clientWidth}`);
  return [...small, ...wide];
}""".replace("LEAST", str(LEAST_PX))


@pytest.mark.parametrize(
    "name", ["PrefixChain", "TokenStrip", "PoisonTable", "LogprobDelta", "RowDiff", "CampaignBoard"]
)
def test_a_live_view_can_be_read_in_a_narrow_column(browser: Browser, name: str) -> None:
    run = runs.open(recorded_run())
    rollout_id = telling_rollout(run)
    widget = {
        "PrefixChain": lambda: PrefixChain(run, rollout_id).live.chain,
        "TokenStrip": lambda: TokenStrip(run, rollout_id).live,
        "PoisonTable": lambda: PoisonTable(run).live.children[0],
        "LogprobDelta": lambda: LogprobDelta(run).live.children[0],
        "RowDiff": lambda: RowDiff(run, run).live,
        "CampaignBoard": lambda: CampaignBoard(run).live,
    }[name]()
    page, _ = mount(browser, widget, width=WIDTH)
    assert page.evaluate(_LOOK) == [] and error(page) == ""
    page.close()


@pytest.mark.parametrize("width", [WIDTH, 1000])
def test_the_bars_of_a_mean_are_on_one_line_in_a_live_view(browser: Browser, width: int) -> None:
    page, _ = mount(browser, LogprobDelta(runs.open(recorded_run())).live.children[0], width=width)
    whole = page.locator("[data-wb] span", has_text=re.compile(r"^\|Δ\|$"))
    assert page.locator(".wb-title").first.locator("span").count() == 1 and whole.count() > 1
    for each in whole.all():
        assert each.evaluate("node => node.getClientRects().length") == 1
    page.close()


def test_every_step_of_a_short_run_has_its_tick(browser: Browser) -> None:
    run = runs.open(recorded_run())
    page, _ = mount(browser, CampaignBoard(run).live, width=WIDTH)
    drawn = page.locator("svg.wb-plot").first.locator("text").all_text_contents()
    assert [each for each in drawn if each in ("1", "2", "3", "4")][-4:] == ["1", "2", "3", "4"], drawn
    page.close()


def test_a_long_name_breaks_where_its_column_is_narrow(browser: Browser) -> None:
    page, _ = mount(browser, PoisonTable(runs.open(recorded_run())).live.children[0], width=WIDTH)
    name = page.locator("td", has_text="request_finished_without_staged_coordinates").bounding_box()
    assert name and name["width"] < WIDTH * 0.4 and name["height"] > 30
    page.close()


def report(browser: Browser, folder: Path, *shown: str, **context: Any) -> Page:
    """A report of one cell that shows this HTML, in a window of 480 px."""
    outputs = [nbformat.v4.new_output("display_data", {"text/html": html}) for html in shown]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=outputs)])
    export_html(notebook, folder / "page.html", "page")
    page = browser.new_page(viewport={"width": 480, "height": 900}, **context)
    page.goto((folder / "page.html").as_uri())
    return page


def test_a_report_is_as_wide_as_a_narrow_window_whatever_its_tables_hold(browser: Browser, tmp_path: Path) -> None:
    run = runs.open(recorded_run())
    page = report(
        browser,
        tmp_path,
        PoisonTable(run).html(),
        LogprobDelta(run).html(),
        Optimisation(run).html(),
        run.steps._repr_html_(),
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 480
    # What a table is wider by can be scrolled to.
    last = page.locator("table").first.locator("th").last
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= 480
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_static_view_can_be_read_on_a_light_and_on_a_dark_page(browser: Browser, tmp_path: Path, scheme: Any) -> None:
    run = runs.open(recorded_run())
    views = (
        PoisonTable(run),
        TokenStrip(run, telling_rollout(run)),
        RowDiff(run, run),
        CampaignBoard(run),
        Optimisation(run),
    )
    page = report(browser, tmp_path, *(view.html() for view in views), color_scheme=scheme)
    for part in ("th", "td", "td b", "u", "div > b"):
        assert contrast(page.locator(part).first) >= 4.5, part
    page.close()
