"""Training: verified rows become advantages, a loss, an optimiser step and new weights.

    train partition → buffer → trainer: rows → batch → estimators → loss → AdamW → publish → workers

`advantages` needs numpy only; what needs torch (`grpo_loss`, `Trainer`) or TransferQueue is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.train.estimators import advantages

if TYPE_CHECKING:
    from workbench.train.buffer import ReplayBuffer
    from workbench.train.loss import grpo_loss
    from workbench.train.trainer import Trainer

__all__ = ["ReplayBuffer", "Trainer", "advantages", "grpo_loss"]

_HOMES = {"grpo_loss": "loss", "ReplayBuffer": "buffer", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"workbench.train.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
