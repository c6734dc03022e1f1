"""Browser tool: `tools/chromium.py`, which is no part of the package, as a module for these tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def chromium_tool() -> ModuleType:
    """The module, loaded anew."""
    spec = importlib.util.spec_from_file_location("chromium", ROOT / "tools" / "chromium.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
