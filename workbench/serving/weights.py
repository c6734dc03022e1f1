"""Weights: what runs inside the engine's own processes, to load new weights whole and to end when the server ends.

vLLM mixes `EngineSide` into its worker class and calls it by name (`collective_rpc`). Four things need code there:
- Reloading. On a CPU vLLM keeps packed copies of weight matrices. Its own reload renews those of linear layers but,
  with tied embeddings, not the output head's, and the engine then samples from a mixed model without a word. So every
  embedding that has a packed copy is packed again from its new weight, and so are the experts of a mixture
  (`expert_weights`).
- Proving. One optimiser step moves log-probs by less than a bfloat16 engine's rounding does, so no comparison of
  log-probs could tell that an engine kept its old weights. Weights can: what the engine shows under the file's own
  names must equal the file, and a packed copy must give back the weight that it was packed from.
- Dying. The engine's processes watch the server's; when that is gone, killed too, they end within a second.
- Recording the experts that tokens went to, where vLLM does not do it itself (`expert_routes`).
Invariant: return values are plain numbers, strings and bytes; anything else would stop vLLM's message thread.
Not here: pausing generation, the prefix cache, version numbers (worker).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import WeightSyncError

PARENT_POLL_S = 0.5
PACKED_COLUMNS = 4
"""Columns of each packed copy that are looked at: an optimiser step changes some row in every one of them."""


class EngineSide:
    """Mixed into vLLM's worker, which provides `reload_weights` and `model_runner`."""

    def workbench_reload(self, path: str, repack: bool = True) -> dict[str, float]:
        """Load the safetensors folder `path` in place. Returns seconds and the numbers of packed copies renewed and of
        weights compared with the file. Raises `WeightSyncError` where the engine holds others than the file's.

        `repack=False` is what vLLM does alone, unproved; it is there so that a test can show the difference.
        """
        from workbench.serving.expert_weights import compare_experts_with_file, let_go_of_kernels

        began = time.perf_counter()
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        repacked = let_go_of_kernels(model) if repack else 0
        self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        loaded = time.perf_counter()
        repacked += _repack_embeddings(model) if repack else 0
        packed = time.perf_counter()
        compared = _compare_with_file(model, Path(path)) + compare_experts_with_file(model, Path(path)) if repack else 0
        if repack:
            _compare_packed_copies(model)
        return {
            "load_s": loaded - began,
            "repack_s": packed - loaded,
            "compare_s": time.perf_counter() - packed,
            "repacked": float(repacked),
            "compared": float(compared),
        }

    def workbench_die_with(self, server_pid: int) -> int:
        """Start watching the server process; returns this process's id."""
        import psutil

        server = psutil.Process(server_pid)
        # With its own process for the model, vLLM's engine core sits between the server and this worker.
        core = psutil.Process(os.getppid()) if os.getppid() != server_pid and os.getpid() != server_pid else None
        watch = threading.Thread(target=_end_after, args=(server, core), name="workbench-parent-watch", daemon=True)
        watch.start()
        return os.getpid()

    def workbench_record_routes(self) -> dict[str, int]:
        """From now on write down the routes of every request. Raises ValueError for a model without experts."""
        from workbench.serving.expert_routes import RouteRecorder

        self._workbench_routes = RouteRecorder(self.model_runner)  # type: ignore[attr-defined]
        layers, topk = self._workbench_routes.shape
        return {"layers": layers, "topk": topk}

    def workbench_take_routes(self, request_id: str, start: int, end: int) -> dict[str, Any]:
        """Routes of input tokens [start, end) of a request that is over: dtype, shape and bytes; {} without them."""
        rows = self._workbench_routes.take(request_id, start, end)
        if rows is None:
            return {}
        return {"dtype": rows.dtype.name, "shape": list(rows.shape), "data": np.ascontiguousarray(rows).tobytes()}


def _repack_embeddings(model: object) -> int:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    repacked = 0
    for module in model.modules():  # type: ignore[attr-defined]
        # `cpu_linear` closes over the packed copy; it exists only on a CPU.
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            repacked += 1
    return repacked


def _compare_with_file(model: Any, folder: Path) -> int:
    """How many weights the engine holds under a name and shape of the file's; each must equal it in its own dtype.

    The others are fused, sharded or packed, and nothing is said about them here. Raises `WeightSyncError`.
    """
    import torch
    from safetensors import safe_open

    held = dict(model.named_parameters())
    compared = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                mine = held.get(name)
                if mine is None or list(mine.shape) != stored.get_slice(name).get_shape():
                    continue
                if not torch.equal(mine.detach().cpu(), stored.get_tensor(name).to(mine.dtype)):
                    raise WeightSyncError(f"{name} is not what {file} holds; the engine kept other weights")
                compared += 1
    return compared


def _compare_packed_copies(model: Any) -> None:
    """Every packed copy whose weight is still there must be a copy of that weight. Raises `WeightSyncError`."""
    import torch

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None or weight.dim() != 2 or not weight.numel():
            continue
        # A one-hot input gives back one column of the packed weight, to the bit in bfloat16.
        columns = torch.linspace(0, weight.shape[1] - 1, PACKED_COLUMNS).long()
        one_hot = torch.zeros(PACKED_COLUMNS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        one_hot[torch.arange(PACKED_COLUMNS), columns] = 1.0
        came, expected = module.cpu_linear(one_hot, weight, None).float(), weight[:, columns].t().float()
        # Less than a bfloat16 step, more than what a kernel may lose that multiplies float32 weights as bfloat16.
        if not torch.allclose(came, expected, rtol=0.003, atol=0.0):
            raise WeightSyncError(f"{name}: its packed copy differs from its weight; it was not packed again")


def _end_after(server: object, core: object | None) -> None:
    import psutil

    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:  # type: ignore[attr-defined]
        time.sleep(PARENT_POLL_S)
    if core is not None and core.is_running():  # type: ignore[attr-defined]
        core.kill()  # type: ignore[attr-defined]
    os._exit(1)
