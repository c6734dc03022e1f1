"""Prefix store: what it remembers is proved before it is used; spoiling or losing it costs one read, not a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.capture.core import CaptureCore
from workbench.capture.prefix import PrefixStore
from workbench.capture.staging import MemorySink
from workbench.errors import StagingError
from workbench.wire import CaptureAdmission, Cause, CommitCoords

IDS = [1, 5, 9, 13, 2]


def staged_root(sink: MemorySink) -> CommitCoords:
    core = CaptureCore(sink, lambda: 0, sink_timeout_s=None)
    call = core.begin(CaptureAdmission(rollout_id="r.0.0.0", model_call_id="root", mode="text"))
    return core.complete(call, prompt_token_ids=IDS[:3], generated_token_ids=IDS[3:], logprobs=[-0.5, -0.5])


def child_of(coords: CommitCoords, **changed: Any) -> CaptureAdmission:
    fields = {
        "rollout_id": "r.0.0.0",
        "model_call_id": "child",
        "parent_call_id": "root",
        "prev_len": coords.cum_len,
        "mode": "token_in",
        "staging_chain": [coords.staging_key],
        "parent_chain_hash": coords.chain_hash,
    }
    return CaptureAdmission.model_validate(fields | changed)


@pytest.mark.parametrize(
    ("remembered", "fetches"),
    [(IDS, 0), (None, 1), ([1, 5, 9, 13, 3], 1), (IDS[:4], 1)],
    ids=["whole", "nothing", "a changed id", "too short"],
)
async def test_what_is_remembered_is_proved_before_it_is_used(remembered: list[int] | None, fetches: int) -> None:
    sink = MemorySink()
    coords = staged_root(sink)
    store = PrefixStore(sink, 1 << 20)
    if remembered is not None:
        store.remember(coords, np.array(remembered))
    assert (await store.resolve(child_of(coords))).tolist() == IDS
    assert (store.fetches, store.hits) == (fetches, 1 - fetches)


@pytest.mark.parametrize("changed", [{"parent_chain_hash": "0" * 64}, {"prev_len": 4}])
async def test_neither_memory_nor_storage_answers_for_another_parent(changed: dict[str, Any]) -> None:
    sink = MemorySink()
    coords = staged_root(sink)
    store = PrefixStore(sink, 1 << 20)
    store.remember(coords, np.array(IDS))
    with pytest.raises(StagingError) as error:
        await store.resolve(child_of(coords, **changed))
    assert error.value.cause == Cause.PREFIX_MISMATCH
    assert store.hits == 0


def test_a_call_that_was_not_staged_is_not_remembered() -> None:
    core = CaptureCore(MemorySink(), lambda: 0, sink_timeout_s=None)
    call = core.begin(CaptureAdmission(rollout_id="r.0.0.0", model_call_id="root", mode="text"))
    store = PrefixStore(None, 1 << 20)
    store.remember(core.fail(call, Cause.SINK_ERROR, "disk full"), np.array(IDS))
    assert store.bytes_held == 0


async def test_a_prefix_that_nobody_holds_and_one_of_another_rollout_are_named() -> None:
    sink = MemorySink()
    coords = staged_root(sink)
    with pytest.raises(StagingError, match="names no staged chain") as error:
        await PrefixStore(None, 1 << 20).resolve(child_of(coords))
    assert error.value.cause == Cause.MISSING_STAGING_ROW
    with pytest.raises(StagingError, match=r"belongs to rollout r\.0\.0\.0, expected r\.0\.1\.0") as error:
        await PrefixStore(sink, 1 << 20).resolve(child_of(coords, rollout_id="r.0.1.0"))
    assert error.value.cause == Cause.INVALID_STAGING_ROW


def test_what_is_remembered_is_bounded_and_the_longest_unused_goes_first() -> None:
    sink = MemorySink()
    coords = staged_root(sink)
    store = PrefixStore(sink, capacity_bytes=2 * 4 * len(IDS))
    for call_id in ("a", "b", "c"):
        store.remember(coords.model_copy(update={"model_call_id": call_id}), np.array(IDS))
    assert store.bytes_held == 2 * 4 * len(IDS)
    assert list(store._entries) == ["b", "c"]
    store.remember(coords, np.arange(100))
    assert store.bytes_held == 0, "what is larger than the whole memory is not kept"
