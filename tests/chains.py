"""Chains: build staged calls, manifest rows and receipts of a rollout with right digests, for tests of any room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.wire import (
    CallRecord,
    RolloutReceipt,
    StagedCall,
    chain_hash,
    extras_digest,
    hash_token_ids,
    staged_call_digest,
    staging_key,
)


class Chain:
    """Grows calls of one rollout. `call` returns the staged call; `records` and `staged` keep them in order."""

    def __init__(self, rollout_id: str, *, seed: int = 0, weight_version: int = 0) -> None:
        self.rollout_id = rollout_id
        self.weight_version = weight_version
        self._rng = np.random.default_rng(seed)
        self.ids: dict[str, np.ndarray] = {}
        self.staged: list[StagedCall] = []
        self.records: list[CallRecord] = []

    def call(
        self,
        parent: str | None = None,
        *,
        carry: int = 5,
        generated: int = 7,
        extras: dict[str, Any] | None = None,
        weight_version: int | None = None,
        token_ids: Sequence[int] | None = None,
        call_id: str | None = None,
    ) -> StagedCall:
        call_id = call_id or f"c{len(self.staged)}"
        before = self.ids[parent] if parent else np.zeros(0, np.uint64)
        delta = self._rng.integers(0, 49152, carry + generated).astype(np.uint64)
        if token_ids is not None:
            delta = np.array(token_ids, dtype=np.uint64)
        mask = np.r_[np.zeros(len(delta) - generated), np.ones(generated)].astype(np.float32)
        logprobs = (-self._rng.random(len(delta)) * mask).astype(np.float32) + np.float32(0.0)
        self.ids[call_id] = np.concatenate([before, delta])
        parent_chain = next((c.chain_hash for c in self.staged if c.model_call_id == parent), None)
        fields = {
            "schema_version": 2,
            "digest_version": 2,
            "extras_digest_version": 1,
            "rollout_id": self.rollout_id,
            "model_call_id": call_id,
            "parent_call_id": parent,
            "mode": "token_in" if parent else "text",
            "prev_len": len(before),
            "delta_len": len(delta),
            "cum_len": len(before) + len(delta),
            "weight_version": self.weight_version if weight_version is None else weight_version,
            "token_ids_delta": delta,
            "token_mask_delta": mask,
            "generation_log_probs_delta": logprobs,
            "extras_digest": extras_digest(extras),
            "chain_hash": chain_hash(parent_chain, delta),
            "cumulative_hash": hash_token_ids(self.ids[call_id]),
        }
        staged = StagedCall(**fields, digest=staged_call_digest(**fields), extras=extras)
        record = {name: getattr(staged, name) for name in CallRecord.model_fields if name in StagedCall.model_fields}
        self.staged.append(staged)
        self.records.append(
            CallRecord(
                **record,
                staging_key=staging_key(self.rollout_id, call_id),
                response_id=f"resp-{call_id}",
                admitted_at=float(len(self.records)),
            )
        )
        return staged

    def receipt(self, terminal: str | None, **fields: Any) -> RolloutReceipt:
        """A receipt over all calls so far; `terminal=None` leaves the trajectory without an end."""
        if terminal is not None:
            fields = {"terminal_selection": "content", **fields}
        return RolloutReceipt(
            rollout_id=self.rollout_id,
            reward=fields.pop("reward", 1.0),
            terminal_model_call_id=terminal,
            manifest=self.records,
            **fields,
        )
