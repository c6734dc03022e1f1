"""Finalizer: the actor that takes a finished group from staging to the trainer and to disk.

    request -> fetch (one batched read) -> verify -> publish -> parts on disk, fsynced -> clear staging -> answer

Invariants: nothing is cleared before it is both published and on disk; a clear that fails never fails a published
group, a sweeper repeats it; a group that cannot be published or stored raises and keeps its staged rows, so it can be
tried again. Tokens stay in this process, in TransferQueue and on disk: the answer is metadata.
Not here: what is verified (verify), what rows come out (group), when a group is dispatched (controller).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray

from workbench.capture.core import StagingSource
from workbench.capture.staging import TransferQueueSource
from workbench.dataplane import connect
from workbench.errors import FinalizerError, SetupError, WorkbenchError
from workbench.finalizer.group import FinalizationRequest, FinalizedGroup, assemble
from workbench.finalizer.parts import write_group
from workbench.finalizer.rows import clear_rows, publish_rows
from workbench.wire import staging_key

_LOG = logging.getLogger(__name__)

SWEEP_EVERY_S = 5.0


class Finalizer:
    """Finalises groups of one run, several at a time. Needs a running data plane.

    `model_path` is the policy's directory; only its BOS id is read, for placeholders of groups without any prompt.
    `deadline_s` bounds each request to the data plane.
    """

    def __init__(
        self,
        run_dir: str,
        model_path: str | None = None,
        *,
        bos_token_id: int | None = None,
        deadline_s: float = 60.0,
        source: StagingSource | None = None,
        sweep_every_s: float = SWEEP_EVERY_S,
    ) -> None:
        if bos_token_id is None:
            bos_token_id = bos_of(Path(model_path)) if model_path is not None else 0
        self._run_dir = Path(run_dir)
        self._bos_token_id = bos_token_id
        self._deadline_s = deadline_s
        self._source = source or TransferQueueSource(deadline_s)
        self._sweep_every_s = sweep_every_s
        self._unswept: dict[str, list[str]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def ready(self) -> bool:
        """Return once this actor has reached the data plane. Raises ComponentDied or DeadlineExceeded."""
        await connect(timeout_s=self._deadline_s)
        return True

    async def finalize(self, request: dict[str, Any]) -> dict[str, Any]:
        """Finalise one group: `FinalizationRequest` in, `FinalizedGroup` out, both as JSON-like dicts.

        Raises FinalizerError naming the group when it could not be published or stored (its staged rows are kept),
        ComponentDied or DeadlineExceeded when the data plane does not answer, pydantic's ValidationError for a request
        that is not N distinct rollouts.
        """
        group = FinalizationRequest.model_validate(request)
        clock = _Clock()
        keys = group.staging_keys()
        answers = await clock.time("fetch", self._source.fetch(keys))
        staged = dict(zip(keys, answers, strict=True))
        assembly = await clock.time("verify", asyncio.to_thread(assemble, group, staged, self._bos_token_id))
        try:
            published = publish_rows(assembly.rows, group.weight_version, deadline_s=self._deadline_s)
            train_keys = await clock.time("publish", published)
        except Exception as error:
            raise _failed(group, "published", error) from error
        try:
            await clock.time("store", asyncio.to_thread(write_group, self._run_dir, group, staged, assembly))
        except Exception as error:
            # A group that training sees and the run store does not could never be verified afterwards.
            await self._withdraw(train_keys)
            raise _failed(group, "stored", error) from error
        await clock.time("clear", self._clear(group))
        finalized = FinalizedGroup(
            group_id=group.group_id,
            weight_version=group.weight_version,
            train_keys=train_keys,
            rows=assembly.summaries,
            metrics=assembly.metrics,
            timings_s=clock.seconds,
        )
        return finalized.model_dump(mode="json")

    async def unswept(self) -> dict[str, int]:
        """Groups whose staging is not cleared yet -> keys left."""
        return {group_id: len(keys) for group_id, keys in self._unswept.items()}

    async def stop(self) -> None:
        """Try once more to clear what is left, then end the sweeper."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._sweep()

    async def _clear(self, group: FinalizationRequest) -> None:
        # A failed call has no record, but a put that timed out may have left its row behind.
        failed = [staging_key(o.rollout_id, failure.model_call_id) for o in group.rollouts for failure in o.failures]
        keys = [*group.staging_keys(), *failed]
        try:
            await self._source.clear(keys)
        except Exception as error:
            _LOG.warning("staging of group %s is not cleared yet, will be tried again: %s", group.group_id, error)
            self._unswept[group.group_id] = keys
            if self._sweeper is None or self._sweeper.done():
                self._sweeper = asyncio.create_task(self._sweep_until_clean())

    async def _sweep_until_clean(self) -> None:
        while self._unswept:
            await asyncio.sleep(self._sweep_every_s)
            await self._sweep()

    async def _sweep(self) -> None:
        for group_id, keys in list(self._unswept.items()):
            try:
                await self._source.clear(keys)
            except Exception as error:
                _LOG.warning("staging of group %s is still not cleared: %s", group_id, error)
            else:
                self._unswept.pop(group_id, None)

    async def _withdraw(self, train_keys: Sequence[str]) -> None:
        try:
            await clear_rows(train_keys, deadline_s=self._deadline_s)
        except Exception as error:
            _LOG.warning("%d published rows could not be withdrawn: %s", len(train_keys), error)


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def time(self, phase: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds[phase] = time.perf_counter() - began


def _failed(group: FinalizationRequest, what: str, error: Exception) -> WorkbenchError:
    return FinalizerError(
        f"group {group.group_id} ({len(group.rollouts)} rollouts) could not be {what}: {type(error).__name__}: "
        f"{error}; its staged rows are kept, finalise it again"
    )


def bos_of(model_path: Path) -> int:
    """BOS id of a Hugging Face model directory, else its EOS or padding id. Raises SetupError when it names none."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((model_path / name).read_text())
        except FileNotFoundError:
            continue
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
    raise SetupError(f"{model_path} names no BOS, EOS or padding token in config.json; expected a model directory")


FinalizerActor = ray.remote(Finalizer)
