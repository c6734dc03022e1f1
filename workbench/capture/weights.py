"""Weights: what runs inside the engine's own processes, to load new weights whole and to end when the server ends.

vLLM mixes `EngineSide` into its worker class and calls it by name (`collective_rpc`). Two things need code there:
- Reloading. On a CPU vLLM keeps packed copies of weight matrices. Its own reload renews those of linear layers but,
  with tied embeddings, not the output head's, and the engine then samples from a mixed model without a word. So every
  embedding that has a packed copy is packed again from its new weight.
- Dying. The engine's processes watch the server's; when that is gone, killed too, they end within a second.
Invariant: return values are plain numbers and strings; anything else would stop vLLM's message thread.
Not here: pausing generation, the prefix cache, version numbers (worker).
"""

from __future__ import annotations

import os
import threading
import time

PARENT_POLL_S = 0.5


class EngineSide:
    """Mixed into vLLM's worker, which provides `reload_weights` and `model_runner`."""

    def workbench_reload(self, path: str, repack: bool = True) -> dict[str, float]:
        """Load the safetensors folder `path` in place. Returns seconds and the number of packed copies renewed.

        `repack=False` is what vLLM does alone; it is there so that a test can show the difference.
        """
        began = time.perf_counter()
        self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        loaded = time.perf_counter()
        repacked = _repack_embeddings(self.model_runner.get_model()) if repack else 0  # type: ignore[attr-defined]
        return {"load_s": loaded - began, "repack_s": time.perf_counter() - loaded, "repacked": float(repacked)}

    def workbench_die_with(self, server_pid: int) -> int:
        """Start watching the server process; returns this process's id."""
        import psutil

        server = psutil.Process(server_pid)
        # With its own process for the model, vLLM's engine core sits between the server and this worker.
        core = psutil.Process(os.getppid()) if os.getppid() != server_pid and os.getpid() != server_pid else None
        watch = threading.Thread(target=_end_after, args=(server, core), name="workbench-parent-watch", daemon=True)
        watch.start()
        return os.getpid()


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


def _end_after(server: object, core: object | None) -> None:
    import psutil

    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:  # type: ignore[attr-defined]
        time.sleep(PARENT_POLL_S)
    if core is not None and core.is_running():  # type: ignore[attr-defined]
        core.kill()  # type: ignore[attr-defined]
    os._exit(1)
