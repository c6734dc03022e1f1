"""Handles: the parts of a campaign that are Ray actors, as they are asked by whoever holds them.

Ray's own handles have no types: each has the methods of the class behind it, as awaitables under `.remote`. What is
said here of them is what the campaign asks for, so that a wrong name or argument is found by mypy and not by a run.
Not here: deadlines and what becomes of a part that is gone (workbench.actors), starting them (fleet).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Asked(Protocol[P, R_co]):
    """One method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]: ...


class Actor(Protocol):
    """Any actor. `__ray_ready__` is Ray's own: it answers once the actor is made, and fails when it is dead."""

    @property
    def __ray_ready__(self) -> Asked[[], object]: ...


class WorkerActor(Actor, Protocol):
    """A `serving.worker.PolicyWorker`, as far as its methods are not asked for by name (policy)."""

    @property
    def check_alive(self) -> Asked[[], None]: ...
    @property
    def stop(self) -> Asked[[], None]: ...


class TrainerActor(Actor, Protocol):
    """A `train.trainer.Trainer`, or `train.ranks.TrainerRanks`, which alone has `others`."""

    @property
    def ready(self) -> Asked[[], dict[str, Any]]: ...
    @property
    def others(self) -> Asked[[], list[Actor]]: ...
    @property
    def train_step(self) -> Asked[[int, Sequence[str]], dict[str, Any]]: ...
    @property
    def publish(self) -> Asked[[int], str]: ...
    @property
    def score(self) -> Asked[[Sequence[Sequence[int]]], list[list[float]]]: ...
    @property
    def save_checkpoint(self) -> Asked[[int, int], dict[str, Any]]: ...
    @property
    def restore(self) -> Asked[[int], dict[str, Any]]: ...
    @property
    def retake(self) -> Asked[[int], dict[str, Any]]: ...
