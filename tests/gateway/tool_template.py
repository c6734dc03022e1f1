"""A model folder whose chat template renders tools and tool calls."""

from __future__ import annotations

import json
from pathlib import Path

from capture.templates import QWEN

from workbench import models


def with_tool_template(folder: Path) -> Path:
    """The tiny model's tokenizer with a template that renders tool calls."""
    folder.mkdir()
    for path in Path(models.build("tiny")).iterdir():
        if "token" in path.name or path.name == "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": QWEN}))
    return folder
