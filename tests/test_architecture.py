"""The rooms' directions: what `[tool.importlinter]` in pyproject.toml says of imports is so."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_rooms_import_one_way_and_never_in_a_circle(tmp_path):
    # In a process of its own: it switches off every logger that exists.
    lint = f"import sys; from importlinter import cli; sys.exit(cli.lint_imports(cache_dir={str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_reader_finds_every_room_in_the_guide_in_the_order_of_its_imports():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = re.findall(r"^\| `([a-z]+)/` \|", guide, re.M)
    inside = [path for path in (ROOT / "workbench").iterdir() if path.name[0] not in "_."]
    assert sorted(rooms) == sorted(path.name for path in inside if path.is_dir())
    (layers,) = (c for c in _contracts() if c["type"] == "layers")
    order = [name for layer in layers["layers"] for name in re.split(r" *[|:] *", layer)]
    assert rooms == [name for name in order if name in rooms]
    for path in inside:
        assert f"`{path.stem}" in guide, path.name


def test_contracts_name_rooms_that_exist():
    for contract in _contracts():
        for name in (*contract.get("source_modules", ()), *contract.get("forbidden_modules", ())):
            assert (ROOT / name.replace(".", "/")).is_dir() or (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


def _contracts():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
