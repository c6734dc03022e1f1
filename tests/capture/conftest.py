"""Fixtures of the capture room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from capture.templates import tokenizer


@pytest.fixture(scope="module")
def chatml_folder(tmp_path_factory: Any) -> Path:
    """A folder with a tokenizer and a chat template; a scripted engine needs no weights."""
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer("chatml").save_pretrained(folder)
    return folder
