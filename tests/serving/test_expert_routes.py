"""The recorder beside a model runner that is made up here: whatever way tokens are batched, cached, cut into chunks or
started again, a request's rows are those of its tokens."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.serving.expert_routes import RouteRecorder
from workbench.serving.weights import EngineSide

LAYERS, TOPK, EXPERTS, BLOCK = 2, 3, 16, 4


def route(token, layer):
    """What this model's routers choose for a token id: ids that tell token and layer."""
    return [(token + layer + k) % EXPERTS for k in range(TOPK)]


class Runner:
    """As much of vLLM's model runner as the recorder touches. `run` is one step over `(request, start, tokens)`."""

    def __init__(self, experts=EXPERTS):
        table = SimpleNamespace(np=np.zeros((4, 16), dtype=np.int32))
        self.table = SimpleNamespace(block_size=BLOCK, block_table=table)
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(4, dtype=np.int32), block_table=[self.table]
        )
        model = SimpleNamespace(
            model="m", get_num_experts=lambda: experts, get_num_experts_per_tok=lambda: TOPK,
            get_total_num_hidden_layers=lambda: LAYERS,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=32)
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None], num_blocks=16)
        self.batch = []

    def get_model(self):
        return None

    def execute_model(self, scheduler_output):
        tokens = [token for _, _, ids in self.batch for token in ids]
        for layer in range(LAYERS):
            self.capturer.capture(layer, torch.tensor([route(token, layer) for token in tokens]))

    def run(self, *batch, finished=(), blocks=None):
        self.batch = batch
        self.input_batch.req_ids = [name for name, _, _ in batch]
        for place, (name, start, _) in enumerate(batch):
            self.input_batch.num_computed_tokens_cpu[place] = start
            held = (blocks or {}).get(name, range(4 * place, 4 * place + 4))
            self.table.block_table.np[place, : len(held)] = held
        counts = {name: len(ids) for name, _, ids in batch}
        self.execute_model(SimpleNamespace(num_scheduled_tokens=counts, finished_req_ids=set(finished)))


@pytest.fixture
def runner(monkeypatch):
    made = Runner()
    module = ModuleType("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    module.bind_routed_experts_capturer = lambda model, capturer: setattr(made, "capturer", capturer)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made.recorder = RouteRecorder(made)
    return made


def expected(ids):
    return [[route(token, layer) for layer in range(LAYERS)] for token in ids]


def test_chunks_and_single_tokens_of_two_requests_are_told_apart(runner):
    first, second = list(range(10)), list(range(20, 27))
    runner.run(("a-12345678", 0, first[:6]), ("b-12345678", 0, second[:2]))
    # The runner may change the order of its batch.
    runner.run(("b-12345678", 2, second[2:6]), ("a-12345678", 6, first[6:9]))
    runner.run(("a-12345678", 9, first[9:]), ("b-12345678", 6, second[6:]))
    rows = runner.recorder.take("a", 0, 10)
    assert rows.dtype == np.int8 and rows.tolist() == expected(first)
    assert runner.recorder.take("b", 3, 7).tolist() == expected(second[3:])
    assert runner.recorder.take("b", 0, 7) is None  # taken


def test_a_cached_prefix_has_the_routes_it_was_computed_with(runner):
    ids = list(range(11))
    runner.run(("a-12345678", 0, ids), blocks={"a-12345678": [3, 1, 7]})
    # Two whole blocks are found in the cache: only what comes after is computed.
    other = [*ids[:8], 90, 91, 92]
    runner.run(("b-12345678", 8, other[8:]), blocks={"b-12345678": [3, 1, 5]}, finished=["a-12345678"])
    assert runner.recorder.take("b", 0, 11).tolist() == expected(other)
    assert runner.recorder.take("a", 0, 11).tolist() == expected(ids)


def test_a_request_that_starts_again_has_its_rows_once(runner):
    ids = list(range(30, 42))
    runner.run(("a-12345678", 0, ids[:9]), blocks={"a-12345678": [0, 1, 2]})
    runner.run(("a-12345678", 4, ids[4:]), blocks={"a-12345678": [0, 8, 9]})
    assert runner.recorder.take("a", 0, 12).tolist() == expected(ids)


def test_what_is_computed_again_with_other_weights_keeps_the_routes_it_was_sampled_with(runner, monkeypatch):
    ids = list(range(30, 42))
    runner.run(("a-12345678", 0, ids[:9]), blocks={"a-12345678": [0, 1, 2]})
    before = expected(ids[:9])
    monkeypatch.setitem(
        globals(), "route", lambda token, layer: [(3 * token + layer + k) % EXPERTS for k in range(TOPK)]
    )
    runner.run(("a-12345678", 0, ids[:4]), blocks={"a-12345678": [7, 8, 9]})
    runner.run(("a-12345678", 4, ids[4:11]), blocks={"a-12345678": [7, 8, 9]})
    runner.run(("a-12345678", 11, ids[11:]), blocks={"a-12345678": [7, 8, 9]})
    assert runner.recorder.take("a", 0, 12).tolist() == before + expected(ids[9:])
    # Whoever continues from the cached keys and values gets the routes that these were computed with.
    runner.run(("b-12345678", 8, [90]), blocks={"b-12345678": [7, 8, 3]})
    assert runner.recorder.take("b", 0, 9).tolist() == expected([*ids[:8], 90])


def test_what_was_never_computed_has_no_route_and_what_is_unknown_gives_none(runner):
    runner.run(("a-12345678", 4, [50, 51]), blocks={"a-12345678": [15, 14]})
    assert runner.recorder.take("a", 0, 7) is None
    runner.run(("a-12345678", 4, [50, 51]), blocks={"a-12345678": [15, 14]})
    assert (runner.recorder.take("a", 0, 4) == -1).all()
    assert runner.recorder.take("nobody", 0, 1) is None


def test_a_model_without_experts_is_refused(runner):
    with pytest.raises(ValueError, match="m has no experts"):
        RouteRecorder(Runner(experts=0))


def test_of_requests_that_are_over_the_last_few_are_remembered(runner, monkeypatch):
    monkeypatch.setattr("workbench.serving.expert_routes.KEPT_REQUESTS", 1)
    runner.run(("a-12345678", 0, [1, 2, 3]))
    runner.run(("b-12345678", 0, [1, 2, 3]), finished=["a-12345678"])
    runner.run(("c-12345678", 0, [1]), finished=["b-12345678"])
    assert runner.recorder.take("a", 0, 3) is None and runner.recorder.take("b", 0, 3) is not None
    worker = EngineSide()
    worker._workbench_routes = runner.recorder
    assert worker.workbench_take_routes("a", 0, 3) == {}


def test_a_model_with_several_kinds_of_cache_is_refused(runner):
    runner.kv_cache_config.kv_cache_groups = [None, None]
    with pytest.raises(ValueError, match="one kind of KV cache"):
        RouteRecorder(runner)
