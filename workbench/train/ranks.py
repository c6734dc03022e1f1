"""Ranks: one trainer spread over R processes with PyTorch's FSDP2, that takes the same steps as one.

    TrainerRanks (an actor, rank 0) ──► RankTrainer × R: every rank holds 1/R of each weight, gradient and moment
    step:  same rows, same ballot everywhere ─► each rank its share of the micro-batches ─► gradients summed ─► AdamW

Every rank reads the batch's rows itself and decides the same votes, so only log-probs and sums are exchanged. Ranks
must run equally many passes, because every pass gathers weights: where shares are unequal, the shorter ones run a
micro-batch again with nothing in its loss. Routes of a mixture of experts are read by rank 0 and broadcast. Weights,
and for a checkpoint the optimiser's state, are gathered whole and written by rank 0.
Invariant: R ranks give one rank's update up to the order of its sums. gloo on a CPU, NCCL on a GPU.
Limits: a rank keeps gathered weights until its backward pass is over; for publishing and for a checkpoint rank 0 holds
them whole in host memory; every rank reads the whole model into host memory at its start; the KL reference is held
whole by every rank.
"""

from __future__ import annotations

import datetime
import os
import socket
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from workbench.errors import TrainerError
from workbench.train.batch import MicroBatch, Scores, token_logprobs
from workbench.train.route_transport import broadcast_routes
from workbench.train.rows import RowSource, TrainPartition, TrainRow
from workbench.train.trainer import Trainer
from workbench.train.votes import Ballot

EXCHANGE_TIMEOUT_S = 300.0
"""Longest wait of one rank for another. A rank that died is noticed at once; this is for one that hangs."""


class RankTrainer(Trainer):
    """One rank of R. Each of its methods must be called on all ranks, with the same arguments."""

    def __init__(
        self, config: dict[str, Any], rank: int, ranks: int, rendezvous: str, source: RowSource | None = None
    ) -> None:
        """`rendezvous`: `tcp://host:port` that rank 0 listens on; `config` and `source` as of `Trainer`."""
        self.rank, self.ranks = rank, ranks
        backend = "nccl" if config.get("device") == "gpu" else "gloo"
        timeout = datetime.timedelta(seconds=EXCHANGE_TIMEOUT_S)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
        threads = config.get("threads") or len(os.sched_getaffinity(0))
        super().__init__(config | {"threads": max(1, threads // ranks)}, source)

    def _hold(self) -> list[torch.Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
        from transformers.modeling_layers import GradientCheckpointingLayer

        mesh = init_device_mesh(self.device.type, (self.ranks,))
        policy = MixedPrecisionPolicy()
        if self.config.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = cast(Any, self.model)
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            # Kept gathered until the backward pass, so that a layer that is recomputed on one rank alone asks the
            # others for nothing.
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        # The pass is not the model's own `forward`: it never makes the logits of every token.
        model.token_logprobs = types.MethodType(token_logprobs, model)
        register_fsdp_forward_method(model, "token_logprobs")
        # Gradients are averaged over ranks; the loss of a batch is a sum over its micro-batches.
        self._loss_scale = float(self.ranks)
        return list(model.parameters())

    def _partition(self) -> TrainPartition:
        return TrainPartition(routes=self.config.router_replay == "direct" and self.rank == 0)

    def _with_routes(self, rows: Sequence[TrainRow]) -> Sequence[TrainRow]:
        """Rank 0 reads the routes, the others get them from it."""
        if self._replay is None:
            return rows
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                rows = super()._with_routes(rows)
            except TrainerError as error:
                problem = [str(error)]
        # So that a rank does not wait for routes that will never come.
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise TrainerError(problem[0])
        routes = broadcast_routes([row.routes for row in rows] if self.rank == 0 else None)
        return [replace(row, routes=values) for row, values in zip(rows, routes, strict=True)]

    def _refresh(self) -> None:
        """Let go of gathered weights that a pass without a backward pass has left: they are the old ones."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _token_logprobs(self, ids: torch.Tensor, mask: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
        return cast(Any, self.model).token_logprobs(ids, mask, temperature)

    def _mine(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        mine = list(batches[self.rank :: self.ranks])
        # The last is the smallest: what a rank without a share runs for company costs least.
        idle = [replace(batches[-1], loss_mask=torch.zeros_like(batches[-1].loss_mask))] if batches else []
        return mine + idle * (-(-len(batches) // self.ranks) - len(mine))

    def _pool(
        self, batches: Sequence[MicroBatch], scores: Scores, ballot: Ballot, sums: tuple[float, float]
    ) -> tuple[float, float]:
        places = [place for batch in batches[self.rank :: self.ranks] for place in batch.positions]
        own = {
            place: (scores.logprobs[place], scores.agreement[place], ballot.masks[place], ballot.left_out[place])
            for place in places
        }
        shares: list[Any] = [None] * self.ranks
        dist.all_gather_object(shares, (own, sums))
        for theirs, _ in shares:
            for place, (values, agreement, mask, why) in theirs.items():
                scores.logprobs[place], scores.agreement[place] = values, agreement
                ballot.masks[place], ballot.left_out[place] = mask, why
        return sum(loss for _, (loss, _) in shares), sum(kl for _, (_, kl) in shares)

    def _keeps_records(self) -> bool:
        return self.rank == 0

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        whole = tensor.full_tensor()
        # Only rank 0 writes it, and from host memory: no GPU ever holds more than one whole tensor of these.
        return whole.cpu() if self.rank == 0 else whole.new_empty(0)

    def _share(self, whole: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        # The optimiser's step count is a number beside the weight, and whole on every rank.
        if not isinstance(held, DTensor) or held.shape != whole.shape:
            return whole
        # None: every rank has read the same file, so none sends its share to another.
        return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)

    def leave(self) -> None:
        """End the exchange with the other ranks."""
        dist.destroy_process_group()


class TrainerRanks:
    """The trainer that a campaign talks to: rank 0 itself, with the other ranks as actors of its own."""

    def __init__(self, config: dict[str, Any], ranks: int, places: Sequence[dict[str, Any]] | None = None) -> None:
        """`places`: Ray's options for the actor of each further rank; None: a logical CPU anywhere."""
        rendezvous = f"tcp://{ray.util.get_node_ip_address()}:{_free_port()}"
        other: Any = ray.remote(RankTrainer)
        options = places or [{"num_cpus": 1}] * (ranks - 1)
        self._others = [
            other.options(**place).remote(config, rank, ranks, rendezvous)
            for rank, place in enumerate(options, start=1)
        ]
        self._own = RankTrainer(config, 0, ranks, rendezvous)

    def ready(self) -> dict[str, Any]:
        """As `Trainer.ready`, once every rank has loaded the model."""
        return self._all("ready") | {"ranks": len(self._others) + 1}

    def others(self) -> list[Any]:
        """Handles of the further ranks: who waits for rank 0 can ask them whether they are alive."""
        return self._others

    def train_step(self, step: int, train_keys: Sequence[str]) -> dict[str, Any]:
        """As `Trainer.train_step`."""
        return self._all("train_step", step, train_keys)

    def publish(self, version: int) -> str:
        """As `Trainer.publish`."""
        return self._all("publish", version)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """As `Trainer.score`."""
        return self._all("score", token_ids)

    def retake(self, step: int) -> dict[str, Any]:
        """As `Trainer.retake`."""
        return self._all("retake", step)

    def save_checkpoint(self, step: int, keep: int) -> dict[str, Any]:
        """As `Trainer.save_checkpoint`: whole tensors, so any number of ranks goes on from it."""
        return self._all("save_checkpoint", step, keep)

    def restore(self, upto: int) -> dict[str, Any]:
        """As `Trainer.restore`."""
        return self._all("restore", upto)

    def _all(self, method: str, *arguments: Any) -> Any:
        answers = [getattr(other, method).remote(*arguments) for other in self._others]
        try:
            own = getattr(self._own, method)(*arguments)
        except RuntimeError as error:  # what gloo raises when a peer is gone, and torch when memory is
            said = str(error).partition("\n")[0]
            raise TrainerError(
                f"Rank 0 failed in {method}: {type(error).__name__}: {said} (said of a peer: another rank is gone)"
            ) from error
        ray.get(answers, timeout=EXCHANGE_TIMEOUT_S)
        return own


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


TrainerRanksActor = ray.remote(TrainerRanks)
"""`TrainerRanksActor.options(num_cpus=1).remote(config, ranks)`; takes one logical CPU more for each further rank."""
