"""Publish: the trainer's weights as a model folder that the engine loads.

    publish(weights, source, run_dir / "weights", version=3, dtype=torch.bfloat16) -> run_dir/weights/v3

Hugging Face layout: one safetensors file in the engine's dtype (a tied embedding once), the source's config with that
dtype, its tokenizer files and chat template. A folder is complete or absent (written beside, fsynced, renamed), and the
last `keep` stay: the engine may still be reading the one before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def publish(
    weights: Mapping[str, torch.Tensor],
    source: Path,
    directory: Path,
    version: int,
    dtype: torch.dtype,
    keep: int = 2,
) -> Path:
    """Write `directory`/v<version> and return it; lower versions beyond `keep` are removed. A repeat replaces.

    `weights` by name, a tied one once; `source` is the model folder that everything else is copied from.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"v{version}"
    draft = Path(tempfile.mkdtemp(prefix=f".v{version}-", dir=directory))
    try:
        for item in source.iterdir():
            if item.is_file() and item.suffix not in WEIGHT_SUFFIXES and not item.name.endswith(".index.json"):
                shutil.copy2(item, draft / item.name)
        config = json.loads((draft / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        stored = draft / "model.safetensors"
        save_file({name: weight.to(dtype).contiguous() for name, weight in weights.items()}, stored, {"format": "pt"})
        draft.chmod(0o755)
        stored.chmod(0o644)
        with stored.open("rb") as handle:
            os.fsync(handle.fileno())
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in published(directory)[:-keep]:
        shutil.rmtree(directory / f"v{old}", ignore_errors=True)
    return target


def published(directory: Path) -> list[int]:
    """Versions that are there, in order."""
    return sorted(int(match[1]) for item in directory.iterdir() if (match := re.fullmatch(r"v(\d+)", item.name)))
