"""vLLM runtime: start the engine and its serving app in this process, and score tokens on the engine.

    AsyncLLM (engine core in a child process) ◀── generate ── [CapturingEngine] ◀── vLLM's own serving app
Everything vLLM-specific about starting is here, so that the rest of capture imports without vLLM.
Not here: HTTP serving and the life of the worker (worker), what is recorded (engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from workbench.errors import CaptureError, SetupError
from workbench.part_logs import own_log

if TYPE_CHECKING:
    from workbench.serving.settings import WorkerConfig

ENGINE_SIDE = "workbench.serving.weights.EngineSide"
_SAID = 400
"""Characters of an engine's own words that stand in an error."""


def serving_arguments(config: WorkerConfig) -> dict[str, Any]:
    """The arguments of `vllm serve` that the worker's settings decide, by their names there. Needs no vLLM."""
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "served-model-name": config.served_model_name,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "kv-cache-memory-bytes": math.ceil(config.kv_cache_gib * 2**30),
        "seed": config.seed,
        "logprobs-mode": config.logprobs_mode,
        # Without it the model folder's generation_config.json would change the sampling behind the recipe's back.
        "generation-config": "vllm",
        "worker-extension-cls": ENGINE_SIDE,
        "tensor-parallel-size": config.tensor_parallel,
    }
    if config.tensor_parallel > 1:
        # Processes of this node: in a placement group of Ray's it would otherwise ask Ray for actors of its own.
        arguments["distributed-executor-backend"] = "mp"
    return arguments


def parse_serving_arguments(config: WorkerConfig) -> Any:
    """The namespace that vLLM's serving code expects, as `vllm serve` would have made it."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from workbench.serving import tools_as_text

    arguments = serving_arguments(config)
    line = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    line += ["--enforce-eager"] if config.enforce_eager else []
    line += ["--enable-return-routed-experts"] if config.capture_routes and not on_cpu() else []
    # A prompt that is computed in pieces makes vLLM set a seeded request's generator back, which no CPU generator can:
    # the engine dies of it.
    line += ["--no-enable-chunked-prefill"] if config.sampling.seed is not None and on_cpu() else []
    if on_cpu() and config.tensor_parallel == 1:
        # As vLLM does on a GPU. On a CPU it would start a second process, and the first would spin while that one
        # computes: 0.6 of a core. Named by its path, because the short name "uni" is replaced there.
        line += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    line += ["--disable-log-stats", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    parser = config.tool_call_parser or tools_as_text.register()
    line += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if config.reasoning_parser is not None:
        line += ["--reasoning-parser", config.reasoning_parser]
    try:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([*line, *config.engine_arguments])
        validate_parsed_serve_args(parsed)
    except (SystemExit, TypeError, ValueError) as error:
        raise SetupError(f"vLLM refuses the worker's settings: {error}") from error
    return parsed


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here; then it cannot return routes, and our own recorder does (`expert_routes`)."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def record_routes(engine: Any) -> None:
    """Have the engine write down routes from now on. Raises SetupError for a model without experts."""
    try:
        await engine.collective_rpc("workbench_record_routes")
    except Exception as error:
        raise SetupError(
            f"The engine cannot record routed experts: {error} Next: set token_capture.routes to false, or train a "
            "model with experts."
        ) from error


async def take_routes(engine: Any, request_id: str, start: int, end: int) -> np.ndarray | None:
    """Routes [end - start, layers, topk] of input tokens [start, end) of a request that is over; None without them."""
    answers = await engine.collective_rpc("workbench_take_routes", args=(request_id, start, end))
    # Every rank of a tensor-parallel engine sees the same routes.
    rows = answers[0]
    return np.frombuffer(rows["data"], dtype=rows["dtype"]).reshape(rows["shape"]) if rows else None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the child processes that are started inside, and put them back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_engine(config: WorkerConfig, arguments: Any) -> Any:
    """Start the engine; blocks until it is ready (tens of seconds). Returns vLLM's `AsyncLLM`.

    Raises SetupError with what the engine says against the settings or the machine, in a sentence.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    threads = config.threads or len(os.sched_getaffinity(0))
    values = {
        # Ray sets this to 1 in its workers; the engine's processes read it when they import torch.
        "OMP_NUM_THREADS": str(threads),
        # vLLM's own pinning leaves half of a small machine idle and would pin a co-located trainer out.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # Waiting threads sleep instead of spinning: beside a busy trainer, spinning slows both down several times.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    try:
        with _environment(values):
            return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))
    except Exception as error:  # vLLM's, pydantic's or torch's: which of them it is decides nothing here
        raise SetupError(
            f"The vLLM engine did not start: {_said(error)} Next: the recipe's model and engine values; all that the "
            f"engine wrote: {own_log()}."
        ) from error


def _said(error: Exception) -> str:
    """The part of an engine's error that a person reads: pydantic's first fault, else its first line."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error) or type(error).__name__
    line = text.strip().partition("\n")[0][:_SAID].removeprefix("Value error, ")
    return line if line.endswith((".", "!", "?")) else f"{line}."


async def build_app(engine_client: Any, arguments: Any) -> Any:
    """vLLM's serving app (an ASGI app) over `engine_client`, which may be a wrapper around the engine."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app

    tasks = await engine_client.get_supported_tasks()
    # A package that this imports lifts the root logger to ERROR: every warning of the worker would be lost.
    root = logging.getLogger()
    level = root.level
    app = build_vllm_app(arguments, tasks, engine_client.model_config)
    root.setLevel(level)
    await init_app_state(engine_client, app.state, arguments, tasks)
    # When its engine is dead vLLM's error handler stops its own server, found here. Ours stays, to say what happened.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


async def score(engine: Any, token_ids: list[list[int]]) -> list[list[float]]:
    """Log-prob (nats, temperature 1) of every token after the first of each sequence, by the engine's own weights."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    async def one(ids: list[int]) -> list[float]:
        # The prefix cache would answer for old positions without computing them; log-probs need them computed.
        params = SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True
        )
        last = None
        async for output in engine.generate(tokens_input(ids), params, f"score-{uuid.uuid4().hex}"):
            last = output
        if last is None or last.prompt_logprobs is None:
            raise CaptureError("The engine returned no prompt log-probs, so its weights cannot be proved.")
        pairs = zip(ids[1:], last.prompt_logprobs[1:], strict=True)
        return [step[token].logprob for token, step in pairs]

    return list(await asyncio.gather(*(one(ids) for ids in token_ids)))


def shutdown(engine: Any, timeout_s: float) -> None:
    """End the engine's processes; blocks until they are gone, at most about `timeout_s` seconds each."""
    # Otherwise it sees the engine end and reports that as a crash.
    if engine.output_handler is not None:
        engine.output_handler.get_loop().call_soon_threadsafe(engine.output_handler.cancel)
    engine.shutdown(timeout=timeout_s)


def stop_token_ids(engine: Any, tokenizer: Any) -> set[int]:
    """Ids that end a turn when sampled: the tokenizer's and the model's own."""
    ids: set[int] = set()
    for source in (engine.model_config.hf_config, engine.model_config.try_get_generation_config()):
        value = source.get("eos_token_id") if isinstance(source, dict) else getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids
