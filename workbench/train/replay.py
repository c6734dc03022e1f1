"""Replay: run a mixture of experts with the experts that the sampler's tokens went to.

    with replay.forced(routes (B, T, L, K)):  model(ids) … loss.backward()

Where a route is known the router's choice is replaced by it; the gates stay the model's own: its softmax over all
experts, taken at the forced ones and normalised as the model does. So gradients reach the router's weights just as in
an unforced pass. Where there is none (-1) the model's own router chooses.
The forced experts of a token are put in the order of their gates, which is the order the model itself sums them in:
forcing a model's own routes gives its own logits, bit for bit, whatever order they came in.
Invariants: what a router makes of a forced choice is checked against the router itself when a model is taken in, so one
with another formula (sigmoid scores, group limits) is refused, never approximated; outside `forced` nothing changes.
Layers that are recomputed in the backward pass choose again, so `forced` must be open until that pass is over.
Not here: where routes come from (rows, finalizer.routes), bringing them to other ranks (route_transport).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from workbench.errors import TrainerError

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouterReplay:
    """The routers of `model`, a causal language model of transformers. TrainerError where replay cannot be exact.

    `layers` are the indices of layers with experts, `topk` how many of `experts` a token takes there.
    """

    def __init__(self, model: Any) -> None:
        self._forced: torch.Tensor | None = None
        self._agreement: dict[int, torch.Tensor] = {}
        routers = {name: module for name, module in model.named_modules() if _is_router(module)}
        if not routers:
            raise TrainerError(
                f"{type(model).__name__} has no router that replay knows, so there is nothing to replay. Next: set "
                f"train.router_replay.mode to none, or train a mixture of experts."
            )
        self.num_layers = int(model.config.num_hidden_layers)
        self.layers: list[int] = []
        first = next(iter(routers.values()))
        self.topk, self.experts = int(first.top_k), int(first.weight.shape[0])
        for name, router in routers.items():
            place = _LAYER.search(name)
            if place is None:
                raise TrainerError(f"Replay does not know which layer the router {name} belongs to.")
            _check_formula(name, router)
            self.layers.append(int(place[1]))
            router.register_forward_hook(self._hook(int(place[1])))

    def check(self, rollout_id: str, routes: np.ndarray) -> None:
        """TrainerError where a row's routes [T, layers, topk] are of another model's shape or experts."""
        layers, topk = routes.shape[1:]
        if (layers, topk) != (self.num_layers, self.topk):
            raise TrainerError(
                f"Training row {rollout_id} has routes of {layers} layers × {topk} experts, the model has "
                f"{self.num_layers} × {self.topk}: it was sampled from another model."
            )
        if int(routes.max(initial=0)) >= self.experts:
            raise TrainerError(
                f"Training row {rollout_id} has a route to expert {int(routes.max())}, a layer of the model has "
                f"{self.experts}: it was sampled from another model."
            )

    @contextlib.contextmanager
    def forced(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Inside, tokens with known routes take them. `routes` (B, T, L, K) integer, -1 where unknown; None: none."""
        self._forced = None if routes is None else routes.flatten(0, 1).long()
        self._agreement = {}
        try:
            yield
        finally:
            self._forced = None

    def agreement(self) -> torch.Tensor | None:
        """(B·T, layers with experts) float32 of the last forced pass, in its order of tokens: 1 where the model's own
        router would have chosen the same experts, 0 where not, NaN where nothing was forced. None: no forced pass."""
        if not self._agreement:
            return None
        return torch.stack([self._agreement[layer] for layer in sorted(self._agreement)], dim=-1)

    def _hook(self, layer: int) -> Any:
        def force(router: Any, inputs: Any, output: Any) -> Any:
            if self._forced is None:
                return None
            logits, scores, own = output
            wanted = self._forced[:, layer]
            known = (wanted >= 0).all(-1, keepdim=True)
            gates, experts = _choose(router, logits, torch.where(known, wanted, own))
            same = (own.sort(-1).values == wanted.sort(-1).values).all(-1, keepdim=True).float()
            self._agreement[layer] = same.masked_fill(~known, float("nan"))[:, 0].detach()
            return logits, torch.where(known, gates.to(scores.dtype), scores), torch.where(known, experts, own)

        return force


def _is_router(module: Any) -> bool:
    return type(module).__name__.endswith("Router") and hasattr(module, "top_k") and hasattr(module, "weight")


def _choose(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ids (N, K) of forced experts (N, K), largest gate first."""
    gates = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
    gates, order = gates.sort(dim=-1, descending=True, stable=True)
    if getattr(router, "norm_topk_prob", True):
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return gates, experts.gather(-1, order)


@torch.no_grad()
def _check_formula(name: str, router: Any) -> None:
    """The router's own gates for its own choice must be ours, to the bit."""
    weight = router.weight
    hidden = torch.randn(16, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        logits, scores, own = router(hidden)
        gates, experts = _choose(router, logits, own.flip(-1))
        right = torch.equal(gates.to(scores.dtype), scores) and torch.equal(experts, own)
    except (TypeError, ValueError, RuntimeError):
        right = False
    if not right:
        raise TrainerError(
            f"Replay does not know how {type(router).__name__} ({name}) weighs its experts: not as a softmax over all "
            f"of them, taken at the chosen ones. Next: set train.router_replay.mode to none."
        )
