"""Chromium: find a browser for the tests of the notebooks, get one where that is possible, or say how.

    .venv/bin/python tools/chromium.py        prints its path; exit code 2 and one line on stderr where there is none
    .venv/bin/python tools/chromium.py --find the same, and gets none where there is none

In order: $WORKBENCH_CHROMIUM → one on the PATH → Playwright's own → apt-get (root, Debian) → Playwright's download.
A browser counts when it answers `--version`: on some systems the name is only a hint to a shop. Nothing is done where
one is found, so calling this before every test run costs a moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
INSTALL_TIMEOUT_S = 240
ADVICE = (
    "no Chromium was found and none could be installed here. On Debian: apt-get install chromium; elsewhere: "
    ".venv/bin/python -m playwright install --with-deps chromium; or name one: WORKBENCH_CHROMIUM=/path/to/chromium"
)


def find() -> str | None:
    """Path of a Chromium that runs, or None."""
    return next((path for path in _candidates() if _runs(path)), None)


def get() -> str | None:
    """`find`, and where that finds nothing install one, then look again."""
    found = find()
    for install in () if found else (_with_apt, _with_playwright):
        if install():
            found = find()
        if found:
            break
    return found


def _candidates() -> Iterator[str]:
    named = os.environ.get("WORKBENCH_CHROMIUM")
    if named:
        yield named
        return  # whoever names one means that one
    yield from filter(None, map(shutil.which, NAMES))
    own = _of_playwright()
    if own:
        yield own


def _of_playwright() -> str | None:
    """Where Playwright keeps the Chromium that it downloads, whether or not it has."""
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            return playwright.chromium.executable_path
    except Exception:  # not installed, or it does not run on this machine: then it has no browser for us either
        return None


def _runs(path: str) -> bool:
    try:
        told = subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return told.returncode == 0 and b"hrom" in told.stdout


def _with_apt() -> bool:
    if os.geteuid() != 0 or shutil.which("apt-get") is None or os.environ.get("WORKBENCH_CHROMIUM"):
        return False
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    return _done("apt-get install chromium", ["apt-get", "update", "-q"], quiet) and _done("", install, quiet)


def _with_playwright() -> bool:
    if os.environ.get("WORKBENCH_CHROMIUM"):
        return False
    return _done("playwright install chromium", [sys.executable, "-m", "playwright", "install", "chromium"], None)


def _done(what: str, command: list[str], environment: dict[str, str] | None) -> bool:
    if what:
        print(f"chromium: none here yet; {what}", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"chromium: {error}", file=sys.stderr)
        return False
    if ended.returncode != 0:
        last = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
        print(f"chromium: {' '.join(command[:3])} failed: {''.join(last)}", file=sys.stderr)
    return ended.returncode == 0


def main(look: Callable[[], str | None] = get) -> int:
    path = look()
    if path is None:
        print(f"chromium: {ADVICE}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(find if "--find" in sys.argv[1:] else get))
