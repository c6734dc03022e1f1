"""Notebook page: a notebook open in JupyterLab, used as a person uses it, with mouse, keyboard and menus."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

RUN_TIMEOUT_MS = 60_000
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"


class NotebookPage:
    """One notebook in one browser tab. `errors` gathers what the page's scripts threw."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.page: Page = browser.new_page(viewport={"width": 1360, "height": 1500})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.cells = self.page.locator(".jp-Notebook:visible .jp-Cell")
        expect(self.cells.first).to_be_visible(timeout=RUN_TIMEOUT_MS)
        expect(self.page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=RUN_TIMEOUT_MS)

    def menu(self, *path: str) -> None:
        """Click through the menus: `menu("Run", "Run All Cells")`."""
        first, *rest = path
        self.page.locator(".lm-MenuBar-itemLabel", has_text=first).first.click()
        for name in rest:
            item = self.page.locator(".lm-Menu-itemLabel").get_by_text(name, exact=True)
            item.hover()
            if name == rest[-1]:
                item.click()

    def run_all(self) -> None:
        """Run every cell and wait until the last one has its number; a cell that failed fails here."""
        self.menu("Run", "Run All Cells")
        code = self.page.locator(".jp-Notebook:visible .jp-CodeCell")
        prompts = code.locator(".jp-InputArea-prompt")
        count = code.count()
        expect(prompts.nth(count - 1)).to_have_text(f"[{count}]:", timeout=RUN_TIMEOUT_MS)
        expect(self.page.locator(".jp-OutputArea-output[data-mime-type*='error'], .jp-RenderedText .ansi-red-fg")
               ).to_have_count(0)  # fmt: skip

    def theme(self, name: str) -> None:
        """Choose a theme in the settings menu and wait until the page wears it."""
        self.menu("Settings", "Theme", name)
        light = "true" if name == LIGHT else "false"
        expect(self.page.locator(f"body[data-jp-theme-light='{light}'][data-jp-theme-name='{name}']")).to_be_attached()

    def cell(self, text: str) -> Locator:
        """The code cell whose source holds `text`."""
        return self.cells.filter(has=self.page.locator(".jp-InputArea-editor", has_text=text)).first

    def output(self, text: str) -> Locator:
        """The outputs of the code cell whose source holds `text`."""
        return self.cell(text).locator(".jp-OutputArea").first

    def view(self, source: str, name: str) -> Locator:
        """The live view `name` (PrefixChain, TokenStrip, …) in the output of that cell."""
        found = self.cell(source).locator(f"[data-wb='{name}']").first
        found.scroll_into_view_if_needed()
        expect(found).to_be_visible()
        return found

    def save(self, where: Locator, path: Path) -> None:
        """A picture of one part of the page."""
        where.scroll_into_view_if_needed()
        where.screenshot(path=path)


def contrast(where: Locator) -> float:
    """Contrast of a text with what lies behind it, 1 to 21 (formula: WCAG 2.1, relative luminance)."""
    front, back = where.evaluate(
        """node => {
            const behind = (n) => {
                for (; n; n = n.parentElement) {
                    const c = getComputedStyle(n).backgroundColor;
                    if (!/, 0\\)$/.test(c) && c !== "transparent" && !/, 0?\\.\\d+\\)$/.test(c)) return c;
                }
                return "rgb(255, 255, 255)";
            };
            return [getComputedStyle(node).color, behind(node)];
        }"""
    )
    one, other = sorted((_luminance(front), _luminance(back)), reverse=True)
    return (one + 0.05) / (other + 0.05)


def _luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
