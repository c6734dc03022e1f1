"""A JupyterLab on the shipped notebooks and a Chromium to look at it with, one of each a session.

The lab is the real one with a configuration of its own; the notebooks are a copy, so that nothing that is clicked
reaches the sources. Pictures of what was seen go to $WORKBENCH_SCREENSHOTS, else to `.pytest_cache/screenshots`.
A machine without a Chromium fails these tests and says how to get one; it never skips them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser_tool import ROOT, chromium_tool
from playwright.sync_api import Browser, expect, sync_playwright

from workbench.places import shipped

START_TIMEOUT_S = 60.0
# Choosing something may ask the kernel, and a shared machine takes its time; what is right is seen as soon as it is.
expect.set_options(timeout=20_000)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium that runs."""
    tool = chromium_tool()
    path = tool.find()
    if path is None:
        pytest.fail(f"These tests need a browser: {tool.ADVICE}", pytrace=False)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    # A module's and not the session's: as long as Playwright is open its loop counts as running in this thread, and
    # no test that is a coroutine could run beside it.
    with sync_playwright() as playwright:
        # Without a sandbox, because tests are often root in a container; what is opened is our own.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    folder = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or ROOT / ".pytest_cache" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    url: str
    token: str

    def notebook(self, name: str) -> str:
        """Address under which the lab opens a notebook."""
        return f"{self.url}/lab/tree/notebooks/{name}?token={self.token}&reset"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(shipped("notebooks"), home / "root" / "notebooks", ignore=shutil.ignore_patterns(".*"))
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')  # or it asks, in front of what is to be seen
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16))
    folders = ("CONFIG", "DATA", "RUNTIME")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in folders},
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_TOKEN": lab.token,  # not on the command line, where everybody can read it
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    # As for somebody who has set nothing: live, and a snapshot under it.
    environment.pop("WORKBENCH_DISPLAY", None)
    log = home / "lab.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", f"--notebook-dir={home / 'root'}", "--no-browser", "--allow-root",
             "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(lab, process, log)
        yield lab
    finally:
        process.send_signal(signal.SIGTERM)  # the lab ends its kernels
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)


def _wait_for(lab: Lab, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    request = urllib.request.Request(f"{lab.url}/api/status", headers={"Authorization": f"token {lab.token}"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, f"the lab ended at once:\n{log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"no lab within {START_TIMEOUT_S} s:\n{log.read_text()[-2000:]}"
            time.sleep(0.1)
