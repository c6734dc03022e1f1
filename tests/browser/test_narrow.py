"""Live views in a column of 440 px, as a window of 480 px leaves: nothing shrinks to where it cannot be read, and
nothing but what scrolls by itself is wider than its column."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from mounted import error, mount
from playwright.sync_api import Browser

from workbench import runs
from workbench.campaign.html_export import export_html
from workbench.demo import recorded_run
from workbench.inspect import (
    CampaignBoard,
    LogprobDelta,
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


def test_a_report_is_as_wide_as_a_narrow_window_whatever_its_tables_hold(browser: Browser, tmp_path: Path) -> None:
    run = runs.open(recorded_run())
    tables = [PoisonTable(run).html(), LogprobDelta(run).html(), run.steps._repr_html_()]
    shown = [nbformat.v4.new_output("display_data", {"text/html": table}) for table in tables]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=shown)])
    export_html(notebook, tmp_path / "page.html", "page")
    page = browser.new_page(viewport={"width": 480, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 480
    page.close()
