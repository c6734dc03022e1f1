"""BOS: the id that stands for a prompt where a group has none, read from the model's own files."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.errors import SetupError


def bos_of(model_path: Path) -> int:
    """BOS id of a Hugging Face model directory, else its EOS or padding id. Raises SetupError when it names none."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((model_path / name).read_text())
        except FileNotFoundError:
            continue
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
    raise SetupError(f"{model_path} names no BOS, EOS or padding token in config.json; expected a model directory")
