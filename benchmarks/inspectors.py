"""How fast and how small the inspectors are at full size: 131,072 tokens, 500 calls, trees of 10,000 calls.

    python benchmarks/inspectors.py [--browser /usr/bin/chromium]            from the repository's root

Times are of this process's CPU, the best of five. With a browser also the first paint: from the view having its data to
its being on the screen, the best of three. Sizes are what goes to the browser, or into the notebook for a snapshot.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import large

from workbench.inspect import PrefixChain, RowDiff, TokenStrip


def best(make: Callable[[], Any], tries: int = 5) -> tuple[float, Any]:
    """Milliseconds of CPU of the quickest of `tries` calls, and what the last one gave."""
    quickest, made = float("inf"), None
    for _ in range(tries):
        began = time.process_time()
        made = make()
        quickest = min(quickest, time.process_time() - began)
    return quickest * 1_000, made


def live(view: Any) -> Any:
    """The view's live form, made anew."""
    return type(view.live).of(view)


def live_tree(chain: PrefixChain) -> Any:
    """The live form of a chain's tree, without the strip below it."""
    return type(chain.live.chain).of(chain)


def report(what: str, ms: float, size: int | None = None) -> None:
    """One line of the table."""
    print(f"{what:<58} {ms:>8.0f} ms" + ("" if size is None else f" {size / 1_000:>9,.0f} kB"))


def paint(path: str) -> None:
    """First paints in the browser at `path`."""
    from mounted import mount, nodes
    from playwright.sync_api import sync_playwright

    one = large.row(50_000, 200)
    vocabulary = large.vocabulary()
    views = {
        "TokenStrip, 100,000 tokens": TokenStrip(large.row(100_000, 300), vocabulary=vocabulary).live,
        "TokenStrip, 131,072 tokens, 500 calls": TokenStrip(large.row(131_072, 500), vocabulary=vocabulary).live,
        "PrefixChain, 10,000 calls (bush)": PrefixChain(large.tree(10_000, "bush")).live.chain,
        "RowDiff, 50,000 against 50,000": RowDiff(one, large.edited(one, every=100), vocabulary=vocabulary).live,
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, widget in views.items():
            painted = [mount(browser, widget) for _ in range(3)]
            print(f"{name:<58} {min(ms for _, ms in painted):>8.0f} ms {nodes(painted[-1][0]):>9,} nodes, first paint")
        browser.close()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--browser", help="a Chromium, for the first paint")
    path = options.parse_args().browser
    vocabulary = large.vocabulary()
    for tokens, calls in ((100_000, 300), (131_072, 500)):
        frame = large.row(tokens, calls)
        ms, strip = best(partial(TokenStrip, frame, vocabulary=vocabulary))
        packed, widget = best(partial(live, strip))
        report(f"TokenStrip, {tokens:,} tokens, {calls} calls: live view", ms + packed, len(widget.block))
        ms, shot = best(strip.snapshot, tries=1)
        report(f"TokenStrip, {tokens:,} tokens, {calls} calls: snapshot", ms, len(shot.html) + len(shot.png or b""))
    for shape in ("chain", "star", "bush"):
        calls_frame = large.tree(10_000, shape)
        ms, chain = best(partial(PrefixChain, calls_frame))
        report(f"PrefixChain, 10,000 calls ({shape}): build", ms)
        ms, widget = best(partial(live_tree, chain))
        report(f"PrefixChain, 10,000 calls ({shape}): live view", ms, len(widget.block))
        ms, shot = best(chain.snapshot, tries=1)
        report(f"PrefixChain, 10,000 calls ({shape}): snapshot", ms, len(shot.html) + len(shot.png or b""))
    one = large.row(50_000, 200)
    for name, other in (
        ("1 % edited", large.edited(one, every=100)),
        ("10 % edited", large.edited(one, every=10)),
        ("unrelated", large.row(50_000, 200, seed=9)),
    ):
        ms, diff = best(partial(RowDiff, one, other, vocabulary=vocabulary), tries=3)
        packed, widget = best(partial(live, diff), tries=3)
        size = len(widget.one) + len(widget.other) + len(widget.block)
        report(f"RowDiff, 50,000 against 50,000 tokens, {name}", ms + packed, size)
    if path:
        paint(path)


if __name__ == "__main__":
    main()
