"""BOS: the id that stands for a prompt where a group has none, read from the model's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import SetupError


def bos_of(model_path: Path) -> int:
    """BOS id of a Hugging Face model directory, else its EOS or padding id. Raises SetupError when it names none."""
    configs = [_read(model_path / name) for name in ("generation_config.json", "config.json")]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in configs:
            value = config.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
    raise SetupError(f"{model_path} names no BOS, EOS or padding token in config.json; expected a model directory")


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}. Next: fetch or build the model again.") from error
    return config if isinstance(config, dict) else {}
