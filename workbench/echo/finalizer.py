"""Echo finalizer: what the finalizer actors do for captured groups, for echoed ones, in the driver's own process.

    request + echoed calls ─▶ N rows ─▶ train partition ─▶ the same parts on disk ─▶ FinalizedGroup
The tokens are in the driver already, so there is nothing to fetch and no actor to send them to; nothing blocks its
loop all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.echo.calls import EchoedCall
from workbench.echo.rows import assemble_echo
from workbench.errors import FinalizerError
from workbench.finalizer.group import Assembly
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup
from workbench.finalizer.parts import write_parts
from workbench.finalizer.rows import clear_rows, publish_rows
from workbench.runs.frames import read_parts


class EchoFinalizer:
    """Finalises groups of one run. `chains` holds the calls of ended rollouts by rollout id, until their group is.

    `deadline_s` bounds each request to the data plane.
    """

    def __init__(self, run_dir: Path, bos_token_id: int, deadline_s: float) -> None:
        self.chains: dict[str, Sequence[EchoedCall]] = {}
        self._run_dir = run_dir
        self._bos_token_id = bos_token_id
        self._deadline_s = deadline_s

    async def finalize(self, request: FinalizationRequest) -> FinalizedGroup:
        """Publish and store one group. Raises FinalizerError naming it, ComponentDied or DeadlineExceeded."""
        chains = {o.rollout_id: self.chains.pop(o.rollout_id, ()) for o in request.rollouts}
        assembly, group = await self._publish(request, chains)
        began = time.perf_counter()
        try:
            await asyncio.to_thread(write_parts, self._run_dir, request, call_rows(request, chains), assembly)
        except Exception as error:
            await clear_rows(group.train_keys, deadline_s=self._deadline_s)
            raise FinalizerError(f"group {request.group_id} could not be stored: {error}") from error
        group.timings_s["store"] = time.perf_counter() - began
        return group

    async def republish(self, request: FinalizationRequest) -> FinalizedGroup:
        """Publish a group again that is stored already. Raises RunStoreError where its calls cannot be read."""
        path = self._run_dir / "calls" / f"{request.group_id}.parquet"
        stored = await asyncio.to_thread(read_parts, "calls", [path])
        _, group = await self._publish(request, stored_chains(stored.to_dicts()))
        return group

    async def _publish(
        self, request: FinalizationRequest, chains: Mapping[str, Sequence[EchoedCall]]
    ) -> tuple[Assembly, FinalizedGroup]:
        began = time.perf_counter()
        assembly = await asyncio.to_thread(assemble_echo, request, chains, self._bos_token_id)
        verified = time.perf_counter()
        keys = await publish_rows(assembly.rows, request.weight_version, deadline_s=self._deadline_s)
        timings_s = {"verify": verified - began, "publish": time.perf_counter() - verified}
        return assembly, FinalizedGroup(
            group_id=request.group_id,
            weight_version=request.weight_version,
            train_keys=keys,
            rows=assembly.summaries,
            metrics=assembly.metrics,
            timings_s=timings_s,
        )


ECHOED = "echoed"
"""`disposition` of a call in the run store that was never captured: its ids came with its response."""


def call_rows(request: FinalizationRequest, chains: Mapping[str, Sequence[EchoedCall]]) -> list[dict[str, Any]]:
    """Rows of the table `calls`: each with its whole prompt and what was sampled, and the call before it as parent."""
    rows = []
    for outcome in request.rollouts:
        chain = chains.get(outcome.rollout_id, ())
        for place, call in enumerate(chain):
            rows.append(
                {
                    "group_id": request.group_id,
                    "rollout_id": outcome.rollout_id,
                    "model_call_id": call.call_id,
                    "parent_call_id": chain[place - 1].call_id if place else None,
                    "response_id": call.call_id,
                    "manifest_index": place,
                    "disposition": ECHOED,
                    "mode": "text",
                    "on_chain": True,
                    "terminal": place == len(chain) - 1,
                    "weight_version": call.weight_version,
                    "prev_len": 0,
                    "delta_len": int(call.ran.size),
                    "cum_len": int(call.ran.size),
                    "carry_tokens": int(call.prompt_ids.size),
                    "sampled_tokens": int(call.sampled_ids.size),
                    "finish_reason": call.finish_reason,
                    "token_ids": call.ran,
                    "token_mask": np.repeat([0, 1], [call.prompt_ids.size, call.sampled_ids.size]),
                    "logprobs": np.concatenate([np.zeros(call.prompt_ids.size, np.float32), call.logprobs]),
                }
            )
    return rows


def stored_chains(calls: Sequence[Mapping[str, Any]]) -> dict[str, list[EchoedCall]]:
    """The chains by rollout id, read back from rows of the table `calls`."""
    chains: dict[str, list[EchoedCall]] = {}
    for row in sorted(calls, key=lambda row: row["manifest_index"]):
        carry = row["carry_tokens"]
        ids_T = np.asarray(row["token_ids"], dtype=np.uint64)
        call = EchoedCall(
            call_id=row["model_call_id"],
            messages=(),
            answer={},
            prompt_ids=ids_T[:carry],
            sampled_ids=ids_T[carry:],
            logprobs=np.asarray(row["logprobs"], dtype=np.float32)[carry:],
            finish_reason=row["finish_reason"],
            weight_version=row["weight_version"],
        )
        chains.setdefault(row["rollout_id"], []).append(call)
    return chains
