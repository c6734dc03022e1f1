"""Rows: one training row a sample, put into TransferQueue's partition `train` under the rollout id.

Columns: `token_ids` int64[T] (the bits of uint64), `token_mask` uint8[T], `logprobs` float32[T], `meta` uint8[...]
(JSON of the rest) and, for router replay, `routes` int8|16|32[T, layers, topk]. Tags are `group_id`, `index`,
`weight_version_min`, `weight_version_max`, `sample_mask` and `n_routes_backfilled` (calls without usable routes); a
placeholder, which stands on no call, has the version of its group's dispatch in both.
Invariants: the N rows of a group are put in one batch, in index order; a placeholder has mask 0 everywhere; a row that
is there already, bit for bit, is not put again.
Not here: which rows there are (group), reading them (workbench.train.rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson

from workbench import dataplane
from workbench.errors import WorkbenchError

Columns = dict[str, np.ndarray]

_ARRAYS = ("token_ids", "token_mask", "logprobs", "routes")


@dataclass(frozen=True, eq=False)
class GroupRow:
    """One sample of a group. token_ids uint64[T], token_mask uint8[T] (1 = sampled), logprobs float32[T] (nats).

    `sample_mask` 0 marks a placeholder: it keeps its group at N rows and has no vote; `cause` says why.
    `weight_version_spans` are `[call, start, end, version]` over row positions, `link_spans` `[call, carry,
    generated]`; `sampling` is how each call of the chain was sampled (see `spans`).
    """

    rollout_id: str
    group_id: str
    index: int
    reward: float | None
    reward_components: dict[str, float]
    sample_mask: int
    prompt_len: int
    model_call_ids: list[str]
    weight_versions: list[int]
    weight_version_spans: list[list[Any]]
    link_spans: list[list[Any]]
    sampling: list[dict[str, Any]]
    cause: str | None
    token_ids: np.ndarray
    token_mask: np.ndarray
    logprobs: np.ndarray
    route_plan: dict[str, Any] | None = None
    """How the row's routes are put together (`routes.RoutePlan`); None without router replay."""
    routes: np.ndarray | None = None
    """[T, layers, topk], -1 where unknown; None without router replay, and where they are filled in later."""

    @property
    def versions(self) -> list[int]:
        """Every weight version that a token of the row was sampled from; [] for a placeholder."""
        return [version for *_, version in self.weight_version_spans]

    def tags(self, dispatch_version: int) -> dict[str, Any]:
        """The fixed tag schema of the train partition."""
        versions = self.versions or [dispatch_version]
        return {
            "group_id": self.group_id,
            "index": self.index,
            "weight_version_min": min(versions),
            "weight_version_max": max(versions),
            "sample_mask": self.sample_mask,
            "n_routes_backfilled": sum(span[5] == "sentinel" for span in (self.route_plan or {}).get("spans", ())),
        }


_META = [f.name for f in fields(GroupRow) if f.name not in _ARRAYS]
_WHERE_GIVEN = {"route_plan"}


def pack_row(row: GroupRow) -> dict[str, np.ndarray]:
    """Columns of one row (see the head)."""
    values = {name: getattr(row, name) for name in _META}
    meta = {name: value for name, value in values.items() if value is not None or name not in _WHERE_GIVEN}
    columns: dict[str, np.ndarray] = {
        "token_ids": np.asarray(row.token_ids, dtype=np.uint64).view(np.int64),
        "token_mask": np.asarray(row.token_mask, dtype=np.uint8),
        "logprobs": np.asarray(row.logprobs, dtype=np.float32),
        "meta": np.frombuffer(orjson.dumps(meta), dtype=np.uint8),
    }
    return columns if row.routes is None else columns | {"routes": row.routes}


async def publish_rows(
    rows: Sequence[GroupRow],
    dispatch_version: int,
    *,
    deadline_s: float = 60.0,
    published: Mapping[str, Columns] | None = None,
) -> list[str]:
    """Put the rows in one batch and return the keys of all of them, in order.

    `published` is what `published_rows` found; a row that equals what is there is left alone.
    """
    import torch
    from tensordict import TensorDict

    keys = [row.rollout_id for row in rows]
    packed = {row.rollout_id: pack_row(row) for row in rows}
    new = [row for row in rows if not _equal(packed[row.rollout_id], (published or {}).get(row.rollout_id))]
    if not new:
        return keys
    columns = {
        name: torch.nested.as_nested_tensor(
            [torch.from_numpy(packed[row.rollout_id][name].copy()) for row in new], layout=torch.jagged
        )
        for name in packed[keys[0]]
    }
    await dataplane.connect()
    await dataplane.put(
        dataplane.TRAIN,
        [row.rollout_id for row in new],
        TensorDict(columns, batch_size=len(new)),
        [row.tags(dispatch_version) for row in new],
        deadline_s=deadline_s,
    )
    return keys


async def published_rows(keys: Sequence[str], *, deadline_s: float = 60.0) -> dict[str, Columns]:
    """Columns by key of those rows that are in the train partition and readable; the others are not mentioned.

    Raises DeadlineExceeded and ComponentDied when the data plane does not answer: then nothing is known.
    """
    await dataplane.connect()
    listed = await dataplane.tags(dataplane.TRAIN, deadline_s=deadline_s)
    found: dict[str, Columns] = {}
    for key in keys:
        # One by one: a key that is listed without a row (its put failed half-way) would fail a read of all.
        if key in listed:
            try:
                batch = await dataplane.get(dataplane.TRAIN, [key], deadline_s=deadline_s)
            except WorkbenchError:
                raise
            except Exception:  # a tag without a row
                continue
            if rows := dataplane.split_rows(batch):
                found[key] = rows[0]
    return found


def _equal(row: Columns, there: Columns | None) -> bool:
    return (
        there is not None
        and row.keys() == there.keys()
        and all(row[name].dtype == there[name].dtype and row[name].tobytes() == there[name].tobytes() for name in row)
    )


async def clear_rows(keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
    """Remove trained or discarded rows; unknown keys are fine."""
    await dataplane.connect()
    await dataplane.clear(dataplane.TRAIN, keys, deadline_s=deadline_s)
