"""Finalizer: the actor that takes a finished group from staging to the trainer and to disk.

    request -> fetch (one batched read) -> verify -> publish -> parts on disk, fsynced -> clear staging -> answer

`reconcile` is the same for a group that another finalizer had begun when it was lost: what that one published or stored
is found by reading it, and only what is missing is done.
Where rows carry routed experts, a group that cannot tell their shape leaves by its one exit, without rows.
Invariants: nothing is cleared before it is both published and on disk; a clear that fails never fails a published
group, the sweeper finds what is left; a group that cannot be published or stored raises and keeps its staged rows, so
it can be tried again. Tokens stay in this process, in TransferQueue and on disk: the answer is metadata.
Not here: what is verified (verify), what rows come out (group), which actor gets a group (pool).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from workbench.capture.core import StagingSource
from workbench.capture.staging import TransferQueueSource
from workbench.dataplane import connect, drain_clears
from workbench.errors import FinalizerError, WorkbenchError
from workbench.finalizer.bos import bos_of
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup
from workbench.finalizer.parts import write_group
from workbench.finalizer.routes import RouteDims, RouteSettings
from workbench.finalizer.rows import Columns, GroupRow, clear_rows, publish_rows, published_rows
from workbench.finalizer.stored import read_group
from workbench.wire import staging_key

_LOG = logging.getLogger(__name__)


class Finalizer:
    """Finalises groups of one run, several at a time. Needs a running data plane.

    `model_path` is the policy's directory; only its BOS id is read, for placeholders of groups without any prompt.
    `deadline_s` bounds each request to the data plane. `routes`: the fields of `RouteSettings`; None: rows have none.
    """

    def __init__(
        self,
        run_dir: str,
        model_path: str | None = None,
        *,
        bos_token_id: int | None = None,
        deadline_s: float = 60.0,
        source: StagingSource | None = None,
        routes: dict[str, Any] | None = None,
    ) -> None:
        if bos_token_id is None:
            bos_token_id = bos_of(Path(model_path)) if model_path is not None else 0
        self._run_dir = Path(run_dir)
        self._bos_token_id = bos_token_id
        self._deadline_s = deadline_s
        self._source = source or TransferQueueSource(deadline_s)
        self._routes = RouteSettings(**routes) if routes is not None else None
        self._route_dims: RouteDims | None = None

    async def ready(self, timeout_s: float = 60.0) -> bool:
        """Return once this actor has reached the data plane, its heavy imports included. Raises ComponentDied or
        DeadlineExceeded."""
        await connect(timeout_s=timeout_s)
        await asyncio.to_thread(import_module, "pyarrow.parquet")  # what the first part would wait for
        return True

    async def finalize(self, request: dict[str, Any]) -> dict[str, Any]:
        """Finalise one group: `FinalizationRequest` in, `FinalizedGroup` out, both as JSON-like dicts.

        Raises FinalizerError naming the group when it could not be published or stored (its staged rows are kept),
        ComponentDied or DeadlineExceeded when the data plane does not answer, pydantic's ValidationError for a request
        that is not N distinct rollouts.
        """
        group = FinalizationRequest.model_validate(request)
        return (await self._complete(group, _Clock(), {})).model_dump(mode="json")

    async def reconcile(self, request: dict[str, Any]) -> dict[str, Any]:
        """`finalize` for a group whose outcome is unknown, because whoever finalised it was lost.

        Stored groups are answered for from their parts, and their rows published again only where they are not in the
        train partition; of other groups only what is missing is done. `timings_s` has `reconcile` too. Raises as
        `finalize` does, and RunStoreError when the group's parts are there and unreadable.
        """
        group = FinalizationRequest.model_validate(request)
        clock = _Clock()
        keys = [outcome.rollout_id for outcome in group.rollouts]
        stored = await clock.time("reconcile", asyncio.to_thread(read_group, self._run_dir, group.group_id))
        published = await clock.time("reconcile", published_rows(keys, deadline_s=self._deadline_s))
        if stored is None or stored.train_keys != keys:
            return (await self._complete(group, clock, published)).model_dump(mode="json")
        direct = self._routes is None or self._routes.mode == "direct"
        rows = stored.rows if direct else [replace(row, routes=None) for row in stored.rows]
        await self._publish(rows, group, clock, published)
        await clock.time("clear", self._clear(group))
        return stored.finalized(group.weight_version, clock.seconds).model_dump(mode="json")

    async def stop(self) -> None:
        """Let clears that go on in the background come to their end."""
        await drain_clears(self._deadline_s)

    async def _complete(
        self, group: FinalizationRequest, clock: _Clock, published: Mapping[str, Columns]
    ) -> FinalizedGroup:
        """Everything from staging to the answer; rows in `published` that are right stay as they are."""
        keys = group.staging_keys()
        answers = await clock.time("fetch", self._source.fetch(keys))
        staged = dict(zip(keys, answers, strict=True))
        verify = asyncio.to_thread(assemble, group, staged, self._bos_token_id, self._routes, self._route_dims)
        assembly = await clock.time("verify", verify)
        self._route_dims = assembly.route_dims or self._route_dims
        if assembly.exit_cause is not None:
            await clock.time("clear", self._clear(group))
            return FinalizedGroup(
                group_id=group.group_id,
                weight_version=group.weight_version,
                train_keys=[],
                rows=[],
                metrics=assembly.metrics,
                timings_s=clock.seconds,
                exit_cause=assembly.exit_cause,
            )
        train_keys = await self._publish(assembly.rows, group, clock, published)
        try:
            await clock.time("store", asyncio.to_thread(write_group, self._run_dir, group, staged, assembly))
        except Exception as error:
            # A group that training sees and the run store does not could never be verified afterwards.
            await self._withdraw(train_keys)
            raise _failed(group, "stored", error) from error
        await clock.time("clear", self._clear(group))
        return FinalizedGroup(
            group_id=group.group_id,
            weight_version=group.weight_version,
            train_keys=train_keys,
            rows=assembly.summaries,
            metrics=assembly.metrics,
            timings_s=clock.seconds,
        )

    async def _publish(
        self, rows: Sequence[GroupRow], group: FinalizationRequest, clock: _Clock, published: Mapping[str, Columns]
    ) -> list[str]:
        put = publish_rows(rows, group.weight_version, deadline_s=self._deadline_s, published=published)
        try:
            return await clock.time("publish", put)
        except Exception as error:
            raise _failed(group, "published", error) from error

    async def _clear(self, group: FinalizationRequest) -> None:
        # A failed call has no record, but a put that timed out may have left its row behind.
        failed = [staging_key(o.rollout_id, failure.model_call_id) for o in group.rollouts for failure in o.failures]
        try:
            await self._source.clear([*group.staging_keys(), *failed])
        except Exception as error:
            _LOG.warning("staging of group %s is not cleared, left to the sweeper: %s", group.group_id, error)

    async def _withdraw(self, train_keys: Sequence[str]) -> None:
        try:
            await clear_rows(train_keys, deadline_s=self._deadline_s)
        except Exception as error:
            _LOG.warning("%d published rows could not be withdrawn: %s", len(train_keys), error)


class _Clock:
    """Seconds by phase; a phase that comes twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def time(self, phase: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def _failed(group: FinalizationRequest, what: str, error: Exception) -> WorkbenchError:
    return FinalizerError(
        f"group {group.group_id} ({len(group.rollouts)} rollouts) could not be {what}: {type(error).__name__}: "
        f"{error}; its staged rows are kept, finalise it again"
    )


FinalizerActor = ray.remote(Finalizer)
