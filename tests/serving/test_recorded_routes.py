"""Routes as the real engine records them, against routes computed independently: by transformers, on the same ids.

One engine in float32, so that both take the same experts but for ties. It runs prompts in chunks and has so little
memory for keys and values that requests are preempted and start again. About half a minute to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from capture.scripted_worker import TOKEN, Agent, started, text_of

from workbench import models
from workbench.capture.staging import MemorySink
from workbench.errors import WeightSyncError
from workbench.serving.door import WORKER_TOKEN_ENV
from workbench.serving.expert_weights import compare_experts_with_file
from workbench.serving.settings import WorkerConfig
from workbench.serving.vllm_runtime import take_routes
from workbench.serving.worker import PolicyServer
from workbench.train.publish import names_in_file, publish
from workbench.wire import decode_routes

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LAYERS, TOPK = 3, 4
CHUNK = 64
"""Tokens of one step at most: longer prompts come in several."""
KV_TOKENS = 512
"""Tokens that fit into the KV cache; a token's keys and values of three layers are 768 bytes in float32."""
SAME, BESIDE = 0.999, 0.3
"""Share of (token, layer) with the same experts: all but a tie; where a route is another token's, by chance."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[tuple[PolicyServer, MemorySink]]:
    sink = MemorySink()
    config = WorkerConfig(
        model_path=str(models.build("tiny-moe")),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=KV_TOKENS * 768 / 2**30,
        capture_routes=True,
        sampling={"max_tokens": 24},
        engine_arguments=["--max-num-batched-tokens", str(CHUNK)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WORKER_TOKEN_ENV, TOKEN)
        async with started(config, sink) as server:
            yield server, sink


@pytest.fixture(scope="module")
def moe() -> Any:
    return loaded(models.build("tiny-moe"))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def independent(model: Any, ids: list[int]) -> np.ndarray:
    """Experts [tokens, layers, topk] in ascending order, from the router logits that transformers gives out."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
    return torch.stack([layer.topk(TOPK).indices.sort().values for layer in logits], dim=1).numpy()


def changed(directory: Path, version: int) -> Any:
    """A model with other experts and routers, and its folder: an optimiser step would change too few routes to see."""
    model = loaded(models.build("tiny-moe"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name:
                weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    weights = names_in_file(model, dict(model.named_parameters()))
    folder = publish(weights, models.build("tiny-moe"), directory, version, torch.float32)
    return SimpleNamespace(model=model, folder=folder)


def agreement(recorded: np.ndarray, computed: np.ndarray) -> float:
    """Share of (token, layer) that went to the same experts."""
    return float((np.sort(recorded, axis=-1) == computed).all(axis=-1).mean())


def generation(engine: Any, request_id: str, prompt: list[int], tokens: int) -> Any:
    """Outputs of a request for exactly `tokens` tokens, each with all that was sampled until then."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    return engine.generate(tokens_input(prompt), params, request_id)


async def sampled(engine: Any, request_id: str, prompt: list[int], tokens: int) -> list[int]:
    """Prompt and what the engine sampled after it."""
    last: Any = None
    async for output in generation(engine, request_id, prompt, tokens):
        last = output
    return [*prompt, *last.outputs[0].token_ids]


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 49000, length).tolist()


async def test_recorded_routes_are_those_that_transformers_computes(worker: Any, moe: Any) -> None:
    """Eight requests at once, whose keys and values do not fit at once; prompts longer than a step."""
    engine = worker[0].engine
    requests = {f"many-{i}": prompt_of(i, length) for i, length in enumerate((3, 150, 40, 64, 65, 90, 17, 128))}
    runs = await asyncio.gather(*(sampled(engine, name, ids, 80) for name, ids in requests.items()))
    beside: list[float] = []
    for (name, prompt), ids in zip(requests.items(), runs, strict=True):
        rows = await take_routes(engine, name, 0, len(ids) - 1)
        assert rows is not None and rows.shape == (len(ids) - 1, LAYERS, TOPK), name
        computed = independent(moe, ids)[:-1]
        assert agreement(rows, computed) >= SAME, name
        # The same rows one token beside, either way; in the prompt, because a random model repeats itself.
        end = len(prompt)
        beside += [agreement(rows[: end - 1], computed[1:end]), agreement(rows[1:end], computed[: end - 1])]
    assert max(beside) < BESIDE


async def test_a_prefix_from_the_cache_has_the_routes_it_was_computed_with(worker: Any, moe: Any) -> None:
    engine = worker[0].engine
    first = await sampled(engine, "first", prompt_of(20, 140), 8)
    second = await sampled(engine, "second", first[:136] + prompt_of(21, 9), 8)
    rows = await take_routes(engine, "second", 0, len(second) - 1)
    assert rows is not None and agreement(rows, independent(moe, second)[:-1]) >= SAME


async def test_every_staged_delta_carries_the_routes_of_its_own_tokens(worker: Any, moe: Any) -> None:
    """Two captured calls: root and child; each delta's last token was sampled and never an input."""
    server, sink = worker
    agent = Agent(server, "run.0.0.0")
    user = {"role": "user", "content": "Hello 123, who are you?"}
    first, response, _ = await agent.call([user])
    said = {"role": "assistant", "content": text_of(response)}
    second, _, _ = await agent.call([user, said, user], first, stream=True)
    root, child = await sink.fetch(agent.chains[second])
    assert server.status()["route_faults"] == {}
    ids = np.concatenate([root.token_ids_delta, child.token_ids_delta]).astype(int).tolist()
    computed = independent(moe, ids)
    for call in (root, child):
        routes = decode_routes(call.extras["routed_experts"])
        assert routes.dtype == "int8" and routes.values.shape == (call.delta_len, LAYERS, TOPK)
        assert (routes.values[-1] == -1).all()
        assert agreement(routes.values[:-1], computed[call.prev_len : call.cum_len - 1]) >= SAME


async def test_after_a_weight_sync_routes_are_those_of_the_new_weights(worker: Any, moe: Any, tmp_path: Path) -> None:
    """Experts and routers are loaded and proved like other weights: nothing of the old ones is left."""
    server, _ = worker
    prompt = prompt_of(30, 100)
    before = independent(moe, prompt)
    other = changed(tmp_path, 1)
    timings = await server.update_weights(str(other.folder), 1)
    # One packed copy of the experts a layer, the embedding and the head; compared: each expert's three matrices too.
    assert timings["repacked"] >= LAYERS + 1 and timings["compared"] > LAYERS * 16 * 3
    ids = await sampled(server.engine, "after", prompt, 24)
    rows = await take_routes(server.engine, "after", 0, len(ids) - 1)
    assert rows is not None and agreement(rows, independent(other.model, ids)[:-1]) >= SAME
    assert agreement(rows[: len(prompt)], before) < 0.8
    (scores,) = await server.score([ids])
    assert np.abs(np.array(scores) - scored(other.model, ids)).max() < 1e-3


def scored(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


async def test_what_the_engine_does_alone_leaves_noise_for_experts(worker: Any, moe: Any) -> None:
    """The trap that the cure is for: vLLM's own reload of the very weights that it was started with."""
    server, _ = worker
    folder, ids = models.build("tiny-moe"), prompt_of(40, 100)
    expected = scored(moe, ids)
    await server.engine.collective_rpc("workbench_reload", args=(str(folder), False))
    await server.engine.reset_prefix_cache()
    (scores,) = await server.score([ids])
    assert np.abs(np.array(scores) - expected).mean() > 0.05
    await server.update_weights(str(folder), server.weight_version() + 1)
    (scores,) = await server.score([ids])
    assert np.abs(np.array(scores) - expected).max() < 1e-3


async def test_a_call_that_straddles_a_sync_keeps_the_routes_it_was_sampled_with(
    worker: Any, moe: Any, tmp_path: Path
) -> None:
    """It is computed again with the new weights; only what is sampled from then on has their routes."""
    server, _ = worker
    other = changed(tmp_path, server.weight_version() + 1)
    begun, last = asyncio.Event(), []

    async def call() -> None:
        async for output in generation(server.engine, "straddles", prompt_of(50, 60), 180):
            last[:] = [output]
            if len(output.outputs[0].token_ids) >= 8:
                begun.set()

    live = asyncio.create_task(call())
    await asyncio.wait_for(begun.wait(), 60)
    await server.update_weights(str(other.folder), server.weight_version() + 1, straddle=True)
    await asyncio.wait_for(live, 60)
    first, second = last[0].outputs[0].weight_versions
    assert (first.start, first.end, second.end) == (0, second.start, 180) and first.end >= 8
    ids = [*prompt_of(50, 60), *last[0].outputs[0].token_ids]
    rows = await take_routes(server.engine, "straddles", 0, len(ids) - 1)
    # The last token that the old weights sampled was an input of the new ones.
    boundary = 60 + first.end - 1
    old, new = independent(moe, ids)[:-1], independent(other.model, ids)[:-1]
    assert agreement(rows[:boundary], old[:boundary]) >= SAME and agreement(rows[boundary:], new[boundary:]) >= SAME
    assert agreement(rows[:boundary], new[:boundary]) < 0.8
    await server.update_weights(str(models.build("tiny-moe")), server.weight_version() + 1)


async def test_packed_experts_that_are_not_the_files_are_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from vllm._custom_ops import cpu_prepack_moe_weight

    weights = {
        f"model.layers.0.mlp.experts.{expert}.{part}.weight": torch.randn(*shape)
        for expert in range(2)
        for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32)))
    }
    save_file(weights, tmp_path / "model.safetensors")

    def of(part: str) -> torch.Tensor:
        return torch.stack([weights[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] for expert in range(2)])

    plain = torch.cat([of("gate_proj"), of("up_proj")], dim=1), of("down_proj")
    packed = [cpu_prepack_moe_weight(weight, "vec") for weight in plain]
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa="vec"))
    layer = torch.nn.Module()
    layer.quant_method = SimpleNamespace(moe_kernel=kernel)

    def engine(w13: torch.Tensor, w2: torch.Tensor) -> Any:
        layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w13, w2))
        return SimpleNamespace(named_modules=lambda: [("model.layers.0.mlp.experts", layer)])

    assert compare_experts_with_file(engine(*packed), tmp_path) == 6
    changed = plain[1].clone()
    changed[1, 5, 7] *= 1.01
    for wrong in (plain, (packed[0], cpu_prepack_moe_weight(changed, "vec"))):
        with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.experts: its packed experts are not packed from"):
            compare_experts_with_file(engine(*wrong), tmp_path)
    nobody = SimpleNamespace(named_modules=lambda: [("model.layers.7.mlp.experts", layer)])
    with pytest.raises(WeightSyncError, match=r"layers\.7\.mlp\.experts: .* names no experts of this layer"):
        compare_experts_with_file(nobody, tmp_path)
