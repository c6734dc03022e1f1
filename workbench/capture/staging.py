"""Staging: where a call's delta waits between the worker that sampled it and the finalizer that verifies it.

    sink.stage_async(call)  ->  TransferQueue partition `staging`, key <rollout>/<call>  ->  source.fetch(keys)

A row is few columns, because every column costs at put and get: `token_ids` int64[T] (the bits of the wire's uint64),
`logprobs` float32[G] (the G generated tokens; a carry's are 0 by contract), `meta` uint8[...] (JSON of the
other fields) and, where the call has routed experts, `routes` [T, layers, topk] in its wire dtype. Tags are
`rollout_id` and `weight_version`, nothing else, and prove nothing.
Invariants: `unpack(pack(call)) == call`, bit for bit; a staged call is acknowledged by the storage unit when `stage`
returns; `fetch` answers for every key that was asked, in order, and a row it answers with is the one asked for.
Not here: whether the digests are right (`workbench.finalizer.verify`): a changed token comes through and fails there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from workbench.capture import dataplane
from workbench.errors import DeadlineExceeded, StagingError, WireError, WorkbenchError
from workbench.wire import Cause, StagedCall, decode_routes, encode_routes, staging_key
from workbench.wire.extras import ROUTED_EXPERTS

if TYPE_CHECKING:
    from tensordict import TensorDict

_COLUMNS = ("token_ids", "logprobs", "meta")
_ROUTES = "routes"
_ARRAYS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")
_INTEGERS = (
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
)
_TEXTS = ("rollout_id", "model_call_id", "mode", "digest", "extras_digest", "chain_hash", "cumulative_hash")
_FIELDS = {*_INTEGERS, *_TEXTS, "parent_call_id", "extras"}


def tags_of(call: StagedCall) -> dict[str, Any]:
    """The fixed tag schema of the staging partition."""
    return {"rollout_id": call.rollout_id, "weight_version": call.weight_version}


def pack(call: StagedCall) -> dict[str, np.ndarray]:
    """Columns of one staged call (see the head). Raises StagingError when the delta is not carry, then generation."""
    mask_T = np.asarray(call.token_mask_delta)
    carry = int(np.count_nonzero(mask_T == 0))
    logprobs_T = np.asarray(call.generation_log_probs_delta, dtype=np.float32)
    if mask_T[:carry].any() or (mask_T[carry:] != 1).any() or logprobs_T[:carry].view(np.uint32).any():
        raise _invalid(
            call.staging_key, "its mask is not carry (0) then generation (1), with log-prob exactly 0.0 on the carry"
        )
    meta = {name: getattr(call, name) for name in _FIELDS}
    columns = {
        "token_ids": np.asarray(call.token_ids_delta, dtype=np.uint64).view(np.int64),
        "logprobs": logprobs_T[carry:],
    }
    envelope = (call.extras or {}).get(ROUTED_EXPERTS)
    if isinstance(envelope, str):
        values = decode_routes(envelope).values
        if encode_routes(values) == envelope:  # a form that would come back differently stays in the metadata
            columns[_ROUTES] = values
            meta["extras"] = {k: v for k, v in call.extras.items() if k != ROUTED_EXPERTS}
            meta[_ROUTES] = True
    columns["meta"] = np.frombuffer(orjson.dumps(meta), dtype=np.uint8)
    return columns


def unpack(key: str, columns: Mapping[str, np.ndarray]) -> StagedCall:
    """The staged call under `key`, digests unchecked. Raises StagingError(invalid_staging_row) for any other row."""
    meta = _read_meta(key, columns)
    ids_T, logprobs_G = columns["token_ids"], columns["logprobs"]
    for name, column, dtype in (("token_ids", ids_T, np.int64), ("logprobs", logprobs_G, np.float32)):
        if column.dtype != dtype or column.ndim != 1:
            raise _invalid(key, f"{name} must be {np.dtype(dtype)}[T], got {column.dtype}{list(column.shape)}")
    carry = ids_T.size - logprobs_G.size
    if carry < 0:
        raise _invalid(key, f"it has {logprobs_G.size} log-probs for {ids_T.size} token ids")
    if meta.pop(_ROUTES, None):
        if _ROUTES not in columns:
            raise _invalid(key, "its routed experts did not come back with it")
        try:
            meta["extras"] = {**(meta["extras"] or {}), ROUTED_EXPERTS: encode_routes(columns[_ROUTES])}
        except WireError as error:
            raise _invalid(key, f"its routed experts cannot be read: {error}") from error
    mask_T = np.ones(ids_T.size, dtype=np.float32)
    mask_T[:carry] = 0.0
    logprobs_T = np.zeros(ids_T.size, dtype=np.float32)
    logprobs_T[carry:] = logprobs_G
    arrays = dict(zip(_ARRAYS, (ids_T.view(np.uint64), mask_T, logprobs_T), strict=True))
    return StagedCall.unverified(**meta, **arrays)


def _read_meta(key: str, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    absent = [name for name in _COLUMNS if name not in columns]
    if absent:
        raise _invalid(key, f"it has no column {', '.join(absent)}")
    meta_column = columns["meta"]
    try:
        meta = orjson.loads(np.ascontiguousarray(meta_column, dtype=np.uint8).tobytes())
    except (orjson.JSONDecodeError, TypeError, ValueError) as error:
        raise _invalid(key, f"its metadata is not JSON: {error}") from error
    if not isinstance(meta, dict) or _FIELDS - meta.keys() or meta.keys() - _FIELDS - {_ROUTES}:
        raise _invalid(key, f"its metadata must have exactly the fields {', '.join(sorted(_FIELDS))}")
    well_typed = (
        all(type(meta[name]) is int and meta[name] >= 0 for name in _INTEGERS)
        and all(isinstance(meta[name], str) for name in _TEXTS)
        and isinstance(meta["parent_call_id"], str | None)
        and isinstance(meta["extras"], dict | None)
    )
    if not well_typed:
        raise _invalid(key, "its metadata has a field of another type than the record's")
    identity = f"{meta['rollout_id']}/{meta['model_call_id']}"
    if identity != key:
        raise _invalid(key, f"it says that it is call {identity}")
    return meta


def _invalid(key: str, why: str) -> StagingError:
    return StagingError(
        f"staged call {key} cannot be used: {why}; its rollout is masked, see `workbench inspect`",
        cause=Cause.INVALID_STAGING_ROW,
        key=key,
    )


def _missing(key: str) -> StagingError:
    return StagingError(
        f"staged call {key} is not in TransferQueue, though it was acknowledged once; a storage unit that died takes "
        f"its rows along, or the group was cleared before",
        cause=Cause.MISSING_STAGING_ROW,
        key=key,
    )


class MemorySink:
    """Sink and source in this process's memory: rows are packed and unpacked as in TransferQueue, nothing is shared.

    `reads` counts batched reads, `rows` holds the packed columns by key.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.reads = 0

    def stage(self, call: StagedCall) -> None:
        self.rows[call.staging_key] = {name: column.copy() for name, column in pack(call).items()}
        self.tags[call.staging_key] = tags_of(call)

    async def stage_async(self, call: StagedCall) -> None:
        self.stage(call)

    async def fetch(self, keys: Sequence[str]) -> list[StagedCall | StagingError]:
        self.reads += bool(keys)
        return [_try_unpack(key, self.rows[key]) if key in self.rows else _missing(key) for key in keys]

    async def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)


class TransferQueueSink:
    """Stages into TransferQueue. `deadline_s` bounds one put, beyond TransferQueue's own attempts."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._cleanups: set[asyncio.Task[None]] = set()

    def stage(self, call: StagedCall) -> None:
        """`stage_async` for callers without an event loop; it pays for a connection of its own each time."""
        asyncio.run(self.stage_async(call))

    async def stage_async(self, call: StagedCall) -> None:
        """Return when the row is acknowledged. Raises StagingError with cause sink_timeout or sink_error otherwise."""
        import torch
        from tensordict import TensorDict

        key = call.staging_key
        columns = {name: torch.from_numpy(column[None].copy()) for name, column in pack(call).items()}
        try:
            await dataplane.connect()
            row = TensorDict(columns, batch_size=1)
            await dataplane.put(dataplane.STAGING, [key], row, [tags_of(call)], deadline_s=self._deadline_s)
        except DeadlineExceeded as error:
            self._drop_phantom(key)
            raise StagingError(f"call {key} was not staged: {error}", cause=Cause.SINK_TIMEOUT, key=key) from error
        except asyncio.CancelledError:
            self._drop_phantom(key)
            raise
        except Exception as error:
            self._drop_phantom(key)
            raise StagingError(
                f"call {key} was not staged: {type(error).__name__}: {error}", cause=Cause.SINK_ERROR, key=key
            ) from error

    def _drop_phantom(self, key: str) -> None:
        # A put that failed leaves its key listed without a readable row, for ever.
        async def drop() -> None:
            try:
                await dataplane.clear(dataplane.STAGING, [key], deadline_s=self._deadline_s)
            except Exception:  # the call is reported as failed already, and the key says nothing about storage
                return

        task = asyncio.ensure_future(drop())
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)


class TransferQueueSource:
    """Reads staged calls back: one batched, deduplicated read, then the comparison that TransferQueue does not make.

    `reads` counts requests to TransferQueue: 1 a fetch as long as every row is there and alike.
    """

    def __init__(self, deadline_s: float = 60.0, max_single_reads: int = 16) -> None:
        self._deadline_s = deadline_s
        self._singles = asyncio.Semaphore(max_single_reads)
        self.reads = 0

    async def fetch(self, keys: Sequence[str]) -> list[StagedCall | StagingError]:
        """One entry a key, in the order asked: the call, or why it cannot be had (missing, invalid).

        Raises ComponentDied when the data plane is not running or its controller does not answer.
        """
        wanted = list(dict.fromkeys(keys))
        if not wanted:
            return []
        await dataplane.connect()
        columns = await self._read_together(wanted)
        alone = [key for key in wanted if key not in columns]
        found = dict(zip(alone, await asyncio.gather(*map(self._read_alone, alone)), strict=True))
        await self._add_routes(columns)
        answers = {key: found[key] if key in found else _try_unpack(key, columns[key]) for key in wanted}
        return [answers[key] for key in keys]

    async def clear(self, keys: Sequence[str]) -> None:
        """Remove rows, unknown keys included. Raises DeadlineExceeded; the clear then goes on in the background."""
        await dataplane.connect()
        await dataplane.clear(dataplane.STAGING, list(dict.fromkeys(keys)), deadline_s=self._deadline_s)

    async def _read_together(self, keys: list[str]) -> dict[str, dict[str, np.ndarray]]:
        """Columns by key of every row that the batched read gave and that is told apart for certain."""
        try:
            rows = await self._get(keys)
        except WorkbenchError:
            await dataplane.check_alive()  # rather than masking a whole group for a dead controller
            return {}
        except Exception:  # no key known, one is a tag without a row, a storage unit is gone: read one by one
            return {}
        if any(name not in row for row in rows for name in _COLUMNS):
            return {}  # one row lacks a column, so TransferQueue left it out of all of them
        if len(rows) == len(keys):
            return dict(zip(keys, rows, strict=True))
        # Some keys had no row and were left out without a word. Only the rows themselves say which are which.
        named = [(_identity(row), row) for row in rows]
        count = Counter(name for name, _ in named)
        return {name: row for name, row in named if name in set(keys) and count[name] == 1}

    async def _read_alone(self, key: str) -> StagedCall | StagingError:
        async with self._singles:
            try:
                rows = await self._get([key])
            except DeadlineExceeded:
                await dataplane.check_alive()
                return _missing(key)
            except ValueError:  # not found, or a tag without a row
                return _missing(key)
            except WorkbenchError:
                raise
            except Exception as error:
                return StagingError(
                    f"staged call {key} could not be read: {error}", cause=Cause.MISSING_STAGING_ROW, key=key
                )
        return _try_unpack(key, rows[0]) if len(rows) == 1 else _missing(key)

    async def _add_routes(self, columns: dict[str, dict[str, np.ndarray]]) -> None:
        # In a batch where some calls have no routes, TransferQueue drops the column from all.
        lacking = [key for key, row in columns.items() if _ROUTES not in row and _has_routes(row)]
        if not lacking:
            return
        try:
            rows = await self._get(lacking, [*_COLUMNS, _ROUTES])
        except Exception:
            rows = []
        if len(rows) == len(lacking):
            columns.update(zip(lacking, rows, strict=True))

    async def _get(self, keys: list[str], fields: list[str] | None = None) -> list[dict[str, np.ndarray]]:
        self.reads += 1
        batch = await dataplane.get(dataplane.STAGING, keys, deadline_s=self._deadline_s, fields=fields)
        return split_rows(batch)


def split_rows(batch: TensorDict) -> list[dict[str, np.ndarray]]:
    """Rows of a TransferQueue batch as numpy columns, whatever container each column came back in."""
    names = sorted(map(str, batch.keys()))
    if not names:
        return []
    columns = {}
    for name in names:
        column = batch.get(name)
        rows = column.unbind() if hasattr(column, "unbind") and hasattr(column, "dtype") else column.tolist()
        columns[name] = [np.asarray(row) for row in rows]
    return [{name: columns[name][i] for name in names} for i in range(batch.batch_size[0])]


def _try_unpack(key: str, columns: Mapping[str, np.ndarray]) -> StagedCall | StagingError:
    try:
        return unpack(key, columns)
    except StagingError as error:
        return error


def _identity(columns: Mapping[str, np.ndarray]) -> str | None:
    try:
        meta = orjson.loads(columns["meta"].tobytes())
        return staging_key(meta["rollout_id"], meta["model_call_id"])
    except (KeyError, TypeError, ValueError):
        return None


def _has_routes(columns: Mapping[str, np.ndarray]) -> bool:
    try:
        return orjson.loads(columns["meta"].tobytes()).get(_ROUTES) is not None
    except (ValueError, AttributeError):
        return False
