"""Ids: shown as short as they stay telling."""

from __future__ import annotations


def short_id(call_id: str, rollout_id: str) -> str:
    """A call id without its rollout's id; a long one (uuid4 hex) as its first eight characters."""
    if call_id.startswith(rollout_id) and len(call_id) > len(rollout_id):
        return call_id[len(rollout_id) :].lstrip("-./_") or call_id
    return call_id if len(call_id) <= 10 else call_id[:8]
