"""Route transport: one rank's routes to all ranks.

    rank 0: routes of each row ──shapes, then int32 ids──▶ every rank: the same arrays in the same dtype

NCCL has no int16, so ids travel as int32 and are narrowed back where they arrive.
Invariant: every id and every -1 arrives as it was, in the dtype it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def broadcast_routes(routes: Sequence[np.ndarray | None] | None) -> list[np.ndarray | None]:
    """The routes of rank 0, [T, layers, topk] a row or None, on every rank. Other ranks pass None.

    Every rank of the default process group must call this.
    """
    mine = dist.get_rank() == 0
    head: list[Any] = [None]
    if mine:
        head = [[None if row is None else (row.shape, row.dtype.name) for row in routes or ()]]
    dist.broadcast_object_list(head, src=0)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    sizes = [0 if what is None else int(np.prod(what[0])) for what in head[0]]
    flat = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    if mine and flat.numel():
        held = [row.reshape(-1).astype(np.int32) for row in routes or () if row is not None]
        flat.copy_(torch.from_numpy(np.concatenate(held)))
    if flat.numel():
        dist.broadcast(flat, src=0)
    values = flat.cpu().numpy()
    out: list[np.ndarray | None] = []
    start = 0
    for what, size in zip(head[0], sizes, strict=True):
        out.append(None if what is None else values[start : start + size].reshape(what[0]).astype(what[1]))
        start += size
    return out
