"""Expert routes: which experts each token went to, written down inside the engine's own process.

    routers ──chosen ids──▶ one step's rows ──after the step──▶ by request, and by KV-cache slot
vLLM returns routed experts itself (`CompletionOutput.routed_experts`), but only from its second model runner, which
needs Triton and so does not exist on a CPU. There this recorder stands in for it: the routers call it with what they
chose, and after each step the rows are given to the requests whose tokens they were.
A token that the prefix cache answered for is not computed again; its route is read from the KV-cache slot it was
computed into, which lives exactly as long as the cached keys and values do. So a cached prefix, a prompt in chunks and
a preempted request give the same rows as an uncached one. A call that straddles a weight sync is computed again with
the new weights; its tokens keep the routes that they were sampled with.
Row i is the route of token i as input: the last sampled token of a request has none.
Invariant: a row is what the router chose when its token first went in, or -1 where nothing was recorded (a layer
without experts).
Not here: what is staged of it (`capture.routes`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import numpy as np

NO_ROUTE = -1
KEPT_REQUESTS = 1024
"""Finished requests whose rows wait to be taken; the oldest go first. Only captured calls are ever taken."""


class RouteRecorder:
    """Records the routes of one model runner (vLLM's first). Raises ValueError for a model without experts.

    `shape` is (layers, topk); layers counts all of the model's, also those without experts.
    """

    def __init__(self, runner: Any) -> None:
        import torch
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        config = runner.vllm_config
        model = config.model_config
        experts, topk = model.get_num_experts(), model.get_num_experts_per_tok()
        if experts < 1 or topk < 1:
            raise ValueError(f"{model.model} has no experts, so it has no routes to record.")
        if len(runner.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("Routes are recorded of models with one kind of KV cache; this one has several.")
        self.shape = model.get_total_num_hidden_layers(), topk
        self.dtype = np.dtype("int8" if experts <= 128 else "int16" if experts <= 2**15 else "int32")
        self._batch = runner.input_batch
        tokens = config.scheduler_config.max_num_batched_tokens
        self._step = torch.full((tokens, *self.shape), NO_ROUTE, dtype=torch.int32)
        self._block_size = self._batch.block_table[0].block_size
        slots = runner.kv_cache_config.num_blocks * self._block_size
        # Ids plus one: pages that were never written stay untouched zeros, and zero is "no route".
        self._by_slot = np.zeros((slots, *self.shape), dtype=np.uint16 if experts < 2**16 else np.uint32)
        self._requests: OrderedDict[str, _Rows] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()
        bind_routed_experts_capturer(runner.get_model(), cast(Any, self))
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """What vLLM's routers call: ids [tokens, topk] of one layer, in the order of the step's batch."""
        self._step[: topk_ids.shape[0], layer_id] = topk_ids.to(self._step.dtype)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own step, and then its rows handed to the requests they are of."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id in self._requests:
                self._finished[request_id] = None
        while len(self._finished) > KEPT_REQUESTS:
            self._requests.pop(self._finished.popitem(last=False)[0], None)
        output = self._execute(scheduler_output, *args, **kwargs)
        counts = scheduler_output.num_scheduled_tokens
        end = 0
        for place, request_id in enumerate(self._batch.req_ids if counts else ()):
            start, end = end, end + counts[request_id]
            rows = self._step[start:end].numpy().astype(self.dtype)
            self._hand_over(request_id, place, int(self._batch.num_computed_tokens_cpu[place]), rows)
        return output

    def _hand_over(self, request_id: str, place: int, position: int, rows: np.ndarray) -> None:
        held = self._requests.setdefault(request_id, _Rows(self.shape, self.dtype))
        if position > held.length:
            # The first step behind a cached prefix.
            known = self._by_slot[self._slots(place, held.length, position)].astype(np.int64) - 1
            held.append(known.astype(self.dtype))
        # What is computed again, by a request that was preempted, has its rows already.
        held.append(rows[held.length - position :])
        self._by_slot[self._slots(place, position, position + len(rows))] = rows.astype(np.int64) + 1

    def _slots(self, place: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = self._batch.block_table[0].block_table.np[place, positions // self._block_size]
        return blocks.astype(np.int64) * self._block_size + positions % self._block_size

    def take(self, request_id: str, start: int, end: int) -> np.ndarray | None:
        """Rows [start, end) of a request, by the id it was sent with; None when it is unknown or has fewer."""
        # vLLM adds a dash and eight letters to the ids it is given.
        own = next((name for name in reversed(self._requests) if name.rpartition("-")[0] == request_id), None)
        if own is None:
            return None
        held = self._requests.pop(own)
        self._finished.pop(own, None)
        return held.rows[start:end] if held.length >= end else None


class _Rows:
    """Rows of one request, [length, layers, topk], growing."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self.rows = np.empty((64, *shape), dtype=dtype)
        self.length = 0

    def append(self, rows: np.ndarray) -> None:
        end = self.length + len(rows)
        if end > len(self.rows):
            grown = np.empty((max(end, 2 * len(self.rows)), *self.rows.shape[1:]), dtype=self.rows.dtype)
            grown[: self.length] = self.rows[: self.length]
            self.rows = grown
        self.rows[self.length : end] = rows
        self.length = end
