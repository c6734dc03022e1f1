"""Two ranks: a function in two new processes that reach each other at one address, forked after the slow imports.

Each of the two would import torch and transformers for seconds if it were spawned. They are forked from a server that
has imported them and nothing else: no thread, no tensor, nothing of the test's own process.
Not here: how a campaign starts its ranks, which are actors (`workbench.train.ranks`).
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

RANKS = 2


def run_on_two(function: Callable[..., None], *args: Any) -> None:
    """Returns when `function(rank, address, *args)` has ended in both; what one of them raises is raised here."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    multiprocessing.set_forkserver_preload(["torch", "safetensors.torch", "transformers", "workbench.train.ranks"])
    torch.multiprocessing.start_processes(function, (address, *args), nprocs=RANKS, start_method="forkserver")
