"""The rooms' directions: what `[tool.importlinter]` in pyproject.toml says of imports is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_rooms_import_one_way_and_never_in_a_circle(tmp_path):
    # In a process of its own: it switches off every logger that exists.
    lint = f"import sys; from importlinter import cli; sys.exit(cli.lint_imports(cache_dir={str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
