"""Checkpoint: all that a trainer needs to go on as if it had never stopped, as one folder that is whole or absent.

    checkpoints/step-<n>/model/                Hugging Face folder in float32: opens in transformers and in vLLM
                         trainer.safetensors   `<parameter>.<name>` of the optimiser's state, `generator.<device>`
                         manifest.json         step, and size and SHA-256 of every other file

Written beside, fsynced and renamed; the last `keep` stay. A checkpoint whose files are not those of its manifest is not
used: an older one does as well, because the steps after it can be taken again from their stored rows (restore).
Not the folders in `weights/`, although they are written anyhow: those are in the engine's number type, and a learning
rate of 1e-5 moves most weights by less than one bfloat16 step, so going on from them would undo what was learned.
Not here: hyperparameters (they are the recipe's), which steps were taken (their parts in `train/` say so).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.errors import TrainerError
from workbench.train.publish import whole_folder, write_model

LAYOUT = 1
_MODEL = "model/model.safetensors"
_TRAINER = "trainer.safetensors"
_MANIFEST = "manifest.json"
_GENERATOR = "generator."


@dataclass(frozen=True)
class Checkpoint:
    """What was read: float32 weights by parameter name, optimiser state by parameter name, generators by device."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]]
    generators: dict[str, torch.Tensor]


def save(
    directory: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Mapping[str, torch.Tensor]],
    generators: Mapping[str, torch.Tensor],
    *,
    source: Path,
    keep: int,
) -> Path:
    """Write `directory`/step-<step> and return it; of lower steps all but the last `keep` − 1 are removed.

    `weights` are float32 by parameter name, a tied one once; `source` is the model folder they started from.
    Raises DiskFull where there is no room.
    """
    target = _folder(directory, step)
    state = {f"{name}.{key}": value for name, values in optimizer.items() for key, value in values.items()}
    state |= {f"{_GENERATOR}{device}": value for device, value in generators.items()}
    with whole_folder(target, sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))) as draft:
        (draft / "model").mkdir()
        write_model(draft / "model", weights, source, torch.float32)
        save_file({name: value.contiguous() for name, value in state.items()}, draft / _TRAINER)
        files = {str(path.relative_to(draft)): _fingerprint(path) for path in _files(draft)}
        manifest = {"layout": LAYOUT, "step": step, "files": files}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    for old in steps(directory)[:-keep]:
        shutil.rmtree(_folder(directory, old), ignore_errors=True)
    for left in directory.glob(".step-*"):  # of a process that was killed; there is one writer
        shutil.rmtree(left, ignore_errors=True)
    return target


def steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint, in order."""
    found = (re.fullmatch(r"step-(\d+)", item.name) for item in directory.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def load(directory: Path, step: int) -> Checkpoint:
    """Read `directory`/step-<step>. Raises TrainerError naming the file that is missing, changed or unreadable."""
    folder = _folder(directory, step)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if (manifest["layout"], manifest["step"]) != (LAYOUT, step):
            raise TrainerError(
                f"{folder / _MANIFEST}: expected layout {LAYOUT} and step {step}, got {manifest['layout']} and "
                f"{manifest['step']}."
            )
        for name in sorted({_MODEL, _TRAINER} | set(manifest["files"])):
            if _fingerprint(folder / name) != manifest["files"].get(name):
                raise TrainerError(f"{folder / name} is not what was written: its size or SHA-256 differs.")
        weights, state = load_file(folder / _MODEL), load_file(folder / _TRAINER)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise TrainerError(f"Checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        parameter, _, key = name.rpartition(".")
        if not name.startswith(_GENERATOR):
            optimizer.setdefault(parameter, {})[key] = value
    generators = {n.removeprefix(_GENERATOR): value for n, value in state.items() if n.startswith(_GENERATOR)}
    return Checkpoint(step, weights, optimizer, generators)


def optimizer_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimiser's state by parameter name; `names` are those of its parameters, in order. Not copies."""
    state = optimizer.state_dict()["state"]
    return {names[place]: dict(values) for place, values in state.items()}


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], state: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Put a state back; settings such as the learning rate stay as the optimiser has them."""
    held: dict[str, Any] = optimizer.state_dict()
    held["state"] = {place: dict(state[name]) for place, name in enumerate(names) if name in state}
    optimizer.load_state_dict(held)


def load_weights(into: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], origin: Path) -> None:
    """Copy `weights` into the tensors of the same names. Raises TrainerError, having changed none, unless all fit."""
    wrong = sorted(n for n in into.keys() | weights.keys() if n not in into or n not in weights)
    wrong += [name for name in into if name in weights and into[name].shape != weights[name].shape]
    if wrong:
        raise TrainerError(
            f"{origin} is of another model: {len(wrong)} of {len(into)} weights are missing, unknown or of another "
            f"shape, first {wrong[0]}."
        )
    with torch.no_grad():
        for name, weight in into.items():
            weight.copy_(weights[name])


def generator_states() -> dict[str, torch.Tensor]:
    """States of torch's generators by device: `cpu`, and where CUDA is in use `cuda:<n>`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def load_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set torch's generators; those of devices that are not here are left out."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def _folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}
