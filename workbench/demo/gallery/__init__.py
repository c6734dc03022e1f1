"""Gallery: every cause of the vocabulary, provoked on purpose and named by the product itself.

    async with open_gallery() as gallery:       a bench with a worker, a gateway and a disk that can be told to fail
        gallery.findings                        one row a cause: how it was provoked, what was said of it, where
        gallery.run                             the same rollouts as an ordinary run, for the inspectors

Each exhibit is played by the campaign's own rollout player against the real gateway and capture, receives its receipt
from the ledger room and is verified by the finalizer; nothing here says which cause is found. Invariant: every cause is
either an exhibit or in `UNREACHED` with the reason why it cannot be shown, and a test compares the two with the
vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import polars as pl

from workbench import runs
from workbench.campaign.environments import AgentResult, Reward, Task
from workbench.campaign.rollouts import RolloutPlan, RolloutPlayer
from workbench.demo.bench import Bench, open_bench
from workbench.demo.gallery.calls import CUSTODY, DRIFT, STAGING, FaultySink
from workbench.demo.gallery.damage import RECEIPTS, STORAGE, VERIFICATION
from workbench.demo.gallery.exhibit import Case, Exhibit, Hand
from workbench.demo.gallery.table import FamilyTable
from workbench.finalizer.messages import RolloutOutcome, RowSummary
from workbench.gateway.upstream import Acknowledgement
from workbench.wire import Cause, StagedCall

FAMILIES: dict[str, tuple[Exhibit, ...]] = {
    "custody": CUSTODY + RECEIPTS,
    "staging": STAGING + STORAGE,
    "drift": DRIFT,
    "verification": VERIFICATION,
}
_PLACES = [(family, index) for family, exhibits in FAMILIES.items() for index in range(len(exhibits))]
_NO_ROUTES = "concerns the routed experts of a mixture-of-experts model, which the scripted policy is not"
UNREACHED: dict[Cause, str] = {
    Cause.WRONG_MODEL_CALL_ID: "a stored call under another id is found before, as snapshot_identity_mismatch",
    Cause.ROW_COUNT_MISMATCH: "a stored call that does not come back has a cause of its own, missing_staging_row",
    Cause.EMPTY_TRAINING_ROW: "a call without a sampled token is found before, as empty_generation",
    Cause.ROUTE_MISSING: _NO_ROUTES,
    Cause.ROUTE_LENGTH_MISMATCH: _NO_ROUTES,
    Cause.ROUTE_DIGEST_MISMATCH: _NO_ROUTES,
    Cause.ROUTE_DIMS_UNKNOWN: _NO_ROUTES,
}

# What becomes of the worker's acknowledgement on its way to the gateway.
_TAMPERED: dict[Cause, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    Cause.WORKER_RESPONSE_MISSING_COMMIT_COORDINATES: lambda coords: None,
    Cause.INVALID_WORKER_COMMIT_COORDINATES: lambda coords: {**coords, "cum_len": coords["cum_len"] + 1},
    Cause.LEDGER_ROW_MISSING_CHAIN_HASH: lambda coords: {**coords, "chain_hash": None},
}


@dataclass(frozen=True)
class Gallery:
    """`findings`: family, cause, how, said, detail, call_id, position, valid, rollout_id; one row an exhibit.

    `said` is the rollout's primary cause (null where it kept its vote), `detail` what was said beside it.
    """

    run: runs.Run
    findings: pl.DataFrame

    def show(self, family: str) -> FamilyTable:
        """One family (custody, staging, drift, verification) as a table. Raises KeyError for another name."""
        if family not in FAMILIES:
            raise KeyError(f"{family!r} is no family; there are {', '.join(FAMILIES)}")
        return FamilyTable(self.findings, family)

    def rollout(self, cause: str) -> str:
        """The rollout in which a cause was provoked. Raises KeyError for one that is no exhibit."""
        found = self.findings.filter(cause=str(cause))["rollout_id"]
        if found.is_empty():
            raise KeyError(f"{cause} is no exhibit: {UNREACHED.get(Cause(cause), 'unknown')}")
        return str(found[0])


@contextlib.asynccontextmanager
async def open_gallery(path: Path | None = None) -> AsyncIterator[Gallery]:
    """Play every exhibit, a family a group, and open the run that they leave."""
    script = [
        {**line, "rollout": _plan(family, index).rollout_id}
        for family, index in _PLACES
        for line in FAMILIES[family][index].script
    ]
    script.append({"text": "It rains."})  # a request that continues nothing on record is served without a rollout
    sink = FaultySink()
    # Without memory of its own the worker reads every parent from storage, where an exhibit may have changed it.
    async with (
        _quiet("workbench.capture.core"),
        open_bench(script, path=path, sink=sink, cache_bytes=0, sink_timeout_s=0.3) as bench,
    ):
        _tamper_acknowledgements(bench)
        player = RolloutPlayer(
            gateway_url=bench.url,
            control=bench.control,
            environment=_Stage(bench),
            model="policy",
            timeout_s=20.0,
            request_timeout_s=20.0,
            seed=0,
        )
        try:
            rows = [row for family in FAMILIES for row in await _hang(bench, player, family)]
        finally:
            await player.close()
        yield Gallery(bench.run, pl.DataFrame(rows, infer_schema_length=None))


@contextlib.asynccontextmanager
async def _quiet(name: str) -> AsyncIterator[None]:
    """A worker says in its log what it could not capture; here that is what the reader came for, and is shown."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _hang(bench: Bench, player: RolloutPlayer, family: str) -> list[dict[str, Any]]:
    """Play, spoil and verify one family; one row of findings an exhibit."""
    outcomes: list[RolloutOutcome] = []
    replaced: dict[str, StagedCall] = {}
    for index, exhibit in enumerate(FAMILIES[family]):
        outcome = await player.play(_plan(family, index))
        if exhibit.spoil is not None:
            fetched = await bench.fetch([outcome])
            calls = [call for call in fetched.values() if isinstance(call, StagedCall)]
            ledger = bench.path / "ledger" / f"{outcome.rollout_id}.lineage.jsonl"
            case = Case(outcome, calls, bench.sink, ledger)
            exhibit.spoil(case)
            outcome = case.outcome
            replaced |= case.replaced
        outcomes.append(outcome)
    summaries = await bench.finalise(family, outcomes, damage=lambda staged: staged.update(replaced))
    return [
        _finding(family, exhibit, outcome, summary)
        for exhibit, outcome, summary in zip(FAMILIES[family], outcomes, summaries, strict=True)
    ]


def _finding(family: str, exhibit: Exhibit, outcome: RolloutOutcome, summary: RowSummary) -> dict[str, Any]:
    failure = outcome.failures[0] if outcome.failures else None
    said = summary.cause.value if summary.cause is not None else None
    if said is None and failure is not None:
        said = failure.reason
    detail = summary.detail or (failure.detail if failure is not None else None)
    return {
        "family": family,
        "cause": exhibit.cause.value,
        "how": exhibit.how,
        "said": said,
        "detail": detail,
        "call_id": summary.call_id,
        "position": summary.position,
        "valid": summary.sample_mask == 1,
        "rollout_id": outcome.rollout_id,
    }


def _plan(family: str, index: int) -> RolloutPlan:
    task = _task(_PLACES.index((family, index)))
    return RolloutPlan(run="gallery", group=list(FAMILIES).index(family), index=index, attempt=0, task=task)


def _task(seed: int) -> Task:
    """The exhibit of that number, round and round."""
    family, index = _PLACES[seed % len(_PLACES)]
    return Task(FAMILIES[family][index].cause.value, seed, {"family": family, "index": index})


class _Stage:
    """The environment in which exhibits are rollouts: the task says which one, its agent is the agent."""

    name = "gallery"
    min_calls = 0

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def task(self, seed: int) -> Task:
        return _task(seed)

    async def run(self, client: openai.AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        family, index = task.data["family"], task.data["index"]
        exhibit = FAMILIES[family][index]
        hand = Hand(self._bench, _plan(family, index).rollout_id, client)
        await exhibit.agent(hand)
        # Where a spoiler decides about the last call, no response stands in its way.
        return AgentResult(response=None if exhibit.spoil is not None else hand.last, transcript=[])

    def reward(self, task: Task, result: AgentResult) -> Reward:
        return Reward(1.0)


def _tamper_acknowledgements(bench: Bench) -> None:
    changes = {
        _plan(family, index).rollout_id: _TAMPERED[exhibit.cause]
        for family, exhibits in FAMILIES.items()
        for index, exhibit in enumerate(exhibits)
        if exhibit.cause in _TAMPERED
    }
    ask = bench.gateway.upstream.acknowledgement

    async def acknowledgement(
        rollout_id: str, model_call_id: str, timeout_s: float, told: str | None = None
    ) -> Acknowledgement:
        answer = await ask(rollout_id, model_call_id, timeout_s, told)
        change = changes.get(str((answer.coords or {}).get("rollout_id")))
        return answer if change is None else replace(answer, coords=change(dict(answer.coords)))

    bench.gateway.upstream.acknowledgement = acknowledgement  # type: ignore[method-assign]
