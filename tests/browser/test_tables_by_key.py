"""The views made of tables and curves, by keyboard: causes, differences, two rollouts; and nothing that is cut off."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import polars as pl
import pytest
from mounted import error, mount
from playwright.sync_api import Browser, Page, expect

from workbench import runs
from workbench.demo import recorded_run
from workbench.inspect import CampaignBoard, LogprobDelta, PoisonTable, RowDiff

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
_CUT = """() => [...document.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
}).map((text) => text.textContent)"""


@pytest.fixture(scope="module")
def run() -> runs.Run:
    return runs.open(recorded_run())


def sent(page: Page) -> list:
    return [message for message in page.evaluate("window.sent") if isinstance(message, list)]


def test_the_worst_tokens_are_walked_and_turned_and_the_labels_are_whole(browser: Browser, run: runs.Run) -> None:
    delta = LogprobDelta(run)
    page, _ = mount(browser, delta.live.delta)
    view = page.locator("[data-wb='LogprobDelta']")
    note = view.locator(".wb-note", has_text="showing")
    expect(note).to_have_text(f"showing 1 to 10 of {run.logprobs().height}; 300 of them are at hand")
    first = delta.worst(1)[0]
    expect(view.locator("tbody tr").first).to_contain_text(first["before"].strip())
    view.focus()
    for key in "jdk":
        view.press(key)
    assert sent(page)[-3:] == [["chosen", 0], ["chosen", 1], ["chosen", 0]]
    view.press("n")
    expect(note).to_contain_text("showing 11 to 20")
    view.press("]")
    expect(view.locator("select")).to_have_value("1")
    assert page.evaluate(_CUT) == [] and error(page) == ""
    page.close()


def test_a_difference_that_is_no_number_is_in_front_and_breaks_nothing(browser: Browser, run: runs.Run) -> None:
    frame = run.logprobs()
    bad = pl.when(pl.int_range(pl.len()) == 7).then(float("nan"))
    wrong = frame.with_columns(
        *(bad.otherwise(pl.col(name)).cast(pl.Float32).alias(name) for name in ("trainer_logprob", "delta"))
    )
    page, _ = mount(browser, LogprobDelta(wrong).live.delta)
    view = page.locator("[data-wb='LogprobDelta']")
    expect(view.locator(".wb-title").first).to_contain_text("1 more NOT FINITE")
    expect(view.locator("tbody tr").first).to_contain_text("–")
    assert "NaN" not in (view.text_content() or "") and error(page) == ""
    page.close()


def test_causes_rejected_rollouts_and_lost_calls_are_walked(browser: Browser, run: runs.Run) -> None:
    table = PoisonTable(run)
    page, _ = mount(browser, table.live.causes)
    view = page.locator("[data-wb='PoisonTable']")
    view.focus()
    for key in "nnp":
        view.press(key)
    rejected = table.rejected["rollout_id"].to_list()
    assert [value for name, value in sent(page) if name == "chosen"] == [rejected[0], rejected[1], rejected[0]]
    for key in "j]d":
        view.press(key)
        assert view.locator("tr.at").count() >= 1
    view.press("/")
    search = view.locator("input")
    expect(search).to_be_focused()
    search.fill("no such rollout")
    expect(view.locator(".wb-table", has_text="nearest call").locator("tbody tr")).to_have_count(0)
    assert error(page) == ""
    page.close()


def test_requests_that_were_refused_stand_under_the_causes(browser: Browser, tmp_path: Path) -> None:
    stored = Path(shutil.copytree(recorded_run(), tmp_path / "run"))
    line = {"rollout_id": "demo.0.0.0", "status": 400, "code": "not_capturable", "message": "n must be 1"}
    (stored / "refused.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    page, _ = mount(browser, PoisonTable(runs.open(stored)).live.causes)
    view = page.locator("[data-wb='PoisonTable']")
    expect(view.locator(".wb-title", has_text="Requests that the gateway refused")).to_contain_text("1 in 1 rollout")
    told = view.locator(".wb-table", has_text="refused as").locator("tbody tr")
    for words in ("400 not_capturable", "demo.0.0.0", "n must be 1"):
        expect(told).to_contain_text(words)
    assert error(page) == ""
    page.close()


def test_two_rollouts_are_walked_together(browser: Browser, run: runs.Run) -> None:
    diff = RowDiff(run, run)
    page, _ = mount(browser, diff.live)
    view = page.locator("[data-wb='RowDiff']")
    view.focus()
    for key, position in (("k", 51), ("d", diff.first)):
        view.press(key)
        marked = view.locator(".wb-t.at")
        expect(marked).to_have_count(2)
        assert [marked.nth(side).get_attribute("data-i") for side in (0, 1)] == [str(position)] * 2
    assert error(page) == ""
    page.close()


def test_no_label_of_the_board_is_cut(browser: Browser, run: runs.Run) -> None:
    page, _ = mount(browser, CampaignBoard(run).live)
    assert page.evaluate(_CUT) == [] and error(page) == ""
    page.close()


def test_the_board_of_a_served_run_has_its_calls_and_no_curves(browser: Browser, tmp_path: Path) -> None:
    served = shutil.copytree(recorded_run(), tmp_path / "served")
    (served / "steps.jsonl").write_bytes(b"")
    shutil.rmtree(served / "train")
    (served / "status.json").write_text('{"status": "done", "command": "serve", "run": "served"}')
    page, _ = mount(browser, CampaignBoard(runs.open(served)).live)
    view = page.locator("[data-wb='CampaignBoard']")
    expect(view.locator("tr", has_text="captured, token_in")).to_be_visible()
    expect(view.get_by_text("the run is done; this is its last frame")).to_be_visible()
    expect(view.get_by_text("no optimiser step")).to_have_count(0)
    assert "step" not in view.inner_text() and error(page) == ""
    page.close()
