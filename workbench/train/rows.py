"""Rows: one training sample as it lies in TransferQueue's partition `train`, read and checked.

    source = TrainPartition(); rows = source.fetch(keys); ...; source.clear(keys)

Columns of a row, written by the finalizer: `token_ids` int64[T], `token_mask` uint8[T], `logprobs` float32[T] (the
sampler's; 0 where the mask is 0), `meta` uint8[...] (JSON: rollout_id, group_id, index, reward, sample_mask, ...) and,
for router replay, `routes` [T, layers, topk]; where they are fetched later, `meta` has the plan instead.
Invariant: `fetch` returns exactly the rows asked for, in the order asked, or raises: a batch read leaves out missing
keys and fields silently, and a step on fewer rows would be a step on another batch.
Not here: writing rows (finalizer), choosing them (buffer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import orjson

from workbench.errors import TrainerError

COLUMNS = ("token_ids", "token_mask", "logprobs", "meta")
ROUTES = "routes"


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sample. Arrays are (T,): ids int64, mask bool (true = sampled by the policy), sampler log-probs float32."""

    rollout_id: str
    group_id: str
    index: int
    reward: float
    sample_mask: bool
    """False: a placeholder. It keeps its place in the group and has no vote, whatever its reward says."""
    token_ids: np.ndarray
    token_mask: np.ndarray
    logprobs: np.ndarray
    meta: Mapping[str, Any] = field(default_factory=dict)
    routes: np.ndarray | None = None
    """[T, layers, topk] experts of each token as input, -1 where unknown; None: the row has none (yet)."""

    def __post_init__(self) -> None:
        T = len(self.token_ids)
        if not (T and self.token_ids.shape == self.token_mask.shape == self.logprobs.shape == (T,)):
            raise _unusable(
                self.rollout_id,
                f"expected ids, mask and log-probs of one length T >= 1, got {self.token_ids.shape}, "
                f"{self.token_mask.shape} and {self.logprobs.shape}",
            )
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != T):
            raise _unusable(self.rollout_id, f"expected routes [{T}, layers, topk], got {list(self.routes.shape)}")
        if self.token_mask[0]:
            raise _unusable(self.rollout_id, "its first token is marked as sampled, but nothing came before it")
        if self.sample_mask and not np.isfinite(self.logprobs[self.token_mask]).all():
            at = int(np.flatnonzero(self.token_mask & ~np.isfinite(self.logprobs))[0])
            raise _unusable(self.rollout_id, f"the sampler's log-prob at position {at} is {self.logprobs[at]}")

    @property
    def reward_components(self) -> Mapping[str, float]:
        """Parts of the reward by name, as the environment gave them."""
        return self.meta.get("reward_components") or {}

    @property
    def versions(self) -> np.ndarray:
        """(T,) int64: version of the weights each token was sampled from (of its call, for the prompt); -1: unknown."""
        out_T = np.full(len(self.token_ids), -1, dtype=np.int64)
        for _, start, end, version in self.meta.get("weight_version_spans") or ():
            out_T[start:end] = version
        return out_T

    def temperatures(self, default: float) -> np.ndarray:
        """(T,) float32: what each token's logits must be divided by to be about the sampler's distribution.

        The temperature of the token's call, or 1 where its log-probs were recorded raw, before scaling; `default` where
        the row does not say.
        """
        out_T = np.full(len(self.token_ids), default, dtype=np.float32)
        start = 0
        spans, settings = self.meta.get("link_spans") or (), self.meta.get("sampling") or ()
        for (_, carry, generated), sampling in zip(spans, settings, strict=False):
            end = start + carry + generated
            if sampling.get("temperature") is not None:
                raw = str(sampling.get("logprobs_mode", "")).startswith("raw")
                out_T[start:end] = 1.0 if raw else sampling["temperature"]
            start = end
        if not (out_T > 0).all():
            raise _unusable(self.rollout_id, "it was sampled at temperature 0, which is no distribution to train on")
        return out_T

    @property
    def loss_mask(self) -> np.ndarray:
        """(T,) bool: tokens that enter the loss. All false for a placeholder."""
        return self.token_mask & self.sample_mask


class RowSource(Protocol):
    """Where a trainer gets its rows; `fetch` returns them in the order asked or raises TrainerError."""

    def fetch(self, keys: Sequence[str]) -> list[TrainRow]: ...

    def clear(self, keys: Sequence[str]) -> None: ...


class TrainPartition:
    """The `train` partition of the running data plane. Blocking; `deadline_s` bounds each request.

    `routes`: rows have a column of routed experts and it is read too.
    """

    def __init__(self, deadline_s: float = 60.0, *, routes: bool = False) -> None:
        self._deadline_s = deadline_s
        self._fields = [*COLUMNS, ROUTES] if routes else COLUMNS

    def fetch(self, keys: Sequence[str]) -> list[TrainRow]:
        """Rows in the order asked. Raises TrainerError naming the keys that did not come back whole."""
        from workbench import dataplane

        wanted = _distinct(keys)
        dataplane.connect_blocking()
        try:
            batch = asyncio.run(
                dataplane.get(dataplane.TRAIN, wanted, fields=self._fields, deadline_s=self._deadline_s)
            )
        except ValueError as error:  # no key is there at all, or one is a tag without a row
            raise TrainerError(
                f"None of {len(wanted)} training rows could be read ({wanted[0]}, …): {error}. They were cleared "
                f"before, or never published; see rows/ of the run."
            ) from error
        return match_rows(wanted, [unpack_row(columns) for columns in dataplane.split_rows(batch)])

    def clear(self, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are fine."""
        from workbench import dataplane

        async def clear() -> None:
            try:
                await dataplane.clear(dataplane.TRAIN, list(keys), deadline_s=self._deadline_s)
            finally:  # a clear that is late goes on in the background, and this loop ends here
                await dataplane.drain_clears(self._deadline_s)

        dataplane.connect_blocking()
        asyncio.run(clear())


def match_rows(keys: Sequence[str], rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows in the order of `keys`; TrainerError names the keys that are missing or were not asked for."""
    by_key = {row.rollout_id: row for row in rows}
    missing = [key for key in _distinct(keys) if key not in by_key]
    extra = sorted(set(by_key) - set(keys))
    if missing or extra or len(rows) != len(keys):
        raise TrainerError(
            f"Asked for {len(keys)} training rows, {len(rows)} came back; missing {missing[:8]}, not asked for "
            f"{extra[:8]}. A lost storage unit takes its rows along; they can be republished from rows/ of the run."
        )
    return [by_key[key] for key in keys]


def unpack_row(columns: Mapping[str, np.ndarray]) -> TrainRow:
    """A row from its columns; TrainerError names what is absent, of another dtype, or not JSON."""
    absent = [name for name in COLUMNS if name not in columns]
    if absent:
        raise TrainerError(f"A training row came back without {', '.join(absent)}; expected {', '.join(COLUMNS)}.")
    try:
        meta = orjson.loads(np.ascontiguousarray(columns["meta"], dtype=np.uint8).tobytes())
        rollout_id, group_id = str(meta["rollout_id"]), str(meta["group_id"])
        index, sample_mask = int(meta["index"]), bool(meta["sample_mask"])
        reward = meta["reward"]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"A training row's metadata cannot be read: {type(error).__name__}: {error}.") from error
    if ROUTES in columns and columns[ROUTES].dtype.name not in ("int8", "int16", "int32"):
        raise _unusable(rollout_id, f"routes must be int8, int16 or int32, got {columns[ROUTES].dtype}")
    for name, dtype in (("token_ids", np.int64), ("token_mask", np.uint8), ("logprobs", np.float32)):
        if columns[name].dtype != dtype:
            raise _unusable(rollout_id, f"{name} must be {np.dtype(dtype)}, got {columns[name].dtype}")
    return TrainRow(
        rollout_id=rollout_id,
        group_id=group_id,
        index=index,
        # A placeholder may have no reward at all (its rollout failed); it has no vote either way.
        reward=float("nan") if reward is None else float(reward),
        sample_mask=sample_mask,
        token_ids=columns["token_ids"],
        token_mask=columns["token_mask"].astype(bool),
        logprobs=columns["logprobs"],
        meta=meta,
        routes=columns.get(ROUTES),
    )


def _distinct(keys: Sequence[str]) -> list[str]:
    if not keys or len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        raise TrainerError(
            f"A step needs at least one row and each of them once; got {len(keys)} keys, twice: {twice}."
        )
    return list(keys)


def _unusable(rollout_id: str, why: str) -> TrainerError:
    return TrainerError(
        f"Training row {rollout_id} cannot be used: {why}. The finalizer should have made it a placeholder; "
        f"see rows/ of the run."
    )
