"""Publish: the trainer's weights as a model folder that the engine loads.

    publish(weights, source, run_dir / "weights", version=3, dtype=torch.bfloat16) -> run_dir/weights/v3

Hugging Face layout: one safetensors file in the engine's dtype (a tied embedding once), the source's config with that
dtype, its tokenizer files and chat template. A folder is complete or absent (written beside, fsynced, renamed), and the
last `KEPT` stay: the engine may still be reading the one before.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workbench.full_disk import told_when_full
from workbench.runs.writer import sync_to_disk

KEPT = 2
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def publish(
    weights: Mapping[str, torch.Tensor],
    source: Path,
    directory: Path,
    version: int,
    dtype: torch.dtype,
) -> Path:
    """Write `directory`/v<version> and return it; lower versions beyond the last `KEPT` are removed. A repeat replaces.

    `weights` by name, a tied one once; `source` is the model folder that everything else is copied from.
    Raises DiskFull where there is no room.
    """
    target = directory / f"v{version}"
    with whole_folder(target, sum(weight.numel() for weight in weights.values()) * dtype.itemsize) as draft:
        write_model(draft, weights, source, dtype)
    for old in published(directory)[:-KEPT]:
        shutil.rmtree(directory / f"v{old}", ignore_errors=True)
    return target


def names_in_file(model: Any, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """`weights` under the names and in the shapes that a Hugging Face file of `model` has, where the model's differ:
    transformers holds the experts of a layer as one tensor, files and engines hold each by itself."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(weights))


def write_model(folder: Path, weights: Mapping[str, torch.Tensor], source: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder into `folder`, which exists. `weights` and `source` as in `publish`."""
    for item in source.iterdir():
        if item.is_file() and item.suffix not in WEIGHT_SUFFIXES and not item.name.endswith(".index.json"):
            shutil.copy2(item, folder / item.name)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = folder / "model.safetensors"
    save_file({name: weight.to(dtype).contiguous() for name, weight in weights.items()}, stored, {"format": "pt"})
    stored.chmod(0o644)


@contextlib.contextmanager
def whole_folder(target: Path, takes_bytes: int) -> Iterator[Path]:
    """Yield a draft folder that takes `target`'s place when the block ends, every file of it on the disk.

    A folder that was there before goes. When the block raises, `target` is as it was; a killed process leaves a draft,
    whose name begins with a dot. Of a full disk DiskFull says what was wanted (`takes_bytes`) and what is free.
    """
    with told_when_full(target, takes_bytes), _draft_of(target) as draft:
        yield draft


@contextlib.contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        for path in sorted(draft.rglob("*"), reverse=True):
            sync_to_disk(path)
        sync_to_disk(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
        sync_to_disk(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def published(directory: Path) -> list[int]:
    """Versions that are there, in order."""
    return sorted(int(match[1]) for item in directory.iterdir() if (match := re.fullmatch(r"v(\d+)", item.name)))
