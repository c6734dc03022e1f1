"""Settings: what a policy worker is told, each field with its meaning; the recipe's section `engine` fills most of it.

Not here: `WORKBENCH_WORKER_TOKEN`, which requests must carry and which comes from the environment alone (door).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.serving.sampling import SamplingPins


class WorkerConfig(BaseModel):
    """Settings of one policy worker."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_path: str
    """Hugging Face folder of the policy."""
    served_model_name: str = "policy"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: int = Field(default=1024, ge=16)
    """Context window in tokens."""
    max_num_seqs: int = Field(default=32, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    threads: int = Field(default=0, ge=0)
    """OpenMP threads of the engine; 0 means all processors that this process may use."""
    host: str = "127.0.0.1"
    """Address to listen on; `node` is the one that its node of the Ray cluster has for the others."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 lets the operating system choose."""
    tool_call_parser: str | None = None
    """Name of the engine's tool parser; None serves what the model says as text, unless a call was required."""
    reasoning_parser: str | None = None
    """Name of the engine's reasoning parser; None leaves reasoning in the text."""
    sampling: SamplingPins = Field(default_factory=SamplingPins)
    sink_timeout_s: float = Field(default=10.0, gt=0.0)
    cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for recent calls' cumulative ids; 0 reads every parent from the staging store."""
    capture_enabled: bool = True
    capture_routes: bool = False
    """Record the experts that each token went to. Refused at start for a model without experts."""
    seed: int = 0
    logprobs_mode: Literal["processed_logprobs"] = "processed_logprobs"
    """Log-probs of the distribution that was sampled from. Pinned: raw ones would be those of another policy."""
    engine: Literal["vllm", "scripted"] = "vllm"
    script_path: str | None = None
    """Script of the scripted engine: a JSONL path or `module:function`."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that the weights are split over."""
    start_timeout_s: float = Field(default=240.0, gt=0.0)
    quiet_timeout_s: float = Field(default=120.0, gt=0.0)
    """How long a weight update waits for running calls to end."""
    load_timeout_s: float = Field(default=120.0, gt=0.0)
    """How long the engine may take to load new weights."""
    enforce_eager: bool = True
    """Run without compiling the model; on a CPU compiling costs minutes and gains little."""
    engine_arguments: list[str] = Field(default_factory=list)
    """Further arguments of `vllm serve`, as on its command line."""
