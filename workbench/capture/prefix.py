"""Prefix: the cumulative ids of a parent call, from this worker's memory or from the staged deltas.

In: an admission (`parent_call_id`, `prev_len`, `parent_chain_hash`, `staging_chain`). Out: ids_T (uint32), exactly what
the engine ran and sampled up to the end of the parent call. Every answer is proved before it is used: from memory by
length, chain hash and cumulative hash, from storage by walking the chain hash over the fetched deltas.
Bounded by bytes; the least recently used goes first, and losing an entry costs one batched read, never a wrong prompt.
Not here: which call is the parent (ledger), how the child's tail is rendered (splice).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from workbench.capture.core import StagingSource
from workbench.errors import StagingError
from workbench.wire import CaptureAdmission, Cause, CommitCoords, StagedCall, chain_hash, hash_token_ids


@dataclass(frozen=True)
class Remembered:
    """The sequence up to the end of one call, with the hashes it was staged under."""

    ids: np.ndarray
    chain_hash: str
    cumulative_hash: str


class PrefixStore:
    """Cumulative ids by model call id. `source` is where staged deltas are read when memory does not have them."""

    def __init__(self, source: StagingSource | None, capacity_bytes: int) -> None:
        self._source = source
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[str, Remembered] = OrderedDict()
        self.bytes_held = 0
        self.hits = 0
        self.fetches = 0

    def remember(self, coords: CommitCoords, ids_T: np.ndarray) -> None:
        """Keep the whole sequence of a staged call; `ids_T` is copied into a compact uint32 array."""
        if coords.chain_hash is None or coords.cumulative_hash is None:
            return
        entry = Remembered(np.array(ids_T, dtype=np.uint32), coords.chain_hash, coords.cumulative_hash)
        self._keep(coords.model_call_id, entry)

    async def resolve(self, admission: CaptureAdmission) -> np.ndarray:
        """The parent's cumulative ids, uint32[prev_len].

        Raises `StagingError` (with cause and key) when they cannot be had, or are not those the admission names.
        """
        if admission.required_prefix_token_ids:
            return self._checked_length(np.array(admission.required_prefix_token_ids, dtype=np.uint32), admission)
        entry = self._entries.get(admission.parent_call_id or "")
        if entry is not None and self._proves(entry, admission):
            self._entries.move_to_end(admission.parent_call_id or "")
            self.hits += 1
            return entry.ids
        return await self._fetch(admission)

    def _proves(self, entry: Remembered, admission: CaptureAdmission) -> bool:
        return (
            entry.chain_hash == admission.parent_chain_hash
            and len(entry.ids) == admission.prev_len
            and hash_token_ids(entry.ids) == entry.cumulative_hash
        )

    async def _fetch(self, admission: CaptureAdmission) -> np.ndarray:
        keys = admission.staging_chain
        where = f"{admission.rollout_id}/{admission.model_call_id}"
        if self._source is None or not keys:
            raise StagingError(
                f"The prefix of call {where} is not in this worker's memory and the admission names no staged chain.",
                cause=Cause.MISSING_STAGING_ROW,
            )
        self.fetches += 1
        rows = await self._source.fetch(keys)
        running: str | None = None
        parts: list[np.ndarray] = []
        for key, row in zip(keys, rows, strict=True):
            if isinstance(row, StagingError):
                raise row
            running = self._link(running, key, row, admission)
            parts.append(np.asarray(row.token_ids_delta, dtype=np.uint32))
        if running != admission.parent_chain_hash:
            raise StagingError(
                f"The {len(keys)} staged deltas before call {where} hash to {running}, the admission says "
                f"{admission.parent_chain_hash}.",
                cause=Cause.PREFIX_MISMATCH,
                key=keys[-1],
            )
        ids_T = self._checked_length(np.concatenate(parts), admission)
        self._keep(admission.parent_call_id or "", Remembered(ids_T, running or "", hash_token_ids(ids_T)))
        return ids_T

    def _link(self, running: str | None, key: str, row: StagedCall, admission: CaptureAdmission) -> str:
        if row.rollout_id != admission.rollout_id:
            raise StagingError(
                f"Staged row {key} belongs to rollout {row.rollout_id}, expected {admission.rollout_id}.",
                cause=Cause.INVALID_STAGING_ROW,
                key=key,
            )
        return chain_hash(running, row.token_ids_delta)

    def _checked_length(self, ids_T: np.ndarray, admission: CaptureAdmission) -> np.ndarray:
        if len(ids_T) != admission.prev_len:
            raise StagingError(
                f"The prefix of call {admission.rollout_id}/{admission.model_call_id} has {len(ids_T)} ids, the "
                f"admission says {admission.prev_len}.",
                cause=Cause.PREFIX_MISMATCH,
            )
        return ids_T

    def _keep(self, call_id: str, entry: Remembered) -> None:
        old = self._entries.pop(call_id, None)
        self.bytes_held += entry.ids.nbytes - (old.ids.nbytes if old is not None else 0)
        self._entries[call_id] = entry
        while self.bytes_held > self._capacity_bytes and self._entries:
            _, gone = self._entries.popitem(last=False)
            self.bytes_held -= gone.ids.nbytes
