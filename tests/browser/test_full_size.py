"""Live views at full size in a real browser: 131,072 tokens, 10,000 calls, 50,000 tokens against as many.

Nodes are asserted as they are promised (2,000), times ten times as wide; benchmarks/inspectors.py measures them.
"""

from __future__ import annotations

import large
import pytest
from mounted import error, mount, nodes
from playwright.sync_api import Browser

from workbench.inspect import PrefixChain, RowDiff, TokenStrip

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
MOST_NODES, MOST_MS = 2_000, 3_000


def test_a_strip_of_131072_tokens(browser: Browser) -> None:
    strip = TokenStrip(large.row(131_072, 500), vocabulary=large.vocabulary())
    page, ms = mount(browser, strip.live)
    assert ms < MOST_MS and nodes(page) < MOST_NODES
    view, detail = page.locator("[data-wb='TokenStrip']"), page.locator(".wb-detail")
    search = view.locator("input")
    call = f"{249:032x}"
    for query, at in (("#131071", 131_071), (f"call:{call}", strip.first_of(call)), ("#65536", 65_536)):
        search.fill(query)
        search.press("Enter")
        assert f"token {at:,} ·" in (detail.text_content() or "")
        assert nodes(page) < MOST_NODES
    view.focus()
    view.press("d")
    worst = strip.tokens.with_row_index("at").drop_nulls("delta").sort("delta", descending=True)
    largest = max(worst.head(1).rows(named=True) + worst.tail(1).rows(named=True), key=lambda row: abs(row["delta"]))
    assert f"token {largest['at']:,} ·" in (detail.text_content() or "")
    for signal in ("logprob", "delta", "ratio", "mask", "version"):
        view.locator("select").select_option(signal)
        assert nodes(page) < MOST_NODES
    assert error(page) == ""
    page.close()


def test_a_line_of_single_characters_is_the_worst_for_the_document(browser: Browser) -> None:
    vocabulary = type(large.vocabulary())({i: bytes([97 + i]) for i in range(26)}, {})
    frame = large.row(20_000, 1)
    letters = frame.with_columns((frame["token_id"] % 26).alias("token_id"))
    page, _ = mount(browser, TokenStrip(letters, vocabulary=vocabulary).live)
    assert 1_000 < nodes(page) < MOST_NODES
    page.close()


@pytest.mark.parametrize("shape", ["chain", "star", "bush"])
def test_a_tree_of_10000_calls(browser: Browser, shape) -> None:
    page, ms = mount(browser, PrefixChain(large.tree(10_000, shape)).live.chain)
    assert ms < MOST_MS and nodes(page) < MOST_NODES
    view = page.locator("[data-wb='PrefixChain']")
    view.focus()
    for key in "nnj]]d":
        view.press(key)
    search = view.locator("input")
    search.fill("#9000 ")
    search.press("Enter")
    assert "call #9000 " in (page.locator(".wb-detail").text_content() or "")
    assert nodes(page) < MOST_NODES and error(page) == ""
    page.close()


def test_50000_tokens_against_50000(browser: Browser) -> None:
    one = large.row(50_000, 200)
    diff = RowDiff(one, large.edited(one, every=50), vocabulary=large.vocabulary())
    page, ms = mount(browser, diff.live)
    assert ms < MOST_MS and nodes(page) < MOST_NODES
    view = page.locator("[data-wb='RowDiff']")
    assert f"first diverging id: {diff.first:,}" in (view.locator(".wb-bar").last.text_content() or "")
    view.focus()
    for _ in range(5):
        view.press("d")
    assert "difference at" in (view.locator(".wb-bar").last.text_content() or "")
    assert view.locator(".wb-t.differs").count() > 0 and nodes(page) < MOST_NODES and error(page) == ""
    page.close()


def test_a_view_that_fails_says_so_in_one_line(browser: Browser) -> None:
    widget = PrefixChain(large.tree(10, "chain")).live.chain
    widget.block = widget.block[:-40]
    page, _ = mount(browser, widget)
    page.wait_for_selector(".wb-error:not([hidden])")
    assert error(page).startswith("The live view failed: ") and ".snapshot()" in error(page)
    page.close()
