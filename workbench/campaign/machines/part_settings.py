"""Part settings: what a recipe means for each actor of a campaign, as the fields of its own settings class.

In: a recipe, where the model and the run lie. Out: JSON-ready mappings. Not here: starting the actors (fleet).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.campaign.machines import derived
from workbench.config import Recipe
from workbench.serving.door import OF_ITS_NODE
from workbench.serving.sampling import SamplingPins


def worker_config(recipe: Recipe, model_path: Path, number: int) -> dict[str, Any]:
    """Settings of policy worker `number`, the fields of `serving.settings.WorkerConfig`."""
    return {
        "host": "127.0.0.1" if recipe.ray.address == "local" else OF_ITS_NODE,
        "tensor_parallel": recipe.engine.tensor_parallel,
        "enforce_eager": recipe.engine.enforce_eager,
        "model_path": str(model_path),
        "dtype": recipe.model.dtype,
        "max_model_len": recipe.model.max_model_len,
        "tool_call_parser": recipe.model.tool_call_parser,
        "reasoning_parser": recipe.model.reasoning_parser,
        "max_num_seqs": recipe.engine.max_num_seqs,
        "kv_cache_gib": recipe.engine.kv_cache_gib,
        "threads": recipe.engine.threads,
        "port": recipe.engine.port,
        "sampling": SamplingPins.of(recipe.sampling, recipe.seed).model_dump(),
        "sink_timeout_s": recipe.token_capture.sink_timeout_s,
        "cache_bytes": recipe.token_capture.cache_bytes,
        "capture_enabled": recipe.token_capture.enabled,
        "capture_routes": recipe.token_capture.routes,
        # Of its own: two engines with one seed would give two siblings of a group the same answer.
        "seed": (recipe.seed + number) % 2**31,
        "engine": recipe.engine.kind,
        "script_path": recipe.engine.script_path,
        "start_timeout_s": recipe.engine.start_timeout_s,
        "quiet_timeout_s": recipe.train.sync_timeout_s,
    }


def trainer_config(recipe: Recipe, model_path: Path, run_dir: Path) -> dict[str, Any]:
    """Settings of the trainer, the fields of `train.settings.TrainerConfig`."""
    train = recipe.train.model_dump(
        include={
            "learning_rate", "weight_decay", "max_grad_norm", "micro_batch_tokens", "threads", "dtype",
            "advantage", "clip_low", "clip_high",
        }
    )  # fmt: skip
    loss, off_policy = recipe.train.loss, recipe.train.off_policy
    return train | {
        **loss.model_dump(),
        "constant_tokens": derived.constant_tokens(recipe),
        "kl_coef": recipe.train.kl.coefficient,
        "kl_estimator": recipe.train.kl.estimator,
        "off_policy": off_policy.policy,
        "router_replay": recipe.train.router_replay.mode,
        "max_lag": derived.max_lag(recipe),
        "model_path": str(model_path),
        "run_dir": str(run_dir),
        "device": recipe.ray.device,
        "publish_dtype": recipe.model.dtype,
        "temperature": recipe.sampling.temperature,
        "seed": recipe.seed,
    }
