"""What is proved on the weights after every load, on small modules of torch; the real engine is in test_engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import WeightSyncError
from workbench.serving.weights import _compare_packed_copies, _compare_with_file


class Packed(torch.nn.Module):
    """A linear layer that computes with a copy of its weight, as vLLM's do on a CPU."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns).to(torch.bfloat16), requires_grad=False)
        self.pack()

    def pack(self) -> None:
        copy = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"head": Packed(64, 16), "norm": torch.nn.LayerNorm(16), "emptied": Packed(8, 8)})


def test_a_packed_copy_of_an_older_weight_is_found() -> None:
    engine = model()
    engine["emptied"].weight.data = torch.empty(0)
    _compare_packed_copies(engine)
    # One bfloat16 step in one row of every column: what a small update leaves behind.
    engine["head"].weight.data[5] *= 1.01
    with pytest.raises(WeightSyncError, match="head: its packed copy differs"):
        _compare_packed_copies(engine)
    engine["head"].pack()
    _compare_packed_copies(engine)


def test_weights_that_the_engine_did_not_take_from_the_file_are_found(tmp_path: Path) -> None:
    engine = model()
    stored = {name: value.detach().float().clone() for name, value in engine.named_parameters()}
    stored["head.weight"] = stored["head.weight"][:32].clone()
    stored["norm.bias"] += 0.5
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightSyncError, match=r"norm\.bias is not what .*model\.safetensors holds"):
        _compare_with_file(engine, tmp_path)
    engine["norm"].bias.data += 0.5
    # head.weight has another shape there (a shard), and nothing can be said about it.
    assert _compare_with_file(engine, tmp_path) == 3
