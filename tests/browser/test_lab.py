"""The notebooks in JupyterLab, run and used as a person would, with mouse and keyboard, in light and in dark.

What is asserted is what is seen: text, which card or token is marked, whether it can be read on its background. The
pictures that are kept are for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from notebook_page import DARK, LIGHT, NotebookPage, contrast
from playwright.sync_api import Browser, Locator, expect

from workbench import runs
from workbench.demo import recorded_run
from workbench.inspect import PrefixChain, telling_rollout

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
THEMES = {"light": LIGHT, "dark": DARK}

RECORDED = runs.open(recorded_run())
CHAIN = PrefixChain(RECORDED, telling_rollout(RECORDED))
WORST = RECORDED.logprobs().sort(pl.col("delta").abs(), descending=True).row(0, named=True)
"""The token in which trainer and sampler of the recorded run disagree most."""


def starts_of_calls(rollout_id: str) -> list[int]:
    """The position at which each call of the chain begins."""
    return RECORDED.tokens(rollout_id).group_by("model_call_id", maintain_order=True).first()["position"].to_list()


def word_that_occurs_once(rollout_id: str) -> str:
    vocabulary = RECORDED.vocabulary()
    pieces = [vocabulary.pieces.get(i, b"").decode() for i in RECORDED.tokens(rollout_id)["token_id"].to_list()]
    text = "".join(pieces).lower()
    words = (piece.strip() for piece in pieces)
    return next(word for word in words if len(word) > 3 and word.isalpha() and text.count(word.lower()) == 1)


@pytest.fixture(scope="module")
def chain_page(browser: Browser, lab) -> Iterator[NotebookPage]:
    page = NotebookPage(browser, lab.notebook("02_prefix_chain.ipynb"))
    page.run_all()
    yield page
    page.page.close()


@pytest.fixture(scope="module")
def token_page(browser: Browser, lab) -> Iterator[NotebookPage]:
    page = NotebookPage(browser, lab.notebook("03_tokens_and_logprobs.ipynb"))
    page.run_all()
    yield page
    page.page.close()


@pytest.fixture
def chain(chain_page: NotebookPage) -> Locator:
    """The live chain of notebook 02, with its first call marked."""
    view = chain_page.view("chain = look(PrefixChain", "PrefixChain")
    view.focus()
    for key in ("Escape", "[", "[", "p", "p", "p"):
        view.press(key)
    expect(at(view)).to_contain_text("#1")
    return view


def at(view: Locator) -> Locator:
    """The card that the keyboard is on."""
    return view.locator(".wb-card.at")


def detail(view: Locator) -> Locator:
    return view.locator(".wb-detail")


# -- 02: which calls were trained on, why were the others not? --------------------------------------------------------


def test_the_chain_says_which_calls_were_trained_on(chain: Locator) -> None:
    expect(chain.locator(".wb-title")).to_have_text(repr(CHAIN))
    assert "5 calls · 1 retry" in repr(CHAIN) and "verified, trained in step 1" in repr(CHAIN)
    expect(chain.locator(".wb-custody.verified")).to_be_visible()
    expect(chain.locator(".wb-card.chain")).to_have_count(4)
    expect(chain.locator(".wb-card")).to_have_count(5)
    expect(chain.locator(".wb-branch", has_text="retry after #1")).to_be_visible()
    expect(chain.locator(".wb-error")).to_be_hidden()


def test_the_snapshot_is_folded_away_while_the_widget_is_there(chain_page: NotebookPage, chain: Locator) -> None:
    cell = chain_page.cell("chain = look(PrefixChain")
    expect(cell.locator(".jp-OutputArea-child:visible")).to_have_count(1)
    expect(cell.locator("img")).to_be_attached()
    expect(cell.locator("img")).to_be_hidden()


def test_clicking_a_branch_opens_its_tokens(chain_page: NotebookPage, chain: Locator) -> None:
    branch = chain.locator(".wb-card:not(.chain)")
    branch.click()
    expect(branch).to_have_class(re.compile(r"\bat\b.*\bchosen\b"))
    expect(detail(chain)).to_contain_text("retry: the same request again")
    tokens = chain_page.view("chain = look(PrefixChain", "TokenStrip")
    call_id = branch.get_attribute("data-call")
    parent, retry = (CHAIN.calls.filter(order=order).row(0, named=True) for order in (1, 2))
    sampled = parent["sampled_tokens"] + retry["sampled_tokens"]
    expect(tokens.locator(".wb-title")).to_contain_text(f"{retry['cum_len']} tokens ({sampled} sampled)")
    expect(tokens.locator(".wb-line.call").last).to_contain_text("call #2")
    assert call_id
    expect(tokens.locator(".wb-line.call").last).to_contain_text(call_id[:8])
    expect(tokens.locator(".wb-t.s").first).to_be_visible()


def test_the_chain_is_walked_by_keyboard(chain_page: NotebookPage, chain: Locator) -> None:
    cells = chain_page.cells.count()
    for key, card in (("n", "#3"), ("n", "#4"), ("p", "#3"), ("]", "#2"), ("[", "#1"), ("d", "#2"), ("k", "#3")):
        chain.press(key)
        expect(at(chain)).to_contain_text(card)
        expect(detail(chain)).to_contain_text(f"call {card}")
    chain.press("?")
    expect(chain.locator(".wb-help")).to_contain_text("next call beside the chain")
    chain.press("?")
    expect(chain.locator(".wb-help")).to_be_hidden()
    assert chain_page.cells.count() == cells, "a key went through to the notebook, where d d deletes a cell"


def test_a_call_is_found(chain: Locator) -> None:
    chain.press("/")
    search = chain.locator("input")
    expect(search).to_be_focused()
    search.fill("retry")
    search.press("Enter")
    expect(chain.locator(".wb-note")).to_have_text("1 of 1 call found")
    expect(at(chain)).to_contain_text("#2")
    search.fill("no such call")
    search.press("Enter")
    expect(chain.locator(".wb-note")).to_contain_text("does not occur")
    search.fill("")
    search.press("Enter")
    expect(chain.locator(".wb-note")).to_have_text("5 calls on 2 paths, all at hand")
    search.press("Escape")


def test_a_rejected_rollout_says_why(chain_page: NotebookPage) -> None:
    rejected = chain_page.view("look(PrefixChain, campaign, rejected[0])", "PrefixChain")
    expect(rejected.locator(".wb-title")).to_contain_text("rejected: unresolved_parent")
    lost = rejected.locator(".wb-card.lost")
    expect(lost).to_have_count(3)
    expect(lost.first).to_contain_text("assistant_text_changed")
    lost.first.click()
    expect(detail(rejected)).to_contain_text("the text of a model turn came back changed")


def test_a_foreign_ledger_is_drawn_and_says_that_it_has_no_tokens(chain_page: NotebookPage) -> None:
    view = chain_page.view('PrefixChain(ledger, "g00-3-0e9c7f")', "PrefixChain")
    expect(view.locator(".wb-title")).to_contain_text("7 calls · 1 retry · rejected: ambiguous_terminal")
    expect(view.locator(".wb-card.contends")).to_have_count(2)
    view.locator(".wb-card").first.click()
    strip = chain_page.view('PrefixChain(ledger, "g00-3-0e9c7f")', "TokenStrip")
    expect(strip.locator(".wb-missing")).to_contain_text("custody only")


# -- 03: where do trainer and sampler disagree most, in which text? ---------------------------------------------------


def test_the_largest_difference_is_found_in_its_text(token_page: NotebookPage) -> None:
    strip = token_page.view("strip = look(TokenStrip", "TokenStrip")
    strip.focus()
    strip.press("d")
    expect(strip.locator(".wb-note")).to_contain_text("|Δ| number 1 of")
    expect(detail(strip)).to_contain_text(f"Δ {WORST['delta']:.4f}".rstrip("0"))
    marked = strip.locator(".wb-t.at")
    expect(marked).to_have_attribute("data-i", str(WORST["position"]))
    strip.locator("select").select_option("delta")
    colour = "31, 95, 168" if WORST["delta"] < 0 else "201, 106, 18"
    expect(marked).to_have_css("background-color", re.compile(rf"rgba?\({colour}"))


def test_tokens_are_walked_and_found_by_keyboard(token_page: NotebookPage) -> None:
    strip = token_page.view("strip = look(TokenStrip", "TokenStrip")
    strip.focus()
    at, sampled = WORST["position"], RECORDED.tokens(WORST["rollout_id"])["sampled"].to_list()
    changes = [i for i in range(1, len(sampled)) if sampled[i] != sampled[i - 1]]
    before = max(i for i in changes if i < at + 1)
    after = min(i for i in changes if i > before)
    for key, position in (("ArrowRight", at + 1), ("[", before), ("]", after), ("[", before)):
        strip.press(key)
        expect(strip.locator(".wb-t.at")).to_have_attribute("data-i", str(position))
    strip.press("/")
    search, word = strip.locator("input"), word_that_occurs_once(WORST["rollout_id"])
    search.fill(word)
    search.press("Enter")
    expect(strip.locator(".wb-t.found")).to_contain_text(word)
    expect(strip.locator(".wb-note")).to_contain_text("1 of 1 found")
    search.press("Escape")


def test_calls_are_walked_in_a_row_of_several(chain_page: NotebookPage) -> None:
    strip = chain_page.view("look(TokenStrip, campaign, rollout_id)", "TokenStrip")
    strip.focus()
    first, second, third, *_ = starts_of_calls(CHAIN.rollout_id)
    for key, position in (("n", second), ("n", third), ("p", second), ("p", first)):
        strip.press(key)
        expect(strip.locator(".wb-t.at")).to_have_attribute("data-i", str(position))


# -- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", THEMES)
def test_it_can_be_read_in_light_and_dark(
    chain_page: NotebookPage, token_page: NotebookPage, screenshots: Path, theme: str
) -> None:
    views = (
        (chain_page, "chain = look(PrefixChain", "PrefixChain", "chain"),
        (chain_page, "look(PrefixChain, campaign, rejected[0])", "PrefixChain", "rejected"),
        (token_page, "strip = look(TokenStrip", "TokenStrip", "strip"),
    )
    for page in (chain_page, token_page):
        page.theme(THEMES[theme])
    for page, source, name, picture in views:
        view = page.view(source, name)
        for part in (".wb-title", ".wb-detail", ".wb-legend", ".wb-card .wb-name", ".wb-t.s"):
            if view.locator(part).count():
                assert contrast(view.locator(part).first) >= 4.5, f"{part} of the {picture} in {theme}"
        page.save(page.cell(source), screenshots / f"{picture}-{theme}.png")
    chain_page.page.screenshot(path=screenshots / f"lab-{theme}.png")


def test_nothing_was_thrown_on_the_way(chain_page: NotebookPage, token_page: NotebookPage) -> None:
    for page in (chain_page, token_page):
        assert page.errors == []
        for alert in page.page.locator(".wb-error").all():
            expect(alert).to_be_hidden()
