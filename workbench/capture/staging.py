"""Staging: where a call's delta waits between the worker that sampled it and the finalizer that verifies it.

    sink.stage_async(call)  ->  TransferQueue partition `staging`, key <rollout>/<call>  ->  source.fetch(keys)

Tags are `rollout_id` and `weight_version`, nothing else, and prove nothing.
Invariants: a staged call is acknowledged by the storage unit when `stage` returns; `fetch` answers for every key that
was asked, in order, and a row it answers with is the one asked for, bit for bit.
Not here: a row's columns (staged_row), whether the digests are right (`workbench.finalizer.verify`): a changed token
comes through and fails there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench import dataplane
from workbench.capture.staged_row import (
    COLUMNS,
    ROUTES,
    has_routes,
    identity,
    missing_row,
    pack,
    tags_of,
    unpack,
)
from workbench.errors import DeadlineExceeded, StagingError, WorkbenchError
from workbench.wire import Cause, StagedCall

MOST_READS = 16
"""Requests of one source at a time."""
SLOW_S = 1.0
"""A read that fails faster than this failed for a row; slower, for a storage unit that did not answer."""


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
        return [_try_unpack(key, self.rows[key]) if key in self.rows else missing_row(key) for key in keys]

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

        async def staged() -> None:
            try:
                await self.stage_async(call)
            finally:  # with this loop a clean-up would end half-way
                await asyncio.gather(*self._cleanups)

        asyncio.run(staged())

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

    A read that fails is halved until what made it fail stands alone, so one bad row among n costs about 2 log n reads.
    `reads` counts requests to TransferQueue: 1 a fetch as long as every row is there and alike.
    """

    def __init__(self, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._reading = asyncio.Semaphore(MOST_READS)
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
        began = time.monotonic()
        try:
            rows = await self._get(keys)
        except WorkbenchError:
            await dataplane.check_alive()  # rather than masking a whole group for a dead controller
            return {}
        except Exception:  # no key known, one is a tag without a row, a storage unit is gone
            # A storage unit that does not answer fails each read after a wait: rather once more than at every halving.
            return {} if time.monotonic() - began > SLOW_S else await self._read_halves(keys)
        if any(name not in row for row in rows for name in COLUMNS):
            return await self._read_halves(keys)  # one row lacks a column, so TransferQueue left it out of all of them
        if len(rows) == len(keys):
            return dict(zip(keys, rows, strict=True))
        # Some keys had no row and were left out without a word. Only the rows themselves say which are which.
        named = [(identity(row), row) for row in rows]
        count, wanted = Counter(name for name, _ in named), set(keys)
        return {name: row for name, row in named if name in wanted and count[name] == 1}

    async def _read_halves(self, keys: list[str]) -> dict[str, dict[str, np.ndarray]]:
        """What the two halves of a failed read give; a single key is left to `_read_alone`, which knows why."""
        if len(keys) < 2:
            return {}
        middle = len(keys) // 2
        first, second = await asyncio.gather(self._read_together(keys[:middle]), self._read_together(keys[middle:]))
        return first | second

    async def _read_alone(self, key: str) -> StagedCall | StagingError:
        try:
            rows = await self._get([key])
        except DeadlineExceeded:
            await dataplane.check_alive()
            return missing_row(key)
        except ValueError:  # not found, or a tag without a row
            return missing_row(key)
        except WorkbenchError:
            raise
        except Exception as error:
            return StagingError(
                f"staged call {key} could not be read: {error}", cause=Cause.MISSING_STAGING_ROW, key=key
            )
        return _try_unpack(key, rows[0]) if len(rows) == 1 else missing_row(key)

    async def _add_routes(self, columns: dict[str, dict[str, np.ndarray]]) -> None:
        # In a batch where some calls have no routes, TransferQueue drops the column from all.
        lacking = [key for key, row in columns.items() if ROUTES not in row and has_routes(row)]
        if not lacking:
            return
        try:
            rows = await self._get(lacking, [*COLUMNS, ROUTES])
        except Exception:
            rows = []
        if len(rows) == len(lacking):
            columns.update(zip(lacking, rows, strict=True))

    async def _get(self, keys: list[str], fields: list[str] | None = None) -> list[dict[str, np.ndarray]]:
        async with self._reading:
            self.reads += 1
            batch = await dataplane.get(dataplane.STAGING, keys, deadline_s=self._deadline_s, fields=fields)
        return dataplane.split_rows(batch)


def _try_unpack(key: str, columns: Mapping[str, np.ndarray]) -> StagedCall | StagingError:
    try:
        return unpack(key, columns)
    except StagingError as error:
        return error
