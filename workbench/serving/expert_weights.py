"""Expert weights: the experts of a mixture, renewed whole and proved on a CPU, where the engine holds them packed.

    let_go_of_kernels ─▶ vLLM's own reload, which then packs them as at the start ─▶ compare_experts_with_file
vLLM packs the experts' matrices for its kernel when it builds that kernel. A reload keeps the kernel, copies the new
weights over the packed ones and does not pack them: the kernel then reads plain weights as packed ones, and the engine
samples from noise without a word. Without a kernel the reload does what the start did.
A packed tensor cannot be read back, so the proof packs what the file holds and compares.
Not here: all other weights (`weights`), which experts a token goes to (`expert_routes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import WeightSyncError

_EXPERT = re.compile(r"^(?P<block>.*?\blayers\.\d+\.)(?:.*\.)?experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight$")
_BLOCK = re.compile(r"^(.*?\blayers\.\d+\.)")
# An expert's matrices by the names that files give them: Qwen-MoE, OLMoE and DeepSeek, Mixtral.
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def let_go_of_kernels(model: Any) -> int:
    """Have the next reload build the kernels of packed experts anew. Returns how many there are."""
    layers = list(_packed_layers(model))
    for _, layer in layers:
        layer.quant_method.moe_kernel = None
    return len(layers)


def compare_experts_with_file(model: Any, folder: Path) -> int:
    """How many expert matrices of the safetensors folder the engine's packed ones were packed from, to the bit.

    Those of layers that are sharded are left out. Raises `WeightSyncError` for a matrix that is another, and for packed
    experts of which the file has none under a name that is known here.
    """
    layers = list(_packed_layers(model))
    if not layers:
        return 0
    held = _in_file(folder)
    compared = 0
    for name, layer in layers:
        block = _BLOCK.match(name)
        matrices = held.get(block[1] if block else "", {})
        if not matrices:
            raise WeightSyncError(f"{name}: {folder} names no experts of this layer, so it cannot be proved")
        compared += _compare(name, layer, matrices)
    return compared


def _packed_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if hasattr(getattr(kernel, "fused_experts", None), "isa") and hasattr(module, "w13_weight"):
            yield name, module


def _in_file(folder: Path) -> dict[str, dict[tuple[str, int], tuple[Path, str]]]:
    """Where the matrices of each layer's experts lie: by the layer's name, by (part, expert)."""
    from safetensors import safe_open

    found: dict[str, dict[tuple[str, int], tuple[Path, str]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - not a mapping
                match = _EXPERT.match(key)
                if match and match["part"] in _PARTS:
                    place = _PARTS[match["part"]], int(match["expert"])
                    found.setdefault(match["block"], {})[place] = file, key
    return found


def _compare(name: str, layer: Any, matrices: dict[tuple[str, int], tuple[Path, str]]) -> int:
    import torch

    experts, rows, _ = layer.w13_weight.shape
    half = rows // 2  # gate above up, each padded to the kernel's width
    up_and_gate, down = torch.zeros_like(layer.w13_weight), torch.zeros_like(layer.w2_weight)
    for (part, expert), (file, key) in matrices.items():
        matrix = _read(file, key).to(down.dtype)
        target = down if part == "down" else up_and_gate[:, half:] if part == "up" else up_and_gate[:, :half]
        if expert >= experts or any(mine < theirs for mine, theirs in zip(target.shape[1:], matrix.shape, strict=True)):
            return 0  # this process holds a share of them
        target[expert, : matrix.shape[0], : matrix.shape[1]] = matrix
    for held, filed in ((layer.w13_weight, up_and_gate), (layer.w2_weight, down)):
        if not torch.equal(held, _packed(layer, filed)):
            raise WeightSyncError(f"{name}: its packed experts are not packed from what the file holds")
    return len(matrices)


def _read(file: Path, key: str) -> Any:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        return stored.get_tensor(key)


def _packed(layer: Any, weight: Any) -> Any:
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts = layer.quant_method.moe_kernel.fused_experts
    return weight if getattr(experts, "_use_zentorch", False) else cpu_prepack_moe_weight(weight, experts.isa)
